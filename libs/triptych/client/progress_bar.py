"""The bar that LLM shows while it works."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from triptych.types.outputs import RequestOutput

if TYPE_CHECKING:
    from tqdm import tqdm


class ProgressBar:
    """A tqdm bar that counts prompts and shows tokens/s; `add` is called on the loop's thread."""

    def __init__(self, num_prompts: int, *, is_shown: bool) -> None:
        self._num_tokens_in = self._num_tokens_out = 0
        self._started = time.monotonic()
        self._bar: tqdm[Any] | None = None
        if is_shown:
            from tqdm import tqdm

            self._bar = tqdm(total=num_prompts, desc="Processed prompts", unit="prompt", dynamic_ncols=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, output: RequestOutput) -> None:
        if self._bar is None:
            return
        self._num_tokens_in += output.usage.num_prompt_tokens
        self._num_tokens_out += output.usage.num_output_tokens
        elapsed_s = time.monotonic() - self._started
        rates = f"{self._num_tokens_in / elapsed_s:.0f} tok/s in, {self._num_tokens_out / elapsed_s:.0f} tok/s out"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(1)
