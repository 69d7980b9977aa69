"""Checkpoints with a layer for multi-token prediction, and what transformers' layer guesses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from tests.worker.models.checkpoints import save_checkpoint
from tests.worker.models.families import DEEPSEEK_EXPERTS, FOUR, FULL, LATENT, Tiny, rope
from tests.worker.models.recurrent_families import DELTA, LINEAR, SHARED
from tests.worker.quantized_files import Scheme, is_quantized

PARTS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO = "MiMo"
"""Qwen 2 in other words, of which transformers has no class: https://huggingface.co/XiaomiMiMo/MiMo-7B-RL."""
_MIMO_NAMES = {
    "eh_proj": "model.mtp_layers.0.input_proj",
    "enorm": "model.mtp_layers.0.token_layernorm",
    "hnorm": "model.mtp_layers.0.hidden_layernorm",
    "shared_head.norm": "model.mtp_layers.0.final_layernorm",
    "": "model.mtp_layers.0",
}
_QWEN_NAMES = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head.norm": "mtp.norm",
    "": "mtp.layers.0",
}
_QWEN = {**DELTA, "layer_types": [LINEAR, FULL, LINEAR, FULL]}
_QWEN_ROPE = rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1])
MTP_FAMILIES: Mapping[str, Tiny] = {
    "GLM 4.5": Tiny(
        "glm4_moe", {**DEEPSEEK_EXPERTS, "head_dim": 12, "use_qk_norm": True, "attention_bias": True}
    ),
    "DeepSeek V3": Tiny("deepseek_v3", DEEPSEEK_EXPERTS, LATENT),
    MIMO: Tiny("qwen2", {}, FOUR),
    "Qwen3-Next": Tiny("qwen3_next", {**_QWEN, **SHARED}),
    "Qwen 3.5": Tiny("qwen3_5_text", {**_QWEN, **_QWEN_ROPE}),
    "Qwen 3.5 MoE": Tiny("qwen3_5_moe_text", {**_QWEN, **SHARED}),
    "Qwen 3.6 MoE": Tiny("qwen3_5_moe_text", {**_QWEN, **SHARED}),
}
"""Forms of Qwen's are those of what is published: of 3.5 the layer that guesses has its experts one by one, the others
have them in one tensor, of 3.6 all have, and both have a part for images."""


class MtpOracle:
    """The model and its further layer, as transformers computes them."""

    def __init__(self, model: Any, parts: Mapping[str, torch.Tensor]) -> None:
        """
        Args:
            model: With the further layer as its last one, which is taken off.
            parts: Tensors of the further layer beside those that every layer has, by name.
        """
        layer, config = model.model.layers[-1], model.config
        config.num_hidden_layers -= 1
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
        config.mtp_hidden_states_first = config.model_type == "qwen2"
        self.model = model
        self.mtp = MtpModel(model, 1).eval()  # of the kind of the model's last layer
        model.model.layers = model.model.layers[:-1]
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
    _write_parts(directory, name, model.config.num_hidden_layers - 1, parts)
    return MtpOracle(model, parts)


def save_cycle(directory: Path, reads: str, name: str = "GLM 4.5", **arguments: int) -> None:
    """Write a checkpoint that says the tokens 3, 4, … 96, 3, … in turn, by the token before only.

    Embeddings are one-hot, and no layer adds anything, so a state is the token that was computed.

    Args:
        reads: What the layer that guesses goes on from. token: the one whose successor it guesses. state: that of the
            token before, of which it guesses the successor's successor. nothing new: it says the successor again.
        arguments: Further ones of its config.
    """
    tiny = MTP_FAMILIES[name]
    sizes = {**tiny.sizes, "hidden_size": 128, "tie_word_embeddings": False}
    own = {"head_dim": 8} if name == "GLM 4.5" else {}
    model = save_checkpoint(
        Tiny(tiny.model_type, {**tiny.arguments, **own, **arguments}, sizes).create(), directory
    )
    one = 0.0 if name.startswith("Qwen") else 1.0  # which those of Qwen 3.5 add to the weights of norms
    successors = torch.eye(128)
    cycle = torch.arange(3, 97)
    successors[:, cycle] = torch.eye(128)[:, cycle.roll(-1)]  # column: a token, row: the one behind it
    file, last = directory / "model.safetensors", model.config.num_hidden_layers - 1
    tensors = load_file(file)
    for tensor_name, tensor in tensors.items():
        if tensor_name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            tensor.zero_()
        elif tensor_name.endswith("norm.weight"):
            tensor.fill_(one)
    tensors["model.embed_tokens.weight"] = torch.eye(128)[:97].contiguous()
    tensors["lm_head.weight"] = successors[:97].contiguous()
    save_file(tensors, file, {"format": "pt"})
    nothing, same = torch.zeros(128, 128), torch.eye(128)
    halves = {"token": (same, nothing), "state": (nothing, successors), "nothing new": (nothing, same)}[reads]
    parts = {f"{part}.weight": torch.full((128,), one) for part in PARTS if part != "eh_proj"}
    _write_parts(directory, name, last, parts | {"eh_proj.weight": torch.cat(halves, dim=1)})


def quantize_files(source: Path, codes: Path, meant: Path, scheme: Scheme) -> None:
    """Write a checkpoint once with all projections quantized, and once with the numbers that these mean."""
    rng, config = np.random.default_rng(0), json.loads((source / "config.json").read_text())
    quantized, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        quantized[name] = plain[name] = tensor
        if is_quantized(name) and tensor.shape[1] % 32 == 0:
            parts, plain[name] = scheme.write(tensor.numpy(), rng)
            module = name.removesuffix(".weight")
            del quantized[name]
            quantized |= {f"{module}.{part}": written for part, written in parts.items()}
    for directory, tensors, own in (
        (codes, quantized, {"quantization_config": scheme.config}),
        (meant, plain, {}),
    ):
        directory.mkdir()
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(json.dumps({**config, **own}))


def _write_parts(directory: Path, name: str, last: int, parts: Mapping[str, torch.Tensor]) -> None:
    """Make the last layer of a checkpoint the one that guesses."""
    file = directory / "model.safetensors"
    tensors = load_file(file) | {f"model.layers.{last}.{part}": tensor for part, tensor in parts.items()}
    config = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": last}
    if name == MIMO:
        tensors = _renamed(tensors, last, _MIMO_NAMES)
        del config["layer_types"]
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
        config["num_nextn_predict_layers"] = 1
    elif name.startswith("Qwen"):
        tensors = _renamed(tensors, last, _QWEN_NAMES)
        config["layer_types"] = config["layer_types"][:last]
        if name != "Qwen3-Next":  # where no key says that there is such a layer
            tensors, config = _with_images(name, tensors, config | {"mtp_num_hidden_layers": 1})
    else:
        # published checkpoints have copies of what is the model's own
        tensors[f"model.layers.{last}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        config["num_nextn_predict_layers"] = 1
    save_file(tensors, file, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


def _renamed(
    tensors: Mapping[str, torch.Tensor], last: int, names: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Return the tensors with other names of the last layer's."""
    found = {}
    for name, tensor in tensors.items():
        for ours, theirs in names.items():
            prefix = f"model.layers.{last}.{ours}".removesuffix(".")
            if name.startswith(f"{prefix}."):
                name = theirs + name.removeprefix(prefix)
        found[name] = tensor
    return found


def _with_images(
    name: str, tensors: Mapping[str, torch.Tensor], text: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the config of a model with a part for images, of a Qwen 3.5."""
    found, experts = dict[str, torch.Tensor](), dict[str, dict[int, torch.Tensor]]()
    for own, tensor in tensors.items():
        theirs = own.replace("model.", "model.language_model.", 1)
        expert = re.search(r"\.experts\.(\d+)\.(\w+)\.weight$", theirs)
        if expert is None or (name == "Qwen 3.5 MoE" and theirs.startswith("mtp.")):
            found[theirs] = tensor
        else:
            of_projection = f"{theirs[: expert.start()]}.experts.{expert[2]}"
            experts.setdefault(of_projection, {})[int(expert[1])] = tensor
    stacked = {key: torch.stack([own[number] for number in sorted(own)]) for key, own in experts.items()}
    for projection, down in stacked.items():
        if projection.endswith("down_proj"):
            found[projection] = down
            prefix = projection.removesuffix("down_proj")
            halves = (stacked[f"{prefix}gate_proj"], stacked[f"{prefix}up_proj"])
            found[f"{prefix}gate_up_proj"] = torch.cat(halves, dim=1)
    found["model.visual.some.weight"] = torch.ones(3)
    architecture = text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    inner = {key: value for key, value in text.items() if key != "architectures"}
    own_keys = {"architectures": [architecture], "model_type": text["model_type"].removesuffix("_text")}
    return found, {**own_keys, "text_config": inner, "vision_config": {}, "tie_word_embeddings": False}
