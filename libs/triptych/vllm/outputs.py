"""Outputs of `generate`, under vLLM's names and at the path by which scripts import them from vLLM."""

from triptych.types.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]
