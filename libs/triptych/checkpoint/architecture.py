"""A model's description, layer by layer, as its family reads it from config.json; without torch.

A family that can be described here needs no code of its own: the worker builds it from these objects
(`services/worker/models/decoder.py` and `encoder.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from triptych.checkpoint.quantization.scheme import StoredQuantization
from triptych.checkpoint.tensor_names import TensorNames

TRANSFORMERS_MODEL = "TransformersForCausalLM"
"""Name of the decoders that the modules of transformers compute."""

TRANSFORMERS_ENCODER = "TransformersEncoder"
"""Name of the encoders that they compute."""

XIELU = "xielu"
"""Name of the activation that has numbers of its own in each layer of the checkpoint, `act_fn`."""


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary position embedding; the names are those of Hugging Face's `rope_parameters`."""

    theta: float = 10000.0
    kind: str = "default"
    """default, linear, dynamic, llama3, yarn, longrope, proportional"""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    rotary_dim: int = 0
    """Elements of a head, its first ones, that are rotated; 0: all."""
    is_interleaved: bool = False
    """Whether neighbours are rotated against each other, rather than the halves of what is rotated."""
    attention_factor: float = 0.0
    """Factor of cosines and sines; 0: as the kind computes it."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: whether the limits of its ramp are rounded to whole frequencies."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """longrope: a divisor for each frequency, for sequences up to the original length and for longer ones."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of one MLP."""

    num_experts: int
    num_experts_per_tok: int
    """How many of them a token goes through."""
    renormalize: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    bias: bool = False
    """Whether the router has a bias, and each projection of each expert."""
    score: str = "softmax"
    """Function of the router's logits: softmax, sigmoid, sqrtsoftplus, or sparsemixer."""
    scale: float = 1.0
    """Factor of the weights."""
    num_groups: int = 1
    """Groups of neighbouring experts; a token chooses from those that count most."""
    top_groups: int = 1
    """How many groups a token chooses from."""
    group_experts: int = 1
    """A group counts as the sum of so many of its largest scores."""
    correction_shape: tuple[int, ...] = ()
    """Shape of the checkpoint's tensor that is added to the scores for the choice only; empty: there is none."""
    scales_input: bool = False
    """Whether the weights multiply what an expert reads, and not its result."""
    jitter: float = 0.0
    """sparsemixer: half of the distance within which experts share their weight, as a part of their logits."""
    shared_size: int = 0
    """Columns of an expert that every token goes through, of several such experts together; 0: there is none."""
    has_shared_gate: bool = False
    """Whether the result of the shared expert is multiplied by a sigmoid of its own logit."""
    has_norms: bool = False
    """Whether the shared expert is the layer's MLP, beside the mixture: the router, the experts and what both give have
    norms of their own."""
    is_gated: bool = True
    """Whether each expert, a shared one included, is `down(act(gate(x)) * up(x))`; else `down(act(up(x)))`."""
    latent_size: int = 0
    """Elements of what experts read and write, between two projections of all of them; the router and a shared expert
    read the token's own state. 0: experts read it, too."""
    has_expert_scales: bool = False
    """Whether the weights of each expert have a factor, `per_expert_scale`."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A mixer of tokens with a recurrent state, and the sizes of what a request keeps of it in one layer.

    kind           conv channels                              state
    gated_delta    queries, keys, values                      a matrix for each head, [key_dim, value_dim]
    mamba2         x, B, C                                    a matrix for each head, [key_dim, value_dim]
    mamba          x: num_heads * value_dim channels          key_dim elements for each channel
    short_conv     x: num_heads * value_dim channels          none
    """

    kind: str
    """gated_delta (Qwen3-Next), mamba2, mamba (the first), short_conv (LFM2)."""
    taps: int
    """Inputs that the convolution sees, the token's own included."""
    num_heads: int
    """Heads of values."""
    value_dim: int
    """Elements of a head's values."""
    num_key_heads: int = 0
    """Heads of keys and queries, or groups of B and C; each serves an equal number of the others. 0 if the convolution
    does not see them."""
    key_dim: int = 0
    """Elements of a head's keys, or of a channel's state."""
    conv_bias: bool = False
    bias: bool = False
    """Whether the first and the last projection have one."""
    norm: str = "gated"
    """Norm of what comes out. gated: it is multiplied by its gate, then normalised. before_gate: the other way round.
    none: there is only a gate."""
    norm_groups: int = 1
    """Parts of the channels that are normalised each by itself; of gated_delta each head is."""
    norm_eps: float = 0.0
    """Added to the mean squares by that norm; 0: as by the norms of the block."""
    beta_scale: float = 1.0
    """gated_delta: factor of the sigmoid by which a token enters the state."""
    dt_rank: int = 0
    """mamba: inputs of the projection to the step sizes."""
    dt_norm: str = "none"
    """mamba: norms of step sizes, B and C. none, weighted, or plain: without weights."""
    dt_limits: tuple[float, float] = (0.0, math.inf)
    """mamba2: lower and upper limit of a step size."""
    input_multipliers: tuple[float, ...] = ()
    """mamba2: factors of the gate, x, B, C and step sizes; empty: none."""
    output_multiplier: float = 1.0
    """Factor of what the mixer gives."""

    @property
    def num_channels(self) -> int:
        """Channels of the values of all heads."""
        return self.num_heads * self.value_dim

    @property
    def num_key_channels(self) -> int:
        """Channels of the keys of all heads, or of B of all groups."""
        return self.num_key_heads * self.key_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution."""
        return self.num_channels + 2 * self.num_key_channels

    @property
    def page_elements(self) -> int:
        """Numbers, in float32, that one request keeps: past inputs of the convolution, then the state."""
        return (self.taps - 1) * self.conv_channels + self.num_channels * self.key_dim

    @property
    def guess_elements(self) -> int:
        """Numbers, in float32, that are kept of a token that may be taken back: its input of the convolution, then what
        enters the state with it, as the ops lay it out."""
        if not self.key_dim:
            return self.conv_channels
        if self.num_key_heads:  # key, value, decay and factor of each head
            return self.conv_channels + self.num_heads * (self.key_dim + self.value_dim + 2)
        # step size and input of each channel, and a copy of B for every 64 of them
        return self.conv_channels + 2 * self.num_channels + -(-self.num_channels // 64) * self.key_dim


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The small attention by which a token chooses the keys that it attends to, with one key for all of its heads.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
    """

    num_heads: int
    head_dim: int
    is_interleaved: bool = False
    """Whether neighbours are rotated against each other, and not the halves of what is rotated."""
    is_shared: bool = False
    """Whether the layer has none, and takes what the last layer before it that has one has chosen."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention: one vector per token is what the keys and values of all heads are made of.

        cached vector    [ latent: kv_rank | rotated key of all heads: rope_dim | key of the indexer, if there is one ]
        a head's query   [ nope_dim | rope_dim ]
        its key          [ made of the latent: nope_dim | that of all heads: rope_dim ]

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    kv_rank: int
    q_rank: int
    """Elements of the vector that queries are made of; 0: they are made of the layer's input."""
    nope_dim: int
    rope_dim: int
    norm_eps: float = 1e-6
    """Added to the mean squares by the norms of both vectors."""
    num_chosen_keys: int = 0
    """Keys that a token attends to at most, of those that it sees; 0: all."""
    indexer: IndexerSpec | None = None
    """The attention that chooses them; None: nothing does, so that contexts longer than their number are refused."""

    @property
    def vector_dim(self) -> int:
        """Elements of the vector that a token attends to."""
        return self.kv_rank + self.rope_dim

    @property
    def width(self) -> int:
        """Elements that the cache holds for a token, in every layer."""
        return self.vector_dim + (0 if self.indexer is None else self.indexer.head_dim)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The properties of one layer that may differ from its neighbours'."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Elements of a head's queries and keys."""
    intermediate_size: int
    attention: str = "full"
    """full, sliding, chunked, or none: the layer has no attention."""
    window: int = 0
    """sliding: keys that a token sees at most, its own included; in an encoder so many on each side of it. chunked:
    positions of a chunk. Else 0."""
    rope: RopeParameters | None = field(default_factory=RopeParameters)
    """How queries and keys are rotated; None: they are not."""
    value_dim: int = 0
    """Elements of a head's values; 0: as `head_dim`."""
    latent: LatentSpec | None = None
    """Not None: the attention is latent, with `num_kv_heads` 1 and `head_dim` the elements of a query."""
    kv_from: int = -1
    """The layer with the keys and values that this one reads; -1: its own."""
    value_is_key: bool = False
    """Whether values are made of the projection of keys, before its norm and rotation; there is no other."""
    norms: str = ""
    """As `BlockSpec.norms`, where layers differ in it; empty: as there."""
    mlp: str = "gated"
    """gated: `down(act(gate(x)) * up(x))`. plain: `down(act(up(x)))`. experts: as `experts`. none."""
    experts: ExpertsSpec | None = None
    state: StateSpec | None = None
    """A mixer with a recurrent state, in place of the attention or beside it; their outputs are added."""

    @property
    def keeps_keys(self) -> bool:
        """Whether it has keys and values of its own in the cache."""
        return self.attention != "none" and self.kv_from < 0

    @property
    def active_columns(self) -> int:
        """Columns of the MLP, or of all experts that one token goes through."""
        if self.experts is None:
            return self.intermediate_size
        return self.experts.num_experts_per_tok * self.intermediate_size + self.experts.shared_size


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Normalisation of a vector."""

    kind: str = "rms"
    """rms: by the root of its mean square. layer: its mean is subtracted first."""
    eps: float = 1e-6
    offset: float = 0.0
    """Added to the stored weight."""
    bias: bool = False
    weight: bool = True
    """False: the vector is normalised and no more."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The form that all layers of a decoder have."""

    norm: NormSpec = field(default_factory=NormSpec)
    """Every norm but those of queries and keys."""
    norms: str = "pre"
    """pre: `x + f(norm(x))`. post: `x + norm(f(x))`. both: `x + norm(f(norm(x)))`. sum: `norm(x + f(x))`, which only
    encoders have."""
    parallel: str = "no"
    """no: the MLP follows the attention. one_norm, two_norms: both read the layer's input, `x + attention + mlp`."""
    residual_multiplier: float = 1.0
    """Factor of what attention and MLP add to the residual."""
    attention_multiplier: float = 1.0
    """Factor of what the attention gives."""
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    """Factors of what enters the MLP, and of what it gives."""
    has_layer_scalar: bool = False
    """Whether each layer multiplies the residual that leaves it by a number of the checkpoint, `layer_scalar`."""
    qk_norm: str = "none"
    """none. head: each head's queries and keys are normalised. all: those of all heads together."""
    qk_norm_spec: NormSpec = field(default_factory=NormSpec)
    qk_norm_after_rope: bool = False
    v_norm: NormSpec | None = None
    """Norm of each head's values; None: there is none."""
    qk_norm_needs_rope: bool = False
    """Whether layers without positions do not normalise queries and keys."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Whether the projection of the attention's output has a bias."""
    mlp_bias: bool = False
    down_bias: bool = False
    """Whether the last projection of the MLP has a bias although the others have none."""
    activation: str = "silu"
    """Under Hugging Face's names: silu, gelu, gelu_pytorch_tanh, relu, relu2, quick_gelu; without a gate also
    xielu. And that of GPT-OSS's experts, swiglu_oai."""
    attention_scale: float = 0.0
    """Factor of the products of queries and keys; 0: 1 / sqrt(head_dim)."""
    attention_soft_cap: float = 0.0
    """Scores become `cap * tanh(score / cap)`; 0: they stay."""
    output_gate: str = "none"
    """Gates of a projection, `gate_proj`, that multiply what a head attends to. none. elements: each element has its
    own. heads: each head has one."""
    output_gate_function: str = "sigmoid"
    """Function of the projection that gives a gate: sigmoid or softplus."""
    has_sinks: bool = False
    """Whether each head has one more score in its softmax, without a value."""
    alibi_slopes: tuple[float, ...] = ()
    """By head: a score falls by so much for each position between its key and its query; empty: it does not."""
    clip_qkv: float = 0.0
    """Limit of the magnitude of queries, keys and values; 0: none."""
    query_scaling: tuple[float, int] | None = None
    """(beta, length): queries are multiplied by `1 + beta * log(1 + floor(position / length))`."""
    scales_queries_without_rope: bool = False
    """Whether only layers without positions have `query_scaling`, by the number of keys in place of the position."""


@dataclass(frozen=True, slots=True)
class LayerInputsSpec:
    """An input of each layer by token, beside the residual, which is added behind the MLP.

        input      (norm(projection of the embedding) + row of a table by token id) / sqrt(2)
        added      norm(out(act(gate(residual)) * input))

    Source: per-layer embeddings of Gemma 3n and 4, https://ai.google.dev/gemma/docs/gemma-3n.
    """

    size: int
    """Elements of a layer's input. The table's rows have those of all layers."""
    vocab_size: int
    """Rows of the table."""


@dataclass(frozen=True, slots=True)
class EndsSpec:
    """The form of a decoder before its first layer and after its last."""

    embedding_multiplier: float = 1.0
    num_learned_positions: int = 0
    """Rows of a table of learned positions, which is added to the embedding; 0: there is none."""
    learned_position_offset: int = 0
    """Row of position 0 in that table."""
    has_embedding_norm: bool = False
    layer_inputs: LayerInputsSpec | None = None
    logits_multiplier: float = 1.0
    logits_soft_cap: float = 0.0
    head_bias: bool = False


@dataclass(frozen=True, slots=True)
class EncoderHead:
    """The head of an encoder that classifies a text, or scores a pair: `classifier(norm(act(dense(pooled))))`."""

    num_labels: int
    activation: str = "tanh"
    """After the dense layer: tanh, or one of `BlockSpec.activation`."""
    dense_bias: bool = True
    has_norm: bool = False
    pooling: str = "first"
    """The state that it reads: first, last, or mean, that of all."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """The parts of an encoder that decoders do not have."""

    num_token_types: int = 0
    """Rows of a table that is added to the embedding, by the text of a pair that a token is in; 0: there is none."""
    num_distance_buckets: int = 0
    """Rows of a table of biases by head, of which each score gets one by the distance of its tokens, in buckets as T5
    has them up to 128; 0: there is none."""
    has_first_norm: bool = True
    """norms = pre: whether the attention of the first layer has a norm before it."""
    has_last_norm: bool = False
    """Whether a norm follows the last layer."""
    head: EncoderHead | None = None
    """The head that classifies; None: it has none."""
    is_by_text: bool = False
    """Whether each text is a call of transformers' modules, since something beside attention may mix its tokens."""


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """The shape and numerics of a model, as its checkpoint states them."""

    name: str
    """Registry key, as in config.json: `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    """float32, bfloat16 or float16, as stored; GGUF counts as bfloat16."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    block: BlockSpec = field(default_factory=BlockSpec)
    ends: EndsSpec = field(default_factory=EndsSpec)
    names: TensorNames = field(default_factory=TensorNames)
    """Names and layout of the family's tensors, by which adapters name modules too."""
    gguf_names: TensorNames | None = None
    """Those of the tensors in a .gguf file, which every family has in the same way; None: the weights are in none."""
    encoder: EncoderSpec | None = None
    """Not None: it is an encoder, in which a token also sees those after it; it generates nothing."""
    quantization: StoredQuantization | None = None
    """How another tool has quantized the weights; None: it has not, or the file is a GGUF."""
    head: str = "logits"
    """The part behind the last norm: logits, for tokens, score, a classifier's weight, or none."""
    num_labels: int = 0
    """Labels of the classifier; 0: there is none."""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The keys of config.json where a model reads them itself: one of another package, or of transformers. Else empty,
    since keys that change no token must not tell two workers apart."""

    @property
    def max_context(self) -> int:
        """Tokens of the longest context that is computed as the model means it."""
        latents = [layer.latent for layer in self.layers if layer.latent]
        chosen = {latent.num_chosen_keys for latent in latents if latent.indexer is None} - {0}
        return min({self.max_position_embeddings} | chosen)

    def without_indexers(self) -> ModelArchitecture:
        """Return the same for contexts up to the number of keys that would be chosen."""
        return replace(
            self,
            layers=tuple(
                replace(layer, latent=layer.latent and replace(layer.latent, indexer=None))
                for layer in self.layers
            ),
        )

    @property
    def keeps_states(self) -> bool:
        """Whether a layer has a recurrent state."""
        return any(layer.state is not None for layer in self.layers)

    @property
    def is_gguf(self) -> bool:
        return self.gguf_names is not None

    @property
    def stored_names(self) -> TensorNames:
        """Names and layout of the tensors in the checkpoint's files."""
        return self.names if self.gguf_names is None else self.gguf_names

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Query heads, the most of any layer."""
        return max(layer.num_heads for layer in self.layers)

    @property
    def num_kv_heads(self) -> int:
        """Key heads, the most of any layer."""
        return max(layer.num_kv_heads for layer in self.layers)

    @property
    def head_dim(self) -> int:
        """Elements of a head's keys or values, the most of any layer."""
        return max(max(layer.head_dim, layer.value_dim) for layer in self.layers)

    @property
    def latent(self) -> LatentSpec | None:
        """The latents of all layers; None: each head has keys and values of its own in the cache."""
        return self.layers[0].latent

    @property
    def intermediate_size(self) -> int:
        """Columns of an MLP or of one expert, the most of any layer."""
        return max(layer.intermediate_size for layer in self.layers)

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Columns of the layers' MLPs and shared experts, each number once, ascending."""
        shared = {layer.experts.shared_size for layer in self.layers if layer.experts}
        mlps = {layer.intermediate_size for layer in self.layers if not layer.experts}
        return tuple(sorted(mlps | (shared - {0})))

    @property
    def expert_widths(self) -> tuple[int, ...]:
        """Columns of an expert, by layer, each number once, ascending."""
        return tuple(sorted({layer.intermediate_size for layer in self.layers if layer.experts}))

    @property
    def expert_latents(self) -> tuple[int, ...]:
        """Elements of what experts read, by layer, where that is not the token's state; likewise."""
        return tuple(sorted({layer.experts.latent_size for layer in self.layers if layer.experts} - {0}))

    @property
    def num_experts(self) -> int:
        """Experts of a layer's mixture, the most of any layer; 0: every layer has one MLP."""
        return max((layer.experts.num_experts for layer in self.layers if layer.experts), default=0)
