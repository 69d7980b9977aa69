"""EAGLE-3 heads as the library speculators writes and computes them, recorded: config.json, tensors, and logits.

`python -m tests.worker.runner.drafting.speculators_recording` records them anew where speculators is installed (0.9.0
was; it asks for an older transformers than the tests have, and computed the same with theirs). Numbers of weights are
not recorded: `head_weights` draws them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from tests.worker.models.checkpoints import random_prompts, save_checkpoint
from tests.worker.models.families import FOUR

RECORDING = Path(__file__).with_name("speculators_recording.json")
TARGET_LAYERS, DRAFT_VOCAB = [1, 2, 3], 40


@dataclass(frozen=True)
class RecordedHead:
    """A head of the library, for the model of `save_target`."""

    config: dict[str, Any]
    """Its config.json."""
    shapes: dict[str, list[int]]
    """Those of its tensors."""
    text: list[int]
    """A prompt and what the model says to it."""
    logits: list[list[float]]
    """Those of the guess behind the text, and of the one behind that."""

    def save(self, directory: Path) -> None:
        """Write it down as a checkpoint."""
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file(
            head_weights(self.shapes, FOUR["vocab_size"]),
            directory / "model.safetensors",
            {"format": "pt"},
        )


def save_target(directory: Path) -> Any:
    """Write the model down that heads guess for, and return that of transformers."""
    return save_checkpoint(LlamaForCausalLM(LlamaConfig(**FOUR)), directory)


def head_weights(shapes: Mapping[str, Sequence[int]], vocab_size: int) -> dict[str, Tensor]:
    """Draw the tensors of a head, in the order of their names; its tokens are every second one of the model's."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        if name == "d2t":
            tensors[name] = torch.arange(shape[0])
        elif name == "t2d":
            tensors[name] = torch.zeros(shape, dtype=torch.bool)
            tensors[name][: 2 * shapes["d2t"][0] : 2] = True
        else:
            tensors[name] = torch.randn(tuple(shape), generator=generator) * 0.3
    assert tensors.get("t2d", torch.zeros(vocab_size)).numel() == vocab_size
    return tensors


def recorded_heads() -> dict[str, RecordedHead]:
    """Return them by the type of their layer."""
    return {name: RecordedHead(**head) for name, head in json.loads(RECORDING.read_text()).items()}


@torch.no_grad()
def _record(layer: Any, draft_vocab: int, *, norm_before_residual: bool) -> RecordedHead:
    """Let the library write and compute a head with this layer."""
    config_of, eagle3 = import_module("speculators.config"), import_module("speculators.models.eagle3")
    greedy = import_module("speculators.proposals.greedy").GreedyTokenProposalConfig(speculative_tokens=3)
    layer._attn_implementation = "eager"
    head = eagle3.Eagle3DraftModel(
        eagle3.Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=draft_vocab,
            norm_before_residual=norm_before_residual,
            eagle_aux_hidden_state_layer_ids=TARGET_LAYERS,
            speculators_config=config_of.SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[greedy],
                default_proposal_method="greedy",
                verifier=config_of.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
    ).eval()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        head.save_pretrained(directory)
        config = json.loads((directory / "config.json").read_text())
        shapes = {key: list(each.shape) for key, each in load_file(directory / "model.safetensors").items()}
        model = save_target(directory / "model")
    tensors = head_weights(shapes, FOUR["vocab_size"])
    head.load_state_dict(tensors, strict=False)
    (prompt,) = random_prompts(9)
    text = [*prompt, int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())]
    states = model(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states
    read = torch.cat([states[number] for number in TARGET_LAYERS], dim=-1)
    first = _logits(head, read, text[1:])[0][-1]
    guess = int(first.argmax())
    guess += int(tensors["d2t"][guess]) if "d2t" in tensors else 0
    # its step for the second place reads the given token behind each position, so the guess is given
    longer = torch.cat((read, read[:, -1:]), dim=1)
    again, second = _logits(head, longer, [*text[1:], guess])
    torch.testing.assert_close(again[-2], first)
    return RecordedHead(config, shapes, text, [first.tolist(), second[-2].tolist()])


def _logits(head: Any, states: Tensor, token_ids: Sequence[int]) -> list[Tensor]:
    """Return the logits of all positions for two places."""
    found: list[Tensor] = []
    hook = head.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    head(
        states,
        torch.tensor([list(token_ids)]),
        torch.zeros(1, len(token_ids), dtype=torch.long),
        ttt_steps=2,
    )
    hook.remove()
    return found


if __name__ == "__main__":
    one_layer = {**FOUR, "num_hidden_layers": 1, "head_dim": 8}
    heads = {
        "llama": _record(LlamaConfig(**one_layer), DRAFT_VOCAB, norm_before_residual=False),
        "qwen3": _record(Qwen3Config(**one_layer), FOUR["vocab_size"], norm_before_residual=True),
    }
    RECORDING.write_text(json.dumps({name: vars(head) for name, head in heads.items()}) + "\n")
