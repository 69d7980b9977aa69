"""Methods that describe each group of modules: compressed-tensors, and NVIDIA's modelopt."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.quantization.scheme import SchemeRule, StoredQuantization, WeightScheme
from triptych.errors import FeatureDisabled

_PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
_WHOLE = ("int-quantized", "float-quantized", "naive-quantized")
_BY_NAME = r"(?:.*\.)?"
"""The beginning of a pattern of names that end with a target."""
_CLASSES = ("Linear", "Embedding", "ParallelLMHead", "FusedMoE", "RoutedExperts")
"""Names of classes that stand for modules in `targets`: every quantized module is of one of them."""


def compressed_tensors(section: ConfigFile) -> StoredQuantization:
    """Read the groups of compressed-tensors, as llm-compressor writes them."""
    section.pass_over("quant_method", "quantization_status", "global_compression_ratio", "version", "run_compressed",
                      "moe_sparsity_config")  # fmt: skip
    _refuse_transforms(section)
    default = section.text("format", default="")
    ignored, patterns = _names(section, "ignore")
    rules = [SchemeRule(pattern, None) for pattern in patterns]
    own: list[SchemeRule] = []
    groups = section.section("config_groups")
    if groups is None:
        section.fail("config_groups", None, "must name the modules that are quantized")
    for name in groups.values:
        group = groups.section(name)
        if group is None:
            groups.fail(name, None, "must be an object")
        own += _group_rules(group, default)
    _check_same(section, own)
    rules += sorted(own, key=_precedence)
    return StoredQuantization(
        "compressed-tensors", "", tuple(rules), ignored=ignored, kv_cache=read_kv_cache(section)
    )


def _refuse_transforms(section: ConfigFile) -> None:
    for key, what in (
        ("sparsity_config", "weights are sparse"),
        ("transform_config", "weights are rotated"),
    ):
        found = section.values.get(key)
        section.pass_over(key)
        if (
            isinstance(found, dict)
            and found.get("format", "dense" if key == "sparsity_config" else None) == "dense"
        ):
            continue
        if found:
            raise FeatureDisabled(
                f"quantization_config.{key}",
                f"{section.path}: {what}, which is not built; use the checkpoint without it",
            )


def _group_rules(group: ConfigFile, default: str) -> list[SchemeRule]:
    """Return a rule for each target of a group."""
    weights = group.section("weights")
    group.pass_over("output_activations")
    layout = group.text("format", default=default)
    targets = group.values.get("targets")
    group.pass_over("targets")
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        group.fail("targets", targets, "must be a list of names")
    scheme = None if weights is None else _scheme(weights, layout, _input_bits(group))
    rules = []
    for name in targets:
        if name in _CLASSES:
            rules.append(SchemeRule("", scheme))
        elif name.startswith("re:"):
            rules.append(SchemeRule(name[3:], scheme, is_required=scheme is not None))
        else:
            rules.append(SchemeRule(f"{_BY_NAME}{re.escape(name)}$", scheme, is_required=scheme is not None))
    return rules


def _precedence(rule: SchemeRule) -> int:
    """Return the place of a group's rule: names count before patterns, and these before classes."""
    return 0 if rule.pattern.startswith(_BY_NAME) else 1 if rule.pattern else 2


def _check_same(section: ConfigFile, rules: list[SchemeRule]) -> None:
    """
    Raises:
        ModelError: Two groups give one target different schemes; names both.
    """
    found: dict[str, SchemeRule] = {}
    for rule in rules:
        other = found.setdefault(rule.pattern, rule)
        if other.scheme != rule.scheme:
            what = rule.pattern.removeprefix(_BY_NAME) or "one class of modules"
            section.fail("config_groups", what, f"has two schemes, {other.scheme} and {rule.scheme}")


def _input_bits(group: ConfigFile) -> int:
    inputs = group.section("input_activations")
    if inputs is None:
        return 16
    inputs.pass_over(*inputs.values)  # inputs are rounded as `model.activation_bits` says
    return inputs.integer("num_bits", default=8)


def _scheme(weights: ConfigFile, layout: str, input_bits: int) -> WeightScheme:
    weights.pass_over("dynamic", "observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")
    bits, kind = weights.integer("num_bits", default=8), weights.text("type", default="int")
    is_symmetric = weights.boolean("symmetric", default=True)
    group, rows = _shared(weights)
    table = ""
    if kind == "float":
        if (bits, is_symmetric) not in ((8, True), (4, True)):
            weights.fail("num_bits", bits, "must be 8 or 4 of symmetric floats")
        table = "e4m3" if bits == 8 else "fp4"
        if layout.startswith("mxfp") and layout != "mxfp4-pack-quantized":
            _refuse_format(weights, layout)
    elif kind != "int" or not 2 <= bits <= 8:
        weights.fail("type", kind, f"of {bits} bits must be int, of 2 to 8 bits, or float")
    if layout in _WHOLE and bits == 8:
        layout = "float-quantized" if table else "int-quantized"
    elif layout not in _PACKED or (layout == "pack-quantized") == bool(table):
        _refuse_format(weights, layout)
    return WeightScheme(layout, bits, group, rows, table, is_symmetric, input_bits)


def _refuse_format(weights: ConfigFile, layout: str) -> None:
    raise FeatureDisabled(
        f"quantization_config.format = {layout or 'none'}",
        f"{weights.path}: compressed-tensors is read in the forms {', '.join((*_PACKED, *_WHOLE))}; the others "
        "and combinations with other types of weights are not built",
    )


def _shared(weights: ConfigFile) -> tuple[int, int]:
    """Return how many inputs and outputs share a scale; 0: all."""
    size = weights.optional_integer("group_size") if weights.values.get("group_size") != -1 else None
    weights.pass_over("group_size")
    strategy = weights.text("strategy", default="group" if size else "tensor")
    block = weights.values.get("block_structure")
    weights.pass_over("block_structure")
    if strategy in ("group", "tensor_group"):
        if not size:
            weights.fail("group_size", size, f"must be a number of inputs, since the strategy is {strategy}")
        return size, 1
    if strategy == "block":
        rows, columns = map(int, weights.numbers("block_structure", length=2))
        if min(rows, columns) < 1:
            weights.fail("block_structure", block, "must be two positive numbers")
        return columns, rows
    if strategy not in ("tensor", "channel"):
        weights.fail("strategy", strategy, "is none of tensor, channel, group, tensor_group, block")
    return 0, int(strategy == "channel")


def _names(section: ConfigFile, key: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the names of a list, and the regular expressions in it; names of classes match nothing."""
    values = section.values.get(key) or []
    section.pass_over(key)
    if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
        section.fail(key, values, "must be a list of names")
    plain = tuple(name for name in values if not name.startswith("re:"))
    return plain, [name[3:] for name in values if name.startswith("re:")]


def read_kv_cache(section: ConfigFile) -> str:
    """Return the precision of keys and values that a checkpoint was made for; empty: it says nothing."""
    found: Any = section.values.get("kv_cache_scheme")
    section.pass_over("kv_cache_scheme")
    if found is None:
        return ""
    if isinstance(found, str):  # AutoFP8's
        return "8-bit float"
    if not isinstance(found, dict):
        section.fail("kv_cache_scheme", found, "must be an object")
    bits, kind = found.get("num_bits", 8), found.get("type", "float")
    if type(bits) is not int or not isinstance(kind, str):
        section.fail("kv_cache_scheme", found, "must have a number of bits and a type")
    return f"{bits}-bit {kind[:20]}"


_MODELOPT_SCHEMES = {
    "FP8": WeightScheme("float-quantized", 8, 0, 0, "e4m3", input_bits=8),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightScheme("float-quantized", 8, 0, 1, "e4m3", input_bits=8),
    "NVFP4": WeightScheme("nvfp4", 4, 16, 1, "fp4", input_bits=4),
    "W4A16_NVFP4": WeightScheme("nvfp4", 4, 16, 1, "fp4"),
}


def modelopt(section: ConfigFile) -> StoredQuantization:
    """Read modelopt's algorithms, from config.json or from hf_quant_config.json."""
    section.pass_over("quant_method", "producer", "config_groups", "version")
    inner = section.section("quantization") or section
    algorithm = inner.text("quant_algo").upper()
    scheme = _MODELOPT_SCHEMES.get(algorithm)
    if scheme is None:
        raise FeatureDisabled(
            f"quant_algo = {algorithm}",
            f"{section.path}: of modelopt's only {', '.join(_MODELOPT_SCHEMES)} are read",
        )
    size = inner.optional_integer("group_size")
    if size and scheme.group and size != scheme.group:
        inner.fail("group_size", size, f"must be {scheme.group} with {algorithm}")
    inner.pass_over("kv_cache_quant_algo", "has_zero_point", "pre_quant_scale", "quantized_layers")
    cache = inner.values.get("kv_cache_quant_algo")
    kv_cache = {None: "", "FP8": "8-bit float"}.get(cache if cache is None else str(cache), str(cache)[:20])
    rules = []
    for key in ("exclude_modules", "ignore"):
        names, patterns = _names(inner, key)
        rules += [SchemeRule(fnmatch.translate(name), None) for name in names]
        rules += [SchemeRule(pattern, None) for pattern in patterns]
    return StoredQuantization(
        "modelopt", "", (*rules, SchemeRule("", scheme)), kv_cache=kv_cache or read_kv_cache(inner)
    )
