"""The oracle itself: transformers, in float32, on weights that transformers read from the GGUF by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def load_reference(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The embedded model as `transformers` loads it; shares no code with our loader or kernels."""
    from transformers import AutoModelForCausalLM

    gguf = weights_file(directory)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
    return model.eval()


def weights_file(directory: Path) -> Path:
    """The .gguf that a converted model directory refers to."""
    return (directory / json.loads((directory / "gguf_index.json").read_text())["files"][0]["file"]).resolve()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_new_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens past any end token, and at each the gap between the two best logits."""
    tokens, gaps, cache = [], [], None
    step = torch.tensor([prompt])
    for _ in range(num_new_tokens):
        output = model(step, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best = output.logits[0, -1].float().topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        step = best.indices[:1][None]
    return tokens, gaps


@torch.inference_mode()
def teacher_forced_logprobs(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """Log-probability of each of `tokens`, given the prompt and the tokens before it."""
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
    chosen = torch.log_softmax(logits, dim=-1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    return [float(value) for value in chosen]
