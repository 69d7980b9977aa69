"""Outputs of `generate`, under vLLM's names."""

from triptych.types.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]
