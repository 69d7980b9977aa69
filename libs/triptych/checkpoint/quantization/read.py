"""Finds out how a checkpoint's weights are quantized: a reader for each published method.

| method                     | said by                                                                            |
|----------------------------|------------------------------------------------------------------------------------|
| gptq, awq, auto-round      | `quantization_config` of config.json; gptq also in quantize_config.json            |
| fp8, fbgemm_fp8, mxfp4     | `quantization_config`                                                              |
| bitsandbytes               | `quantization_config`; the details are beside each tensor                          |
| compressed-tensors         | `quantization_config`, with a group of modules for each scheme                     |
| modelopt                   | `quantization_config`, or hf_quant_config.json                                     |
| torchao                    | `quantization_config`; the details are in the headers of the weight files          |

An installed package adds a method by an entry point of `triptych.quantization`, named as `quant_method` is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.quantization.config_groups import compressed_tensors, modelopt, read_kv_cache
from triptych.checkpoint.quantization.scheme import SchemeRule, StoredQuantization, WeightScheme
from triptych.checkpoint.quantization.torchao import torchao
from triptych.errors import FeatureDisabled, ModelError

ENTRY_POINT_GROUP = "triptych.quantization"
"""Entry points of installed packages that read a method: name = `quant_method`, value = `module:function`, from the
section of the config to a `StoredQuantization`."""

KEY = "quantization_config"
_GPTQ_FILE = "quantize_config.json"
_MODELOPT_FILE = "hf_quant_config.json"

_GPTQ_BITS = (2, 3, 4, 8)
_ABOUT_WRITING_GPTQ = (
    "act_group_aware", "adapter", "auto_map", "backend", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "desc_act", "disable_exllama",
    "exllama_config", "is_marlin_format", "lm_head", "max_input_length", "meta", "model_file_base_name",
    "model_name_or_path", "module_name_preceding_first_block", "modules_in_block_to_quantize", "mse", "offload_to_disk",
    "pad_token_id", "quant_method", "method", "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16",
    "use_exllama",
)  # fmt: skip
"""Keys of GPTQ that say how codes were chosen, or which kernel another engine takes."""


def read_quantization(directory: Path, config: ConfigFile) -> StoredQuantization | None:
    """Return how the weights of a checkpoint are quantized; None if it does not say that they are.

    Args:
        config: config.json, of which the section is noted as read.

    Raises:
        FeatureDisabled: A scheme is known and not served; names it.
        ModelError: The method is not known, or a key is missing, odd or not known; names file, key and value.
    """
    section = config.section(KEY)
    if section is not None:
        return _read_section(section, f"{config.path.name}: {KEY}")
    text = config.values.get("text_config")
    if isinstance(text, dict) and isinstance(text.get(KEY), dict):
        section = ConfigFile(config.path, text[KEY], section=f"text_config.{KEY}.")
        found = _read_section(section, f"{config.path.name}: text_config.{KEY}")
        section.refuse_unread()
        return found
    for name, read in ((_MODELOPT_FILE, modelopt), (_GPTQ_FILE, gptq)):
        if (directory / name).is_file():
            file = ConfigFile.read(directory / name)
            found = read(file)
            file.refuse_unread()
            return replace(found, source=name)
    return None


def _read_section(section: ConfigFile, source: str) -> StoredQuantization:
    method = section.text("quant_method")
    if (reader := _READERS.get(method)) is not None:
        return replace(reader(section), source=source)
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if (point := points.get(method)) is None:
        known = ", ".join(sorted((*_READERS, *points)))
        section.fail("quant_method", method, f"is not supported, only {known}; use plain or GGUF weights")
    try:
        found = point.load()(section)
    except Exception as error:  # of a package that is not ours
        raise ModelError(
            f"{section.path}: {point.value} of {ENTRY_POINT_GROUP} cannot read {KEY}: {error!r}"
        ) from error
    if not isinstance(found, StoredQuantization):
        raise ModelError(
            f"{section.path}: {point.value} of {ENTRY_POINT_GROUP} returns {type(found).__name__}, not "
            "StoredQuantization"
        )
    return replace(found, source=source)


def gptq(section: ConfigFile) -> StoredQuantization:
    """Read GPTQ as AutoGPTQ and GPTQModel write it."""
    section.pass_over(*_ABOUT_WRITING_GPTQ)
    layout = section.text("checkpoint_format", default=section.text("format", default="gptq"))
    if layout not in ("gptq", "gptq_v2"):
        raise FeatureDisabled(
            f"{KEY}.checkpoint_format = {layout}",
            f"{section.path}: GPTQ is read in the forms gptq and gptq_v2; convert it with the tool that wrote it",
        )
    section.expect("pack_dtype", "int32", otherwise="codes are packed into other words than of 32 bits")
    section.expect("rotation", "", otherwise="weights are rotated")
    values = {"bits": section.integer("bits"), **_gptq_values(section)}
    rules = []
    for pattern, changes in _dynamic(section).items():
        own = None if pattern.startswith("-:") else _gptq_scheme(section, layout, {**values, **changes})
        name = pattern[2:] if pattern.startswith(("+:", "-:")) else pattern
        rules.append(SchemeRule(name, own, is_required=own is not None))
    rules.append(SchemeRule("", _gptq_scheme(section, layout, values)))
    return StoredQuantization("gptq", KEY, tuple(rules))


def _gptq_values(section: ConfigFile) -> dict[str, Any]:
    return {
        "group_size": section.integer("group_size", default=128, minimum=-1),
        "sym": section.boolean("sym", default=True),
    }


def _dynamic(section: ConfigFile) -> dict[str, dict[str, Any]]:
    """Return GPTQModel's schemes of single modules: pattern -> the values that differ."""
    found = section.values.get("dynamic")
    section.pass_over("dynamic")
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(own, dict | bool) for own in found.values()):
        section.fail("dynamic", found, "must be an object of objects")
    return {pattern: own if isinstance(own, dict) else {} for pattern, own in found.items()}


def _gptq_scheme(section: ConfigFile, layout: str, values: dict[str, Any]) -> WeightScheme:
    bits, group, is_symmetric = values["bits"], values["group_size"], values["sym"]
    if bits not in _GPTQ_BITS:
        section.fail("bits", bits, f"must be one of {', '.join(map(str, _GPTQ_BITS))}")
    if type(group) is not int or not (group == -1 or 1 <= group <= 1 << 20):
        section.fail("group_size", group, "must be -1, for whole rows, or a number of inputs")
    if type(is_symmetric) is not bool:
        section.fail("sym", is_symmetric, "must be true or false")
    return WeightScheme(layout, bits, max(group, 0), is_symmetric=is_symmetric)


def awq(section: ConfigFile) -> StoredQuantization:
    """Read AWQ as AutoAWQ writes it."""
    section.pass_over("quant_method", "backend", "modules_to_not_convert", "do_fuse", "exllama_config",
                      "fuse_max_seq_len", "modules_to_fuse")  # fmt: skip
    version = section.text("version", default="gemm").lower()
    if version != "gemm":
        raise FeatureDisabled(
            f"{KEY}.version = {version}",
            f"{section.path}: AWQ is read in the form gemm; convert it with AutoAWQ",
        )
    bits = section.integer("bits")
    if bits != 4:
        section.fail("bits", bits, "must be 4, the only number of bits that AWQ's form has")
    group = section.integer("group_size", default=128, minimum=-1)
    has_zeros = section.boolean("zero_point", default=True)
    scheme = WeightScheme("awq", bits, max(group, 0), is_symmetric=not has_zeros)
    return StoredQuantization("awq", KEY, (SchemeRule("", scheme),))


def auto_round(section: ConfigFile) -> StoredQuantization:
    """Read AutoRound's codes, which are packed as GPTQ's or AWQ's."""
    section.pass_over(
        "quant_method", "autoround_version", "batch_size", "block_name_to_quantize", "data_type", "dataset",
        "enable_quanted_input", "gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr", "minmax_lr",
        "nsamples", "amp", "seqlen", "to_quant_block_names", "train_bs", "scale_dtype", "act_bits", "super_bits",
        "super_group_size", "enable_minmax_tuning", "enable_norm_bias_tuning", "quant_block_list", "backend",
    )  # fmt: skip
    section.expect("extra_config", {}, otherwise="some modules have a scheme of their own")
    packing = section.text("packing_format", default="auto_round:auto_gptq").rpartition(":")[2]
    layout = {"auto_gptq": "gptq", "gptq": "gptq", "auto_awq": "awq", "awq": "awq"}.get(packing)
    if layout is None:
        raise FeatureDisabled(
            f"{KEY}.packing_format = {packing}",
            f"{section.path}: AutoRound is read as auto_gptq and auto_awq",
        )
    values = {"bits": section.integer("bits"), **_gptq_values(section)}
    if layout == "awq" and values["bits"] != 4:
        section.fail("bits", values["bits"], "must be 4, the only number of bits that AWQ's form has")
    scheme = _gptq_scheme(section, layout, values)
    return StoredQuantization("auto-round", KEY, (SchemeRule("", scheme),))


def fp8(section: ConfigFile) -> StoredQuantization:
    """Read 8-bit floats in blocks, as DeepSeek and Qwen publish them, or with a scale per tensor or output."""
    section.pass_over(
        "quant_method", "activation_scheme", "modules_to_not_convert", "ignored_layers", "dequantize"
    )
    section.expect("fmt", "e4m3", otherwise="weights are 8-bit floats of another kind")
    scale = section.text("scale_fmt", default="float")
    if scale not in ("float", "ue8m0"):
        section.fail("scale_fmt", scale, "must be float or ue8m0")
    block = section.values.get("weight_block_size")
    section.pass_over("weight_block_size")
    rows, columns = (0, 0) if block is None else map(int, section.numbers("weight_block_size", length=2))
    if block is not None and min(rows, columns) < 1:
        section.fail("weight_block_size", block, "must be two positive numbers")
    scheme = WeightScheme("fp8", 8, columns, rows, table="e4m3", input_bits=8)
    return StoredQuantization("fp8", KEY, (SchemeRule("", scheme),), kv_cache=read_kv_cache(section))


def fbgemm_fp8(section: ConfigFile) -> StoredQuantization:
    """Read 8-bit floats with a scale per output, as Meta publishes them."""
    section.pass_over("quant_method", "activation_scale_ub", "modules_to_not_convert")
    scheme = WeightScheme("fp8", 8, table="e4m3", input_bits=8)
    return StoredQuantization("fbgemm_fp8", KEY, (SchemeRule("", scheme),))


def mxfp4(section: ConfigFile) -> StoredQuantization:
    """Read the stacked experts of GPT-OSS."""
    section.pass_over("quant_method", "modules_to_not_convert", "dequantize")
    scheme = WeightScheme("mxfp4", 4, 32, table="fp4")
    return StoredQuantization("mxfp4", KEY, (SchemeRule("", scheme),))


def bitsandbytes(section: ConfigFile) -> StoredQuantization:
    """Read codes of 4 bits in blocks, or integers of 8 bits with a scale per output."""
    section.pass_over(
        "quant_method", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload",
        "llm_int8_has_fp16_weight", "llm_int8_skip_modules", "llm_int8_threshold",
    )  # fmt: skip
    storage = section.text("bnb_4bit_quant_storage", default="uint8")
    is_4_bit = section.boolean("load_in_4bit", default=False)
    if is_4_bit == section.boolean("load_in_8bit", default=False):
        section.fail("load_in_4bit", is_4_bit, "must differ from load_in_8bit")
    if not is_4_bit:
        scheme = WeightScheme("llm-int8", 8)
        return StoredQuantization("bitsandbytes", KEY, (SchemeRule("", scheme),))
    kind = section.text("bnb_4bit_quant_type", default="fp4")
    if kind not in ("nf4", "fp4"):
        section.fail("bnb_4bit_quant_type", kind, "must be nf4 or fp4")
    if storage not in ("uint8", "bfloat16", "float16", "float32"):
        section.fail("bnb_4bit_quant_storage", storage, "must be uint8, bfloat16, float16 or float32")
    scheme = WeightScheme("bnb", 4, table=kind if kind == "nf4" else "bnb_fp4")
    return StoredQuantization("bitsandbytes", KEY, (SchemeRule("", scheme),))


_READERS: dict[str, Callable[[ConfigFile], StoredQuantization]] = {
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "mxfp4": mxfp4,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "torchao": torchao,
}
