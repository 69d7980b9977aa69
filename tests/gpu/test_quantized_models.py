"""Quantized models on the device lose as much as transformers' do whose weights and inputs are rounded likewise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.gpu.test_models import SHAPES, make_runner, random_prompts, token_logprobs
from tests.worker.teacher_forcing import teacher_forced_logprobs

Round = Callable[[Tensor], Tensor]
"""[rows, columns] -> what is left of it."""

GROUP = 32


def in_groups(bits: int) -> Round:
    """Round in groups of 32 along the columns: in 4 bits with an offset, in 8 without."""

    def round_groups(x: Tensor) -> Tensor:
        groups = x.float().unflatten(1, (-1, GROUP))
        if bits == 8:
            scales = groups.abs().amax(-1, keepdim=True) / 127
            return ((groups / scales).round().nan_to_num() * scales).flatten(1)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scales = (high - low) / 15
        return (((groups - low) / scales).round().nan_to_num() * scales + low).flatten(1)

    return round_groups


def in_rows(dtype: torch.dtype) -> Round:
    """Every row by its largest element."""

    def round_rows(x: Tensor) -> Tensor:
        largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
        scales = x.float().abs().amax(-1, keepdim=True) / largest
        scaled = (x.float() / scales).nan_to_num()
        return (scaled.round() if dtype == torch.int8 else scaled.to(dtype).float()) * scales

    return round_rows


def as_it_is(x: Tensor) -> Tensor:
    return x


FORMS: dict[str, tuple[Round, Round]] = {
    "q4": (in_groups(4), as_it_is),
    "q8": (in_groups(8), as_it_is),
    "int8": (in_rows(torch.int8), in_rows(torch.int8)),
    "fp8": (in_rows(torch.float8_e4m3fn), in_rows(torch.float8_e4m3fn)),
}
"""Rounding of weights, and of the inputs of their products; the head is always in groups of 8 bits."""


def round_products(model: PreTrainedModel, form: str) -> None:
    """Round a model's linear weights in place, and from now on their inputs."""
    round_weight, round_input = FORMS[form]

    def before_product(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0]
        return (round_input(x.flatten(0, -2)).view_as(x).to(x.dtype),)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            is_head = module is model.get_output_embeddings()
            rounded = (in_groups(8) if is_head else round_weight)(module.weight.data)
            # of a tied head the embedding is looked up from the same rounded rows
            module.weight.data.copy_(rounded)
            if not is_head:
                module.register_forward_pre_hook(before_product)


@pytest.mark.parametrize("shape", ["groups of 3, heads of 64, tied", "groups of 4, heads of 128"])
@pytest.mark.parametrize("form", FORMS)
def test_a_quantized_model_loses_what_rounding_loses(
    shape: str, form: str, seed: int, device: torch.device, tmp_path: Path
) -> None:
    """Mean |error| of the log-probabilities of given tokens, against float32 without rounding."""
    model = SHAPES[shape]().to(device).eval()
    prompts = random_prompts(seed, 30, 90, 61, 5)
    sequences = [
        prompt + rest for prompt, rest in zip(prompts, random_prompts(seed + 1, 40, 40, 40, 40), strict=True)
    ]
    num_prompts = [len(prompt) for prompt in prompts]
    runner = make_runner(model, tmp_path, quantization=form)
    ours = teacher_forced_logprobs(runner, sequences, num_prompts)
    exact = [token_logprobs(model, *pair) for pair in zip(sequences, num_prompts, strict=True)]
    round_products(model, form)
    rounded = [token_logprobs(model, *pair) for pair in zip(sequences, num_prompts, strict=True)]

    def mean_error(found: list[Tensor]) -> float:
        pairs = zip(found, exact, strict=True)
        return float(torch.cat([(torch.as_tensor(a).double() - b).abs() for a, b in pairs]).mean())

    lost, expected = mean_error(ours), mean_error(rounded)
    assert 0.7 * expected < lost < 1.4 * expected, (lost, expected)
