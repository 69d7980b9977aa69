"""Runs a function of torch as a recorded program, and compares it with torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from triptych_kernels.cpu.library import usable_isas
from triptych_kernels.cpu.program import Program, record
from triptych_kernels.cpu.recording import Recording

TOKENS = 7
MODES = (
    torch.inference_mode,
    pytest.param(torch.no_grad, marks=pytest.mark.thorough),
    pytest.param(torch.enable_grad, marks=pytest.mark.thorough),
)
"""In the first composite operations arrive whole, in the others in pieces, as in every model that is recorded."""
Mode = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def widest_isa() -> None:
    if not usable_isas():
        pytest.skip("no native kernels are built for this processor")


def record_function(function: Callable[..., Tensor], *inputs: Tensor) -> Program:
    """Record a function of inputs [most tokens, …], which it gets as [1, tokens, …] as models of transformers do."""

    def forward(recording: Recording) -> tuple[Tensor, ...]:
        out = function(*(recording.input(memory, count="tokens")[None] for memory in inputs))
        return (out,)

    return record(forward)


def assert_recorded(
    function: Callable[..., Tensor],
    *inputs: Tensor,
    token_axis: int = 1,
    rtol: float | None = None,
    atol: float | None = None,
) -> Program:
    """Compare a recorded function with torch's result, for several numbers of tokens.

    Args:
        inputs: [most tokens, …] each; the function gets [1, tokens, …].
        token_axis: Axis of the function's result that counts tokens.
    """
    most = len(inputs[0])
    program = record_function(function, *inputs)
    kept = [memory.clone() for memory in inputs]
    for num_tokens in sorted({1, most // 2, most}):
        for memory, own in zip(inputs, kept, strict=True):
            memory.copy_(own)
            memory[num_tokens:] = 0  # what steps before have left
        program.run({"tokens": num_tokens})
        with torch.no_grad():
            expected = function(*(own[:num_tokens][None] for own in kept))
        found = program.outputs[0].narrow(token_axis, 0, num_tokens)
        assert found.dtype == expected.dtype
        if rtol is None:
            rtol, atol = (2e-6, 2e-6) if expected.dtype == torch.float32 else (1e-2, 1e-2)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    return program
