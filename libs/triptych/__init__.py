"""Triptych: distributed LLM inference as three gRPC services; this is its face for Python programs.

    from triptych import LLM, SamplingParams
    with LLM() as llm:
        print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text)

The names load on first use, so that `import triptych` costs nothing and drags in no grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.client.async_llm import AsyncLLM
    from triptych.client.batch import PartialFailure
    from triptych.client.beam_search import BeamSearchParams
    from triptych.client.llm import LLM
    from triptych.types.output_limits import RepetitionDetection
    from triptych.types.outputs import CompletionOutput, RequestOutput
    from triptych.types.sampling import OutputKind, SamplingParams
    from triptych.types.structured import StructuredOutputs

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "OutputKind",
    "PartialFailure",
    "RepetitionDetection",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

_NAME_TO_MODULE = {
    "LLM": "triptych.client.llm",
    "AsyncLLM": "triptych.client.async_llm",
    "BeamSearchParams": "triptych.client.beam_search",
    "OutputKind": "triptych.types.sampling",
    "PartialFailure": "triptych.client.batch",
    "RepetitionDetection": "triptych.types.output_limits",
    "SamplingParams": "triptych.types.sampling",
    "StructuredOutputs": "triptych.types.structured",
    "CompletionOutput": "triptych.types.outputs",
    "RequestOutput": "triptych.types.outputs",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("triptych")
    elif name in _NAME_TO_MODULE:
        value = getattr(importlib.import_module(_NAME_TO_MODULE[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next access finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
