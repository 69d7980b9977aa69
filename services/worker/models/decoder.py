"""Any decoder that a `ModelArchitecture` describes: embedding, layers of attention and MLP, norm, head.

What differs between families is in the description; a family of its own needs no code here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from triptych.checkpoint.architecture import LatentSpec, LayerSpec, ModelArchitecture
from triptych.checkpoint.mtp import MtpSpec
from triptych.checkpoint.tensor_names import TensorNames
from triptych.errors import FeatureDisabled
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.checkpoint_tensors import load_weights
from triptych_services.worker.layers.embedding import (
    LayerInputs,
    LogitsHead,
    PositionEmbedding,
    ScoreHead,
    VocabEmbedding,
)
from triptych_services.worker.layers.latent_attention import LatentSelfAttention
from triptych_services.worker.layers.linear import ColumnLinear
from triptych_services.worker.layers.mlp import LayerInput, LayerScalar, MLPBesideExperts, create_mlp
from triptych_services.worker.layers.norm import create_norm
from triptych_services.worker.layers.recurrent import create_mixer
from triptych_services.worker.layers.rotary import RotaryTables
from triptych_services.worker.layers.self_attention import SelfAttention
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.layers.weights import LoadedTensor
from triptych_services.worker.parallel.shares import heads_of_layers, stage_layers


class DecoderForCausalLM(nn.Module):
    """The network, or one stage of it; a `CausalLM` and a `StagedModel`.

    Some checkpoints have a classifier in place of the head, or neither; `ModelArchitecture.head` says so.
    """

    def __init__(self, *, context: ModelContext, prefix: str = "", has_layers: bool = True) -> None:
        """
        Args:
            has_layers: Whether it computes its layers. If not, it is there for its embedding and its head.
        """
        super().__init__()
        architecture = context.architecture
        check_supported(architecture)
        heads_of_layers(architecture, rank=context.rank)  # refuses those that no cache holds
        self.model = Decoder(context=context, prefix=f"{prefix}model", has_layers=has_layers)
        self.lm_head: LogitsHead | None = None
        self.score: ScoreHead | None = None
        self._architecture, self._prefix = architecture, prefix
        self._is_last = context.rank.is_last_stage
        if self._is_last and architecture.head == "score":
            self.score = ScoreHead(
                architecture.num_labels, architecture.hidden_size, context=context, prefix=f"{prefix}score"
            )
        if self._is_last and architecture.head == "logits":
            # a tied head reads the embedding's tensor; far from the first stage it holds its own copy
            is_tied = architecture.tie_word_embeddings
            self.lm_head = LogitsHead(
                architecture.vocab_size,
                architecture.hidden_size,
                tied_to=self.model.embed_tokens if is_tied else None,
                bias=architecture.ends.head_bias,
                context=context,
                prefix=f"{prefix}{'model.embed_tokens' if is_tied else 'lm_head'}",
            )

    def forward(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        hidden: Tensor = self.model(token_ids, positions, context)
        return hidden

    def is_elsewhere(self, name: str) -> bool:
        return self._is_elsewhere(name, self._architecture.stored_names)

    def _is_elsewhere(self, name: str, names: TensorNames) -> bool:
        stored, is_tied = names.stored, self._architecture.tie_word_embeddings
        name = names.current(name.removeprefix(self._prefix))
        layer = re.match(re.escape(stored("model.layers.")) + r"(\d+)\.", name)
        if layer is not None:
            index = int(layer[1])
            return index < self._architecture.num_layers and index not in self.model.layer_indices
        is_last = self._is_last
        module = name.rpartition(".")[0]
        if module == stored("model.embed_tokens"):
            return self.model.embed_tokens is None and not (is_last and is_tied)
        if module in (stored("model.embed_positions"), stored("model.embed_norm")):
            return self.model.embed_tokens is None
        if module == stored("model.norm"):
            return self.model.norm is None
        if module in (stored("lm_head"), "score"):
            return not is_last
        return False

    def adapts_elsewhere(self, module: str) -> bool:
        names = self._architecture.names
        if names.current(module.removeprefix(self._prefix)) == names.stored("model.embed_tokens"):
            return self.model.embed_tokens is None  # a tied head's copy of the weight looks nothing up
        return self._is_elsewhere(f"{module}.weight", names)

    def compute_logits(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        assert self.lm_head is not None, "asked of the last stage of a model that generates"
        logits: Tensor = self.lm_head(hidden, adapter_slots)
        ends = self._architecture.ends
        if ends.logits_multiplier != 1.0:
            logits = logits * ends.logits_multiplier
        if ends.logits_soft_cap:
            logits = ends.logits_soft_cap * torch.tanh(logits / ends.logits_soft_cap)
        return logits

    def load_weights(self, tensors: Iterable[tuple[str, LoadedTensor]]) -> None:
        # older checkpoints store the rotary frequencies, and some tied ones the head a second time
        ignored = ["rotary_emb.inv_freq"]
        if self._architecture.tie_word_embeddings or self._architecture.head != "logits":
            ignored.append(self._architecture.stored_names.stored("lm_head.weight"))
        load_weights(self, tensors, self._architecture, ignored=ignored)


class Decoder(nn.Module):
    """The embedding, the layers and the last norm, or the part of these that one stage has."""

    def __init__(self, *, context: ModelContext, prefix: str, has_layers: bool = True) -> None:
        """
        Args:
            has_layers: As of `DecoderForCausalLM`.
        """
        super().__init__()
        architecture = context.architecture
        self.ends = architecture.ends
        self.layer_indices = stage_layers(architecture, rank=context.rank) if has_layers else range(0)
        """Layers of the whole model that are here."""
        first = architecture.layers[self.layer_indices.start].latent
        if first is not None and first.indexer is not None and first.indexer.is_shared:
            raise FeatureDisabled(
                f"parallel.pipeline_parallel_size = {context.rank.num_stages}",
                f"layer {self.layer_indices.start} of {architecture.name} attends to keys that a layer of the stage "
                "before it chooses; set it to another number",
            )
        self.embed_tokens: VocabEmbedding | None = None
        self.embed_positions: PositionEmbedding | None = None
        self.embed_norm: nn.Module | None = None
        hidden_size, norm = architecture.hidden_size, architecture.block.norm
        # models multiply by the factor as their precision holds it
        self.embedding_multiplier = torch.tensor(
            self.ends.embedding_multiplier, dtype=context.dtype, device="cpu"
        ).item()
        if context.rank.is_first_stage:
            self.embed_tokens = VocabEmbedding(
                architecture.vocab_size, hidden_size, context=context, prefix=f"{prefix}.embed_tokens"
            )
            if self.ends.num_learned_positions:
                self.embed_positions = PositionEmbedding(
                    self.ends.num_learned_positions,
                    hidden_size,
                    offset=self.ends.learned_position_offset,
                    context=context,
                    prefix=f"{prefix}.embed_positions",
                )
            if self.ends.has_embedding_norm:
                self.embed_norm = create_norm(
                    hidden_size, norm, context=context, prefix=f"{prefix}.embed_norm"
                )
        self.layer_inputs: LayerInputs | None = None
        if self.ends.layer_inputs is not None:
            self.layer_inputs = LayerInputs(
                self.ends.layer_inputs, hidden_size, norm, context=context, prefix=prefix
            )
        tables = RotaryTables(context=context)
        self.layers = nn.ModuleList(
            DecoderLayer(
                index,
                layer_index=index - self.layer_indices.start,
                tables=tables,
                context=context,
                prefix=f"{prefix}.layers.{index}",
            )
            for index in self.layer_indices
        )
        self.norm: nn.Module | None = None
        if context.rank.is_last_stage and has_layers:
            self.norm = create_norm(hidden_size, norm, context=context, prefix=f"{prefix}.norm")

    def forward(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] after the last norm, or this stage's residual."""
        # [num_tokens, hidden_size] float32
        residual = token_ids if self.embed_tokens is None else self.embed(token_ids, positions, context)
        inputs: Tensor | None = None
        if self.layer_inputs is not None:
            inputs = self.layer_inputs(token_ids, residual, context.adapter_slots)
        hidden: Tensor | None = None
        kept = context.kept
        for number, layer in enumerate(self.layers):
            if kept is not None:
                kept.take(number, hidden, residual)
            hidden, residual = layer(hidden, residual, positions, context, inputs)
        if kept is not None:
            kept.take(len(self.layers), hidden, residual)
        if self.norm is None:
            return residual if hidden is None else residual + hidden
        normalised: Tensor = self.norm(residual) if hidden is None else self.norm(hidden, residual)[0]
        return normalised

    def embed(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Return the residual [num_tokens, hidden_size] before the first layer, in float32."""
        assert self.embed_tokens is not None, "asked of the first stage"
        embedded: Tensor = self.embed_tokens(token_ids, context.adapter_slots)
        if self.embedding_multiplier != 1.0:
            embedded = embedded * self.embedding_multiplier
        if self.embed_positions is not None:
            embedded = embedded + self.embed_positions(positions)
        if self.embed_norm is not None:
            embedded = self.embed_norm(embedded).float()
        return embedded


class DecoderLayer(nn.Module):
    """Attention and the MLP, with norms before them, after them or both, one after the other or side by side.

    A mixer with a recurrent state takes the attention's place or reads the same beside it. A layer may lack
    either half.

    The residual is kept in float32 (docs/adr/0003). A norm before a block first adds the output of the block before it,
    so the last block's output is returned beside the residual, not yet added.
    """

    def __init__(
        self,
        index: int,
        *,
        layer_index: int,
        tables: RotaryTables,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            index: Place of the layer in the whole model.
            layer_index: Index of the layer's KV cache in `StepContext.kv_caches`, and of its states in `state_pages`.
            tables: Rotary tables of the whole model.
        """
        super().__init__()
        spec, block = context.architecture.layers[index], context.architecture.block
        self.parallel = block.parallel
        self.dtype = context.dtype
        self.multiplier = block.residual_multiplier
        self.attention_multiplier = block.attention_multiplier
        self.mixer_multiplier = 1.0 if spec.state is None else spec.state.output_multiplier
        self.mlp_multipliers = block.mlp_multipliers
        self.self_attn: nn.Module | None = None
        self.mixer: nn.Module | None = None
        self.mlp: nn.Module | None = None
        if spec.attention != "none":
            attention = SelfAttention if spec.latent is None else LatentSelfAttention
            self.self_attn = attention(
                spec, layer_index=layer_index, tables=tables, context=context, prefix=f"{prefix}.self_attn"
            )
        if spec.state is not None:
            self.mixer = create_mixer(
                spec.state, layer_index=layer_index, context=context, prefix=f"{prefix}.mixer"
            )
        if spec.mlp != "none":
            self.mlp = create_mlp(spec, context=context, prefix=f"{prefix}.mlp")
        inputs = context.architecture.ends.layer_inputs
        self.input: LayerInput | None = None
        if inputs is not None:
            self.input = LayerInput(inputs, layer=index, context=context, prefix=prefix)
        self.scalar: LayerScalar | None = None
        if block.has_layer_scalar:
            self.scalar = LayerScalar(context=context, prefix=f"{prefix}.layer_scalar")

        def norm(name: str) -> nn.Module:
            return create_norm(
                context.architecture.hidden_size, block.norm, context=context, prefix=f"{prefix}.{name}"
            )

        # the names that families with these norms have in common
        norms = spec.norms or block.norms
        has_pre, has_post = norms in ("pre", "both"), norms in ("post", "both")
        mixes, has_mlp = self.self_attn is not None or self.mixer is not None, self.mlp is not None
        self.attention_norm = norm("input_layernorm") if has_pre and mixes else None
        self.attention_out_norm = norm("post_attention_layernorm") if has_post and mixes else None
        self.mlp_norm: nn.Module | None = None
        if has_pre and has_mlp and block.parallel != "one_norm":
            self.mlp_norm = norm("pre_feedforward_layernorm" if has_post else "post_attention_layernorm")
        self.mlp_out_norm = norm("post_feedforward_layernorm") if has_post and has_mlp else None

    def forward(
        self,
        hidden: Tensor | None,
        residual: Tensor,
        positions: Tensor,
        context: StepContext,
        inputs: Tensor | None,
    ) -> tuple[Tensor | None, Tensor]:
        """Compute one layer.

        Args:
            hidden: Output of the layer before, not yet added to the residual; None if there is none to add.
            residual: [num_tokens, hidden_size] float32.
            inputs: Those of all layers, as of `LayerInputs`; None: the model has none.

        Returns:
            The layer's last output, not yet added, and the residual.
        """
        hidden, residual = self._compute(hidden, residual, positions, context)
        if self.input is not None and inputs is not None:
            residual = residual + hidden
            hidden = self.input(residual, inputs, context.adapter_slots)
        if self.scalar is None:
            return hidden, residual
        return None, self.scalar(residual + hidden)

    def _compute(
        self, hidden: Tensor | None, residual: Tensor, positions: Tensor, context: StepContext
    ) -> tuple[Tensor, Tensor]:
        """Compute what every family has, attention and MLP, as `forward`."""
        if self.self_attn is not None or self.mixer is not None:
            normalised, residual = self._add_and_normalise(self.attention_norm, hidden, residual)
            hidden = self._mix(normalised, positions, context)
            if self.parallel != "no":
                if self.mlp_norm is not None:
                    normalised = self.mlp_norm(residual)
                assert self.mlp is not None, "see `check_supported`"
                return self._scaled(hidden.float() + self.mlp(normalised, context.adapter_slots)), residual
            if self.attention_out_norm is not None:
                hidden = self.attention_out_norm(hidden)
            hidden = self._scaled(hidden)
        if self.mlp is None:
            assert hidden is not None, "see `check_supported`"
            return hidden, residual
        normalised, residual = self._add_and_normalise(self.mlp_norm, hidden, residual)
        if isinstance(self.mlp, MLPBesideExperts):
            hidden = self.mlp(normalised, residual, context.adapter_slots)
        else:
            before, after = self.mlp_multipliers
            hidden = _times(self.mlp(_times(normalised, before), context.adapter_slots), after)
        if self.mlp_out_norm is not None:
            hidden = self.mlp_out_norm(hidden)
        return self._scaled(hidden), residual

    def _mix(self, normalised: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Return what the attention gives, or the mixer with a state, or the sum of both."""
        outputs: list[Tensor] = []
        if self.self_attn is not None:
            outputs.append(_times(self.self_attn(normalised, positions, context), self.attention_multiplier))
        if self.mixer is not None:
            outputs.append(_times(self.mixer(normalised, context), self.mixer_multiplier))
        return outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]

    def _add_and_normalise(
        self, norm: nn.Module | None, hidden: Tensor | None, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the input of a block and the residual, to which `hidden` has been added."""
        if norm is None:
            if hidden is not None:
                residual = residual + hidden
            return residual.to(self.dtype), residual
        if hidden is None:
            return norm(residual), residual
        normalised, residual = norm(hidden, residual)
        return normalised, residual

    def _scaled(self, hidden: Tensor) -> Tensor:
        return _times(hidden, self.multiplier)


def _times(hidden: Tensor, factor: float) -> Tensor:
    return hidden if factor == 1.0 else hidden * factor


class MtpLayer(nn.Module):
    """A layer that guesses the token after the next, with the embedding and the head of its model; a `CausalLM`.

    Its tokens are those behind the ones of `StepContext.states_before`.
    """

    def __init__(self, spec: MtpSpec, *, context: ModelContext) -> None:
        """
        Args:
            context: Its architecture has this layer only.
        """
        super().__init__()
        size, names = context.architecture.hidden_size, spec.names
        norm_spec = context.architecture.block.norm

        def norm(name: str) -> nn.Module:
            return create_norm(size, norm_spec, context=context, prefix=spec.module(name))

        self._architecture, self._names = context.architecture, names
        self._model: tuple[
            DecoderForCausalLM, ...
        ] = ()  # in a tuple, since its weights are none of this module
        self.token_norm, self.state_norm = norm(names.token_norm), norm(names.state_norm)
        self.projection = ColumnLinear(
            2 * size,
            size,
            activation=None,
            bias=False,
            context=context,
            prefix=spec.module(names.projection),
        )
        self.layer = DecoderLayer(
            0, layer_index=0, tables=RotaryTables(context=context), context=context, prefix=spec.prefix
        )
        self.norm = norm(names.last_norm)

    def share(self, model: DecoderForCausalLM) -> None:
        """Use the embedding and the head of a model from now on."""
        self._model = (model,)

    def forward(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        """Return the states [num_tokens, hidden_size], from which it goes on after a guess of its own."""
        (model,), states = self._model, context.states_before
        assert states is not None, "given to the backend that computes this"
        token = self.token_norm(model.model.embed(token_ids, positions, context))
        state = self.state_norm(states)
        pair = (state, token) if self._names.state_first else (token, state)
        residual = self.projection(torch.cat(pair, dim=-1)).float()
        hidden, residual = self.layer(None, residual, positions, context, None)
        normalised: Tensor = self.norm(residual) if hidden is None else self.norm(hidden, residual)[0]
        return normalised

    def compute_logits(self, hidden: Tensor) -> Tensor:
        (model,) = self._model
        return model.compute_logits(hidden)

    def load_weights(self, tensors: Iterable[tuple[str, LoadedTensor]]) -> None:
        load_weights(self, tensors, self._architecture, ignored=self._names.shared)


def check_supported(architecture: ModelArchitecture) -> None:
    """Refuse what the description can say and nothing here computes.

    Raises:
        FeatureDisabled: Layers read keys that no layer keeps for them, mix forms of attention, or compute nothing.
    """
    for index, layer in enumerate(architecture.layers):
        for what, why, is_missing in _unsupported(architecture, index, layer):
            if is_missing:
                raise FeatureDisabled(f"{architecture.name}, layer {index}: {what}", why)
    if architecture.tie_word_embeddings and architecture.ends.head_bias:
        raise FeatureDisabled(
            f"{architecture.name}: tie_word_embeddings = true", "the head of this family has a bias"
        )


def _unsupported(
    architecture: ModelArchitecture, index: int, layer: LayerSpec
) -> tuple[tuple[str, str, bool], ...]:
    """Return what a layer may have and nothing computes, why, and whether it has it."""
    attends, is_half = layer.attention != "none", "none" in (layer.attention, layer.mlp)
    is_parallel, latent = architecture.block.parallel != "no", architecture.latent
    one_shape = "all layers keep latent vectors of one shape, or none does"
    return (
        (
            f"kv_from = {layer.kv_from}",
            "it must be an earlier layer with as many heads, as long, and the same window, that keeps its own",
            layer.kv_from >= 0 and not _keeps_keys_for(architecture, index),
        ),
        (
            f"value_dim = {layer.value_dim}",
            "values are as long as keys",
            layer.latent is None and layer.value_dim not in (0, layer.head_dim),
        ),
        (
            f"attention = {layer.attention}, mlp = {layer.mlp}, parallel = {architecture.block.parallel}",
            "a layer has an attention, a state or an MLP, and both halves if they are parallel",
            is_half and (is_parallel or (not attends and layer.mlp == "none" and layer.state is None)),
        ),
        (
            "its attention is latent or not, as that of layer 0 is not or is",
            one_shape,
            (layer.latent is None) != (latent is None),
        ),
        (f"latent = {layer.latent}", one_shape, _vector_of(layer.latent) != _vector_of(latent)),
    )


def _vector_of(latent: LatentSpec | None) -> tuple[int, ...]:
    """Return the shape of what a layer with latent attention keeps of a token."""
    return () if latent is None else (latent.kv_rank, latent.rope_dim, latent.width)


def _keeps_keys_for(architecture: ModelArchitecture, index: int) -> bool:
    """Return whether a layer can read the keys and values of the one that it names."""
    layer = architecture.layers[index]
    source = architecture.layers[layer.kv_from]
    is_like_it = all(
        getattr(layer, name) == getattr(source, name)
        for name in ("num_kv_heads", "head_dim", "attention", "window", "latent")
    )
    can_read = layer.latent is None and architecture.block.qk_norm != "all"
    return layer.kv_from < index and source.kv_from < 0 and is_like_it and can_read
