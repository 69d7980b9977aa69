"""EAGLE-3 heads in the layout of the authors and in that of speculators, and what modules of transformers guess so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from tests.worker.models.checkpoints import SIZES, save_checkpoint
from tests.worker.models.families import FOUR
from tests.worker.runner.drafting.speculators_recording import head_weights

VOCAB, STATE = FOUR["vocab_size"], FOUR["hidden_size"]
DRAFT_VOCAB = 37
WIDE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
"""Sizes of a head that is wider than its model's states."""


class EagleOracle:
    """A model of transformers and a head of its modules, by the published layout."""

    def __init__(
        self,
        model: Any,
        config: LlamaConfig,
        tensors: Mapping[str, Tensor],
        layers: Sequence[int],
        *,
        adds_normalised: bool,
    ) -> None:
        """
        Args:
            config: That of the layer.
            tensors: Those of the head, in the layout of the authors.
            layers: Layers of the model before each state.
        """
        self.model, self._layers, self._adds_normalised = model, layers, adds_normalised
        self._embedding = tensors.get("embed_tokens.weight", model.model.embed_tokens.weight)
        self._fc, self._lm_head = tensors["fc.weight"], tensors["lm_head.weight"]
        self.tokens = torch.arange(len(self._lm_head)) + tensors.get("d2t", 0)
        """By token of the head: its id in the model."""
        size = config.hidden_size
        self._attention, self._mlp = LlamaAttention(config, 0).eval(), LlamaMLP(config).eval()
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self._attention, name).out_features
            setattr(self._attention, name, nn.Linear(2 * size, rows, bias=False))
        self._rotary = LlamaRotaryEmbedding(config)
        self._norms = {
            name: LlamaRMSNorm(size, config.rms_norm_eps)
            for name in (
                "midlayer.input_layernorm",
                "midlayer.hidden_norm",
                "midlayer.post_attention_layernorm",
                "norm",
            )
        }
        for name, norm in self._norms.items():
            norm.weight.data.copy_(tensors[f"{name}.weight"])
        for prefix, module in (("self_attn", self._attention), ("mlp", self._mlp)):
            start = f"midlayer.{prefix}."
            module.load_state_dict(
                {name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)}
            )

    @torch.no_grad()
    def say(self, text: Sequence[int], num_new: int) -> list[int]:
        """Return what the model says next."""
        tokens = list(text)
        for _ in range(num_new):
            tokens.append(int(self.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(text) :]

    @torch.no_grad()
    def logits(self, text: Sequence[int], count: int, first: int = 0) -> Tensor:
        """Return the logits [count, tokens of the head] of guesses behind a text, greedily, each from the one before.

        Args:
            first: The position of the first state that the head sees.
        """
        ids, states = torch.tensor([list(text[:-1])]), list[Tensor]()
        states.append(self.model.model.embed_tokens(ids))
        hooks = [
            layer.register_forward_hook(lambda module, inputs, output: states.append(output))
            for layer in self.model.model.layers
        ]
        self.model(input_ids=ids)
        for hook in hooks:
            hook.remove()
        read = torch.cat([states[number] for number in self._layers], dim=-1)[:, first:]
        hidden, tokens, found = read @ self._fc.T, list(text[first + 1 :]), []
        for _ in range(count):
            out = self._layer(self._embedding[torch.tensor([tokens])], hidden)
            found.append(self._norms["norm"](out[0, -1]) @ self._lm_head.T)
            tokens.append(int(self.tokens[found[-1].argmax()]))
            hidden = torch.cat((hidden, out[:, -1:]), dim=1)
        return torch.stack(found)

    def _layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        state = self._norms["midlayer.hidden_norm"](hidden)
        residual = state if self._adds_normalised else hidden
        both = torch.cat((self._norms["midlayer.input_layernorm"](embedded), state), dim=-1)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        angles = self._rotary(hidden, torch.arange(length)[None])
        residual = residual + self._attention(both, angles, mask)[0]
        normalised = self._norms["midlayer.post_attention_layernorm"](residual)
        result: Tensor = residual + self._mlp(normalised)
        return result

    def guesses(self, text: Sequence[int], count: int, first: int) -> list[int]:
        """Return the guesses of `logits`, as tokens of the model."""
        found: list[int] = self.tokens[self.logits(text, count, first).argmax(1)].tolist()
        return found


def save_model(directory: Path) -> Any:
    """Write a model of four layers down, and return that of transformers."""
    return save_checkpoint(LlamaForCausalLM(LlamaConfig(**FOUR)), directory)


def save_as_authors(directory: Path, model: Any) -> EagleOracle:
    """Write a head as the authors do, which has no embedding and says nothing of layers."""
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    tensors = _draw_head(config, DRAFT_VOCAB, STATE)
    write_head(
        directory,
        _flat(config, {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}),
        tensors,
    )
    return EagleOracle(model, config, tensors, (2, 2, 1), adds_normalised=False)


def save_as_speculators(directory: Path, model: Any) -> EagleOracle:
    """Write a head as speculators does: wider than the model's states, with an embedding and all tokens."""
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1, **WIDE})
    tensors = _draw_head(config, VOCAB, STATE, embedding=True)
    values = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"architectures": ["LlamaForCausalLM"]}},
        "draft_vocab_size": VOCAB,
        "target_hidden_size": STATE,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [0, 4, 1],
        "transformer_layer_config": config.to_diff_dict(),
    }
    write_head(
        directory,
        values,
        {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()},
    )
    return EagleOracle(model, config, tensors, (0, 4, 1), adds_normalised=True)


def write_head(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint down."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), directory / "model.safetensors", {"format": "pt"})


def save_cycle(directory: Path, head: Path, *, is_right: bool, **arguments: int) -> None:
    """Write a model that says the tokens 3, 4, … 96, 3, … in turn, by the token before only, and a head for it.

    Embeddings are one-hot, and no layer adds anything, so a state is the token that was computed. The MLP of the head
    puts the successor in the place of a token. It has the tokens of the cycle only.

    Args:
        is_right: Whether it begins with the successor of a state's token, and so guesses the one behind that, and then
            its successors. If not, it begins with the token itself, and says the one again that it was given. With the
            state of the next token it would be right.
        arguments: Further ones of both configs, where the head has none of its own.
    """
    size = 128
    cycle, same, nothing = torch.arange(3, 97), torch.eye(size), torch.zeros(size, size)
    successors = torch.eye(size)
    successors[:, cycle] = same[:, cycle.roll(-1)]  # column: a token, row: the one behind it
    model = LlamaForCausalLM(LlamaConfig(**{**FOUR, "hidden_size": size, "head_dim": 8, **arguments}))
    save_checkpoint(model, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    _add_nothing(tensors)
    tensors["model.embed_tokens.weight"] = same[:97].contiguous()
    tensors["lm_head.weight"] = successors[:97].contiguous()
    save_file(tensors, file, {"format": "pt"})
    sizes = {"num_hidden_layers": 1, "hidden_size": size, "intermediate_size": size, "head_dim": 8}
    config = LlamaConfig(**{**SIZES, **arguments, **sizes})
    of_head = _draw_head(config, cycle.numel(), size)
    _add_nothing(of_head)
    norm = torch.tensor(size**0.5)  # of a token, behind a norm
    gated = torch.nn.functional.silu(norm) * norm
    of_head["midlayer.mlp.gate_proj.weight"] = of_head["midlayer.mlp.up_proj.weight"] = same
    of_head["midlayer.mlp.down_proj.weight"] = (successors - same) / gated
    of_head["fc.weight"] = torch.cat((nothing, successors if is_right else same, nothing), dim=1)
    of_head["lm_head.weight"] = same[cycle].contiguous()
    of_head["d2t"] = torch.full_like(cycle, 3)
    values = {"draft_vocab_size": cycle.numel(), "architectures": ["LlamaForCausalLM"]}
    write_head(head, _flat(config, values), {name: each.clone() for name, each in of_head.items()})


def _add_nothing(tensors: dict[str, Tensor]) -> None:
    """Let no layer add anything to its residual."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1.0)


def _flat(config: LlamaConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    return {**config.to_diff_dict(), **values}


def _draw_head(
    config: LlamaConfig, draft_vocab: int, state_size: int, *, embedding: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of a head in the layout of the authors."""
    size, width = config.hidden_size, config.intermediate_size
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    shapes = {
        "fc.weight": (size, 3 * state_size),
        "norm.weight": (size,),
        "lm_head.weight": (draft_vocab, size),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * size),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, queries),
        "midlayer.mlp.gate_proj.weight": (width, size),
        "midlayer.mlp.up_proj.weight": (width, size),
        "midlayer.mlp.down_proj.weight": (size, width),
    }
    shapes |= {"embed_tokens.weight": (VOCAB, size)} if embedding else {}
    shapes |= {} if draft_vocab == VOCAB else {"d2t": (draft_vocab,), "t2d": (VOCAB,)}
    return head_weights(shapes, VOCAB)
