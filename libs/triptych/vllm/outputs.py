"""Outputs of `generate`, under vLLM's names and at the path by which scripts import them from vLLM."""

from triptych.types.logprobs import Logprob
from triptych.types.outputs import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]
