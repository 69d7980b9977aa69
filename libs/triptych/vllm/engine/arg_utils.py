"""The arguments of an engine as an object, which vLLM's programs hand to `from_engine_args`.

It is at the path by which they import it from vLLM.
"""

from __future__ import annotations

from typing import Any


class EngineArgs:
    """Keyword arguments of `LLM`, as attributes that may be set.

    EngineArgs(model="embedded", max_model_len=2048)
    """

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        """Take every argument of `triptych.vllm.LLM`; it is checked by what the object is given to."""
        self.model = model
        for name, value in arguments.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({shown})"


class AsyncEngineArgs(EngineArgs):
    """The same, for `AsyncLLM`."""
