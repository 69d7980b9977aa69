"""vLLM's names over Triptych, so that a program runs with only its imports changed: `vllm` becomes `triptych.vllm`.

    from triptych.vllm import LLM, SamplingParams

Modules are where vLLM has them: `sampling_params`, `outputs`, `inputs`, `entrypoints.llm`, `engine.arg_utils`,
`v1.engine.async_llm`. What differs from the names in `triptych`: sampling parameters may be changed, the engine's seed
makes the program's outputs the same in each run, and `chat` leaves the model's answer as it is, calls and reasoning
included. What vLLM has and this has not is an ImportError, an AttributeError, or refused by name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.types.outputs import CompletionOutput, RequestOutput
    from triptych.vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from triptych.vllm.entrypoints.llm import LLM
    from triptych.vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from triptych.vllm.sampling_params import SamplingParams
    from triptych.vllm.v1.engine.async_llm import AsyncLLM as AsyncLLMEngine

    __version__: str

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_NAME_TO_PLACE = {
    "LLM": ("triptych.vllm.entrypoints.llm", "LLM"),
    "AsyncEngineArgs": ("triptych.vllm.engine.arg_utils", "AsyncEngineArgs"),
    "AsyncLLMEngine": ("triptych.vllm.v1.engine.async_llm", "AsyncLLM"),
    "CompletionOutput": ("triptych.types.outputs", "CompletionOutput"),
    "EngineArgs": ("triptych.vllm.engine.arg_utils", "EngineArgs"),
    "PromptType": ("triptych.vllm.inputs", "PromptType"),
    "RequestOutput": ("triptych.types.outputs", "RequestOutput"),
    "SamplingParams": ("triptych.vllm.sampling_params", "SamplingParams"),
    "TextPrompt": ("triptych.vllm.inputs", "TextPrompt"),
    "TokensPrompt": ("triptych.vllm.inputs", "TokensPrompt"),
    "__version__": ("triptych", "__version__"),
}


def __getattr__(name: str) -> Any:
    if name not in _NAME_TO_PLACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    module, attribute = _NAME_TO_PLACE[name]
    globals()[name] = value = getattr(importlib.import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
