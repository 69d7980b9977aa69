"""Checkpoints with a layer for multi-token prediction, and what transformers' layer guesses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from tests.worker.models.checkpoints import save_checkpoint
from tests.worker.models.families import DEEPSEEK_EXPERTS, FOUR, LATENT, Tiny

PARTS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO_PARTS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
MIMO = "MiMo"
"""Qwen 2 in other words, of which transformers has no class: https://huggingface.co/XiaomiMiMo/MiMo-7B-RL."""
MTP_FAMILIES: Mapping[str, Tiny] = {
    "GLM 4.5": Tiny(
        "glm4_moe", {**DEEPSEEK_EXPERTS, "head_dim": 12, "use_qk_norm": True, "attention_bias": True}
    ),
    "DeepSeek V3": Tiny("deepseek_v3", DEEPSEEK_EXPERTS, LATENT),
    MIMO: Tiny("qwen2", {}, FOUR),
}


class MtpOracle:
    """The model and its further layer, as transformers computes them."""

    def __init__(self, model: Any, parts: Mapping[str, torch.Tensor]) -> None:
        """
        Args:
            model: With the further layer as its last one, which is taken off.
            parts: Tensors of the further layer beside those that every layer has, by name.
        """
        layer = model.model.layers[-1]
        model.model.layers = model.model.layers[:-1]
        config = model.config
        config.num_hidden_layers -= 1
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
        config.mtp_hidden_states_first = config.model_type == "qwen2"
        self.model = model
        self.mtp = MtpModel(model, 1).eval()
        of_layer = self.mtp.layers[0]
        of_layer.mtp_block = layer
        for module, name in (
            (of_layer.enorm, "enorm"),
            (of_layer.hnorm, "hnorm"),
            (of_layer.eh_proj, "eh_proj"),
        ):
            module.weight.data.copy_(parts[f"{name}.weight"])
        of_layer.post_norm.weight.data.copy_(parts["shared_head.norm.weight"])

    @torch.no_grad()
    def say(self, text: Sequence[int], num_new: int) -> list[int]:
        """Return what the model says next."""
        tokens = list(text)
        for _ in range(num_new):
            tokens.append(int(self.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(text) :]

    @torch.no_grad()
    def logits(self, text: Sequence[int], count: int, first: int = 0) -> torch.Tensor:
        """Return the logits [count, vocab_size] of the layer's guesses behind a text, greedily, each from the one
        before.

        Args:
            first: The position of the first state that the layer sees.
        """
        states = self.model.model(input_ids=torch.tensor([list(text[:-1])])).last_hidden_state[:, first:]
        tokens, found = list(text[first + 1 :]), []
        for _ in range(count):
            ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
            out = self.mtp.forward_layer(0, states, positions, None, input_ids=ids)
            found.append(self.model.lm_head(out[0, -1]))
            tokens.append(int(found[-1].argmax()))
            states = torch.cat((states, out[:, -1:]), dim=1)
        return torch.stack(found)

    def guesses(self, text: Sequence[int], count: int, first: int) -> list[int]:
        """Return the guesses of `logits`."""
        return self.logits(text, count, first).argmax(1).tolist()


def save_with_mtp(name: str, directory: Path) -> MtpOracle:
    """Write the checkpoint of a family with random weights, its last layer as the one that guesses."""
    model = save_checkpoint(MTP_FAMILIES[name].create(), directory)
    size, generator = model.config.hidden_size, torch.Generator().manual_seed(1)
    shapes = {part: (size, 2 * size) if part == "eh_proj" else (size,) for part in PARTS}
    parts = {
        f"{part}.weight": torch.randn(shape, generator=generator) * 0.3 for part, shape in shapes.items()
    }
    last = model.config.num_hidden_layers - 1
    _write_parts(directory, last, parts)
    if name == MIMO:
        _rename_to_mimo(directory, last)
    return MtpOracle(model, parts)


def save_cycle(directory: Path, reads: str, **arguments: int) -> None:
    """Write a checkpoint that says the tokens 3, 4, … 96, 3, … in turn, by the token before only.

    Embeddings are one-hot, and no layer adds anything, so a state is the token that was computed.

    Args:
        reads: What the layer that guesses goes on from. token: the one whose successor it guesses. state: that of the
            token before, of which it guesses the successor's successor. nothing new: it says the successor again.
        arguments: Further ones of its config.
    """
    sizes = {**MTP_FAMILIES["GLM 4.5"].sizes, "hidden_size": 128, "tie_word_embeddings": False}
    config = Tiny("glm4_moe", {**MTP_FAMILIES["GLM 4.5"].arguments, "head_dim": 8, **arguments}, sizes)
    model = save_checkpoint(config.create(), directory)
    successors = torch.eye(128)
    cycle = torch.arange(3, 97)
    successors[:, cycle] = torch.eye(128)[:, cycle.roll(-1)]  # column: a token, row: the one behind it
    file, last = directory / "model.safetensors", model.config.num_hidden_layers - 1
    tensors = load_file(file)
    for tensor_name, tensor in tensors.items():
        if tensor_name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            tensor.zero_()
        elif tensor_name.endswith("norm.weight"):
            tensor.fill_(1.0)
    tensors["model.embed_tokens.weight"] = torch.eye(128)[:97].contiguous()
    tensors["lm_head.weight"] = successors[:97].contiguous()
    save_file(tensors, file, {"format": "pt"})
    nothing, same = torch.zeros(128, 128), torch.eye(128)
    halves = {"token": (same, nothing), "state": (nothing, successors), "nothing new": (nothing, same)}[reads]
    parts = {f"{part}.weight": torch.ones(128) for part in PARTS if part != "eh_proj"}
    _write_parts(directory, last, parts | {"eh_proj.weight": torch.cat(halves, dim=1)})


def _write_parts(directory: Path, last: int, parts: Mapping[str, torch.Tensor]) -> None:
    """Make the last layer of a checkpoint the one that guesses."""
    file = directory / "model.safetensors"
    tensors = load_file(file) | {f"model.layers.{last}.{part}": tensor for part, tensor in parts.items()}
    # published checkpoints have copies of what is the model's own
    tensors[f"model.layers.{last}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))


def _rename_to_mimo(directory: Path, last: int) -> None:
    """Give a Qwen 2 with a further layer the names that MiMo has, which has no copy of the embedding."""
    file, renamed = directory / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        theirs = name.replace(f"model.layers.{last}.", "model.mtp_layers.0.")
        for ours, part in zip(PARTS, MIMO_PARTS, strict=True):
            theirs = theirs.replace(f"mtp_layers.0.{ours}.", f"mtp_layers.0.{part}.")
        if not theirs.endswith("layers.0.embed_tokens.weight"):
            renamed[theirs] = tensor
    save_file(renamed, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["layer_types"]
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    (directory / "config.json").write_text(json.dumps(config))
