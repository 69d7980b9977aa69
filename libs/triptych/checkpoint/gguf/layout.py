"""The names that .gguf files give to tensors, and what their converters have done to the numbers.

A .gguf file has one name for each part of a model, whatever its family. So has this project: `mlp.up_proj`.
One table leads from the former to the latter. Where a file joins several projections in a tensor, `file_names` says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.gguf.header import TensorInfo
from triptych.checkpoint.gguf.index import GgufTensor
from triptych.checkpoint.tensor_names import FusedTensor, TensorNames
from triptych.errors import ModelError

_ENDS = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embed_norm",
    "token_types": "model.embed_token_types",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
    "cls": "head.dense",
    "cls.norm": "head.norm",
    "cls.output": "classifier",
}
_EXPERTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "gate_up": "gate_up_proj"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
    **{f"ffn_{part}_exps": f"mlp.experts.{name}" for part, name in _EXPERTS.items()},
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{name}" for part, name in _EXPERTS.items()},
    "ssm_in": "mixer.in_proj",
    "ssm_out": "mixer.out_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_norm": "mixer.norm",
    "ssm_dt_norm": "mixer.dt_layernorm",
    "ssm_b_norm": "mixer.b_layernorm",
    "ssm_c_norm": "mixer.c_layernorm",
    "shortconv.in_proj": "mixer.in_proj",
    "shortconv.conv": "mixer.conv1d",
    "shortconv.out_proj": "mixer.out_proj",
}
_WITHOUT_ENDING = (
    "self_attn.sinks",
    "mlp.gate.e_score_correction_bias",
    "mixer.A_log",
    "mixer.D",
    "layer_scalar",
)
"""Our names of tensors that are no `.weight` and no `.bias`."""

_MAX_FURTHER_LAYERS = 64  # behind the last one; models have one or two

_TWO_NORMS = {"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}
"""Names where attention and MLP of one layer have a norm of the same states each."""

_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+?)(\.weight|\.bias)?")
_END_NAME = re.compile(r"(.+?)(\.weight|\.bias)?")

ROPE_FREQUENCIES, LONG_FACTORS, SHORT_FACTORS = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
)
"""Tensors of divisors of the rotary frequencies, which become keys of config.json."""

_FUSED = (
    FusedTensor("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    FusedTensor("mixer.in_qkv", ("mixer.in_q", "mixer.in_k", "mixer.in_v")),
    FusedTensor("mixer.conv_qkv", ("mixer.conv_q", "mixer.conv_k", "mixer.conv_v")),
    FusedTensor("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    FusedTensor(
        "mlp.shared_experts.gate_up_proj", ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    ),
    FusedTensor(
        "mlp.experts.gate_up_proj", ("mlp.experts.gate_proj", "mlp.experts.up_proj"), of_experts=True
    ),
    *(
        FusedTensor(f"mlp.experts.{name}", (f"mlp.experts.{name}",), of_experts=True)
        for name in _EXPERTS.values()
    ),
)


@dataclass(frozen=True, slots=True)
class TensorRules:
    """The ways of one family's converter that others do not have."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names of the file -> ours, where the table above does not hold."""
    rotated_pairs: bool = False
    """Whether rows of queries and keys are ordered for a rotary embedding of neighbours: see `permuted_heads`."""
    spread_heads: bool = False
    """Whether heads of values of a gated delta net are in another order: see `GgufTensor.spread_heads`."""
    norms_plus_one: Callable[[str], bool] | None = None
    """Says of our names whether 1 was added to the weight of that norm; None: it never was."""
    layer_numbers: Mapping[str, str] = field(default_factory=dict)
    """Our name within a layer of a tensor of one number -> key of the metadata that lists those of all layers."""


def our_name(gguf_name: str, names: Collection[str], rules: TensorRules, *, architecture: str) -> str:
    """Return our name of a tensor.

    Args:
        names: Those of all tensors of the file.

    Raises:
        ModelError: It has no place in the model.
    """
    if layer := _LAYER_NAME.fullmatch(gguf_name):
        index, stem, ending = layer[1], layer[2], layer[3] or ""
        ours = rules.renamed.get(stem) or _LAYER.get(stem)
        if stem == "ffn_norm" and f"blk.{index}.post_attention_norm.weight" in names:
            ours = "pre_feedforward_layernorm"
        if stem == "attn_norm" and not _mixes(index, names):
            ours = "post_attention_layernorm"
        if f"blk.{index}.attn_norm_2.weight" in names and stem in _TWO_NORMS:
            ours = _TWO_NORMS[stem]
        if stem.endswith("norm") and not ending:  # as Falcon-H1's converter calls one
            ending = ".weight"
        prefix = f"model.layers.{index}."
    else:
        (stem, ending), prefix = _END_NAME.fullmatch(gguf_name).groups(default=""), ""  # type: ignore[union-attr]
        ours = rules.renamed.get(stem) or _ENDS.get(stem)
    if ours is None:
        raise ModelError(f"gguf: tensor {gguf_name!r} has no place in {architecture}")
    if ours.endswith("dt_proj") and ending == ".bias" and f"blk.{index}.ssm_dt.weight" not in names:
        ours, ending = ours.replace("dt_proj", "dt_bias"), ""
    return f"{prefix}{ours}" if ours in _WITHOUT_ENDING else f"{prefix}{ours}{ending}"


def _mixes(index: str, names: Collection[str]) -> bool:
    """Return whether a layer has attention or another mixer of tokens."""
    return any(
        f"blk.{index}.{stem}.weight" in names for stem in ("attn_output", "ssm_out", "shortconv.out_proj")
    )


def file_names(names: Iterable[str], of_checkpoint: TensorNames) -> TensorNames:
    """Return how a .gguf file with tensors of these names of ours joins several in one.

    Args:
        of_checkpoint: The family's, for tensors that .gguf files have taken over as they are.
    """
    modules = {re.sub(r"^model\.layers\.\d+\.", "", name.rpartition(".")[0]) for name in names}
    taken_over = [fused for fused in of_checkpoint.fused if fused.interleaved == "groups"]
    of_mixers = [
        replace(fused, name=f"mixer.{fused.name.rpartition('.')[2]}")
        for fused in of_checkpoint.fused
        if fused not in taken_over and all(part.startswith("mixer.") for part in fused.parts)
    ]
    fused = (fused for fused in (*_FUSED, *taken_over, *of_mixers) if fused.name in modules)
    return TensorNames(fused=tuple(fused), ignored=of_checkpoint.ignored)


def index_tensors(
    parts: Sequence[Mapping[str, TensorInfo]], config: Mapping[str, Any], rules: TensorRules
) -> list[GgufTensor]:
    """Return where each tensor is, under our name.

    Args:
        parts: The tensors of each file, by their names in it.
        config: config.json of the model.

    Raises:
        ModelError: One has no place in the model.
    """
    names = frozenset(name for part in parts for name in part)
    num_layers = _num_layers(config)
    further = tuple(f"blk.{index}." for index in range(num_layers, num_layers + _MAX_FURTHER_LAYERS))
    entries = []
    for part, tensors in enumerate(parts):
        for info in tensors.values():
            if info.name in (ROPE_FREQUENCIES, LONG_FACTORS, SHORT_FACTORS) or info.name.startswith(further):
                continue  # taken up into config.json; of layers that predict further tokens
            name = our_name(info.name, names, rules, architecture=config["architectures"][0])
            entries.append(
                GgufTensor(
                    name=name,
                    gguf_name=info.name,
                    type=info.type.name,
                    shape=_our_shape(name, info.shape),
                    offset=info.offset,
                    size=info.size,
                    permuted_heads=_permuted_heads(name, config) if rules.rotated_pairs else 0,
                    spread_heads=_spread_heads(name, config) if rules.spread_heads else None,
                    change=_change(name, rules),
                    part=part,
                )
            )
    return entries


def index_numbers(metadata: ConfigFile, config: Mapping[str, Any], rules: TensorRules) -> list[GgufTensor]:
    """Return the tensors that the file has in its metadata.

    Raises:
        ModelError: A list of them is missing, or is no number for each layer; names the key.
    """
    num_layers = _num_layers(config)
    return [
        GgufTensor(f"model.layers.{index}.{name}", key, "F32", (1,), offset=0, size=4, number=number)
        for name, key in rules.layer_numbers.items()
        for index, number in enumerate(metadata.numbers(key, length=num_layers))
    ]


def _num_layers(config: Mapping[str, Any]) -> int:
    return next(config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if config.get(key))


def _permuted_heads(name: str, config: Mapping[str, Any]) -> int:
    heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
    return heads.get(name.split(".")[-2]) or 0 if ".self_attn." in name else 0


def _spread_heads(name: str, config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return what `GgufTensor.spread_heads` says of a tensor."""
    if ".mixer." not in name:
        return None
    part = name.partition(".mixer.")[2].partition(".")[0]
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if part in ("in_a", "in_b", "A_log", "dt_bias"):
        elements = 1
    elif part in ("in_qkv", "conv_qkv", "in_z", "out_proj"):
        elements = config["linear_value_head_dim"]
    else:
        return None
    return None if values == keys else (keys, values // keys, elements)


def _change(name: str, rules: TensorRules) -> str:
    if name.endswith("mixer.A_log"):
        return "minus_exp"
    is_shifted = rules.norms_plus_one is not None and rules.norms_plus_one(name)
    return "plus_one" if is_shifted else ""


def _our_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without axes of length 1 that only the file has, and with those that only our layers have."""
    if ".mixer.conv" in name and name.endswith(".weight"):
        return shape[0], 1, *shape[1:]
    if name.endswith(("mixer.A_log", "mixer.D")) and shape[-1:] == (1,):
        return shape[:-1]
    if name.endswith("mixer.norm.weight"):
        return (math.prod(shape),)
    return shape
