"""Parts that architectures of .gguf files share: sizes, rotary embedding, windows, experts."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from triptych.checkpoint.config_file import ConfigFile
from triptych.checkpoint.gguf.header import TensorInfo
from triptych.checkpoint.gguf.layout import LONG_FACTORS, ROPE_FREQUENCIES, SHORT_FACTORS
from triptych.errors import ModelError

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A file's facts about the model."""

    keys: ConfigFile
    """Those of its architecture, without their prefix."""
    tensors: Mapping[str, TensorInfo]
    floats: Callable[[str], list[float]]
    """Reads a small tensor of float32."""

    @property
    def num_layers(self) -> int:
        """Layers of the model itself, without those that predict further tokens."""
        extra = self.keys.integer("nextn_predict_layers", default=0, minimum=0)
        return self.keys.integer("block_count") - extra

    @property
    def head_dim(self) -> int:
        if self.keys.has("attention.key_length"):
            return self.keys.integer("attention.key_length")
        return max(self.keys.integer("embedding_length") // self.keys.integer("attention.head_count"), 1)

    def per_layer(self, key: str) -> list[int]:
        """Return a number for each layer, of which files have one or a list."""
        value = self.keys.values.get(key)
        self.keys.pass_over(key)
        if not isinstance(value, list):
            return [self.keys.integer(key, minimum=0)] * self.num_layers
        if len(value) < self.num_layers or any(type(each) is not int or each < 0 for each in value):
            self.keys.fail(key, value, f"must be a number for each of the {self.num_layers} layers")
        return value[: self.num_layers]

    def flags(self, key: str, *, default: list[bool]) -> list[bool]:
        """Return true or false for each layer."""
        value = self.keys.values.get(key, default)
        self.keys.pass_over(key)
        if (
            not isinstance(value, list)
            or len(value) < self.num_layers
            or any(type(each) is not bool for each in value)
        ):
            self.keys.fail(key, value, f"must be true or false for each of {self.num_layers} layers")
        return value[: self.num_layers]

    def layers_with(self, stem: str) -> list[int]:
        """Return the layers that have a tensor of this name."""
        return [index for index in range(self.num_layers) if f"blk.{index}.{stem}" in self.tensors]

    def has_all(self, *stems: str) -> bool:
        """Return whether layers have the biases of these projections; a config can say no more than all or none.

        Raises:
            ModelError: Some are there and others are not; names both.
        """
        found = {
            stem: bool(self.layers_with(f"{stem}.bias"))
            for stem in stems
            if self.layers_with(f"{stem}.weight")
        }
        if any(found.values()) and not all(found.values()):
            have, lack = ([stem for stem in found if found[stem] is is_there] for is_there in (True, False))
            raise ModelError(f"{self.keys.path}: biases of {have} but not of {lack} are not supported")
        return any(found.values())

    def number(self, key: str, *, default: float | None = None) -> float:
        """Return a number as it was meant before it became a float32."""
        return shortest_float32(self.keys.number(key, default=default))


def shortest_float32(value: float) -> float:
    """Return 1e-05 for 9.999999747378752e-06: the number that was meant, when it was stored as float32."""
    if not math.isfinite(value):
        return value
    for digits in range(1, 10):
        rounded = float(f"{value:.{digits}g}")
        if abs(rounded) < 3e38 and struct.pack("<f", rounded) == struct.pack("<f", value):
            return rounded
    return value


def attention(
    model: GgufModel, *, eps: str = "rms_norm_eps", rope: Config | None = None, heads: int = 0
) -> Config:
    """Return the sizes of attention and MLP, the norms' epsilon and the rotary embedding.

    Args:
        eps: The family's key of the epsilon; the file has one of two.
        rope: The embedding, where it is not the same for all layers.
        heads: Query heads, where layers differ in them; 0: they do not.
    """
    keys = model.keys
    heads = heads or keys.integer("attention.head_count")
    stored_eps = (
        "attention.layer_norm_rms_epsilon"
        if eps in ("rms_norm_eps", "norm_eps")
        else "attention.layer_norm_epsilon"
    )
    if not keys.has(stored_eps):
        stored_eps = "attention.layer_norm_rms_epsilon"
    kv_heads = (
        {number for number in model.per_layer("attention.head_count_kv") if number}
        if keys.has("attention.head_count_kv")
        else {heads}
    )
    widths = {number for number in model.per_layer("feed_forward_length") if number}
    for name, found in (("attention.head_count_kv", kv_heads), ("feed_forward_length", widths)):
        if len(found) > 1:
            keys.fail(name, sorted(found), "must be one number: layers that differ are not supported")
    value_length = keys.integer("attention.value_length", default=model.head_dim)
    if value_length != model.head_dim:
        keys.fail(
            "attention.value_length",
            value_length,
            f"differs from the head dimension {model.head_dim}, which is not supported",
        )
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads, default=heads),
        "head_dim": model.head_dim,
        "intermediate_size": max(widths, default=None),
        "max_position_embeddings": keys.integer("context_length"),
        eps: model.number(stored_eps),
        "rope_parameters": read_rope(model, model.head_dim) if rope is None else rope,
    }


def read_rope(
    model: GgufModel, head_dim: int, *, base: str = "rope.freq_base", default_base: float = 10000.0
) -> Config:
    """Return the rotary embedding, with its scaling.

    Divisors of the frequencies, by which llama.cpp keeps Llama 3's scaling and longrope, are a longrope here.
    """
    keys = model.keys
    rope: Config = {"rope_type": "default", "rope_theta": model.number(base, default=default_base)}
    rotated = keys.integer("rope.dimension_count", default=head_dim)
    if rotated > head_dim or rotated % 2:
        keys.fail("rope.dimension_count", rotated, f"must be even and at most the head dimension {head_dim}")
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = keys.text("rope.scaling.type", default="none")
    length = keys.integer("context_length")
    original = keys.integer("rope.scaling.original_context_length", default=length)
    factor = model.number("rope.scaling.factor", default=1.0)
    attention_factor = model.number("rope.scaling.attn_factor", default=0.0)
    frequencies = [name for name in (ROPE_FREQUENCIES, LONG_FACTORS, SHORT_FACTORS) if name in model.tensors]
    if ROPE_FREQUENCIES in frequencies:
        if kind != "none" or len(frequencies) > 1:
            keys.fail("rope.scaling.type", kind, f"beside {', '.join(frequencies)} is not supported")
        divisors = model.floats(ROPE_FREQUENCIES)
        return rope | {
            "rope_type": "longrope",
            "long_factor": divisors,
            "short_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": max(length, 2),
        }
    if frequencies:
        if len(frequencies) != 2 or kind not in ("none", "longrope"):
            keys.fail("rope.scaling.type", kind, f"beside {', '.join(frequencies)} only is not supported")
        return rope | {
            "rope_type": "longrope",
            "long_factor": model.floats(LONG_FACTORS),
            "short_factor": model.floats(SHORT_FACTORS),
            "attention_factor": attention_factor,
            "original_max_position_embeddings": original,
        }
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return rope | _yarn(model, factor, original, attention_factor)
    if kind != "none":
        keys.fail("rope.scaling.type", kind, "is not supported")
    if factor not in (0.0, 1.0):
        keys.fail("rope.scaling.factor", factor, "has no meaning without rope.scaling.type")
    return rope


def _yarn(model: GgufModel, factor: float, original: int, attention_factor: float) -> Config:
    model.keys.expect("rope.scaling.yarn_ext_factor", 1.0, otherwise="yarn extrapolates by a part only")
    own_factor = model.number("rope.scaling.yarn_attn_factor", default=0.0) or attention_factor
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": model.number("rope.scaling.yarn_beta_fast", default=32.0),
        "beta_slow": model.number("rope.scaling.yarn_beta_slow", default=1.0),
        **({"attention_factor": own_factor} if own_factor else {}),
    }


def named(architecture: str, **values: Any) -> Config:
    return {"architectures": [architecture], **values}


def biases(model: GgufModel) -> Config:
    return {
        "attention_bias": model.has_all("attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": model.has_all("ffn_gate", "ffn_up", "ffn_down"),
    }


def qkv_bias(model: GgufModel) -> Config:
    return {"attention_bias": model.has_all("attn_q", "attn_k", "attn_v")}


def mlp_width(model: GgufModel) -> int | None:
    """Return the columns of the MLPs by their tensors, as some converters write another number under the key.

    None: no layer has one.
    """
    return next(
        (
            model.tensors[f"blk.{index}.ffn_up.weight"].shape[0]
            for index in model.layers_with("ffn_up.weight")
        ),
        None,
    )


def layer_types(model: GgufModel, *, every: int = 0) -> Config:
    """Return the window and the layers that have it.

    Args:
        every: All layers but every so manieth have the window, where the file has no list; 0: all have it.
    """
    keys = model.keys
    window = keys.integer("attention.sliding_window", default=0, minimum=0)
    pattern = keys.values.get("attention.sliding_window_pattern")
    keys.pass_over("attention.sliding_window_pattern")
    if not window:
        return {"layer_types": ["full_attention"] * model.num_layers}
    if type(pattern) is int and pattern > 0:
        every, pattern = pattern, None
    if pattern is None:
        pattern = [not every or (index + 1) % every != 0 for index in range(model.num_layers)]
    if not isinstance(pattern, list) or len(pattern) < model.num_layers:
        keys.fail("attention.sliding_window_pattern", pattern, f"must be a list of {model.num_layers}")
    kinds = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
    return {"sliding_window": window, "layer_types": kinds[: model.num_layers]}


def by_type(types: Config, full: Config, sliding: Config) -> Config:
    """Return the rotary embeddings of the types of layers that there are."""
    ropes = {"full_attention": full, "sliding_attention": sliding}
    return {kind: rope for kind, rope in ropes.items() if kind in types["layer_types"]}


def experts(
    model: GgufModel, count: str, chosen: str = "num_experts_per_tok", width: str = "moe_intermediate_size"
) -> Config:
    """Return the sizes of a mixture, under a family's keys."""
    keys = model.keys
    return {
        count: keys.integer("expert_count"),
        chosen: keys.integer("expert_used_count"),
        width: keys.integer("expert_feed_forward_length", default=keys.integer("feed_forward_length")),
    }


def all_biases(model: GgufModel) -> Config:
    return {"attention_bias": model.has_all("attn_q", "attn_k", "attn_v", "attn_output")}


def layers_without_experts(model: GgufModel) -> list[int]:
    with_experts = model.layers_with("ffn_gate_inp.weight")
    return [index for index in range(model.num_layers) if index not in with_experts]


def leading_dense(model: GgufModel) -> int:
    """Return how many layers have one MLP, before the first with experts.

    Raises:
        ModelError: Such layers come later.
    """
    with_experts = model.layers_with("ffn_gate_inp.weight")
    first = with_experts[0] if with_experts else model.num_layers
    if with_experts != list(range(first, model.num_layers)):
        raise ModelError(
            f"{model.keys.path}: layers {with_experts} have experts: those after the first must all have them"
        )
    return first


def expect_gating(model: GgufModel, number: int, name: str) -> None:
    """Refuse another number of the router's function than that of `name`."""
    model.keys.expect("expert_gating_func", number, otherwise=f"the router has another function than {name}")


def expect_normalised_weights(model: GgufModel) -> None:
    model.keys.expect(
        "expert_weights_norm", True, otherwise="the weights of a token's experts are not divided by their sum"
    )


def pass_over_images(model: GgufModel) -> None:
    """Note keys about images: a token has three positions, of which those of text are equal, and some layers take what
    the tower gives, which is zero for text."""
    model.keys.pass_over("rope.dimension_sections", "n_deepstack_layers")


def granite_factors(model: GgufModel) -> Config:
    return {
        "attention_multiplier": model.number("attention.scale", default=model.head_dim**-0.5),
        "embedding_multiplier": model.number("embedding_scale", default=1.0),
        "residual_multiplier": model.number("residual_scale", default=1.0),
        "logits_scaling": model.number("logit_scale", default=1.0),
    }
