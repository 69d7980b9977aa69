"""The calls on texts: into tokens and back. No engine computes them, but a ready one says which models there are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from triptych.errors import FieldViolation, InvalidRequest
from triptych_services.frontend.access.caller import current_caller
from triptych_services.frontend.access.rate_limits import RateLimits
from triptych_services.frontend.requests.parse import check_chat
from triptych_services.frontend.requests.raw import RawChat
from triptych_services.frontend.requests.sampling import find_bad_token_id, why_not_text
from triptych_services.frontend.requests.text_model import ALWAYS_TOKENIZED, CONTEXTS_TOKENIZED, TextModel
from triptych_services.frontend.routing.router import Router

MAX_DETOKENIZE = 1 << 18  # ids in one call: joining the text of millions blocks the event loop for tens of ms


class TextCalls:
    """Owned by the generator, with which it shares the limits of callers. Bound to one event loop."""

    def __init__(self, router: Router, rate_limits: RateLimits, text_model: Callable[[], TextModel]) -> None:
        """`text_model`: Returns the text side of the models, or raises EngineUnavailable while it is being loaded."""
        self._router = router
        self._rate_limits = rate_limits
        self._text_model = text_model

    async def tokenize(
        self,
        prompt: str | RawChat,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        paths: Mapping[str, str] = MappingProxyType({}),
    ) -> list[int]:
        """Return the token ids of a text or a conversation, which count against the caller's limit of tokens.

        Args:
            add_special_tokens: None: for a text, yes; a chat template has written its own.
            paths: As those of a `RawRequest`.

        Raises:
            InvalidRequest, ModelNotFound, EngineUnavailable, RateLimited
        """
        text, caller = self._text_model(), current_caller()
        max_model_len = self._router.find(model).model.max_model_len
        await self._rate_limits.admit_tokens(caller)
        path = paths.get("prompt", "prompt")
        if isinstance(prompt, RawChat):
            path_of = functools.partial(_look_up, paths)
            violations = await text.run(prompt.size, check_chat, prompt, path_of)
        else:
            violations = [FieldViolation(path, why)] if (why := why_not_text(prompt)) is not None else []
        if violations:
            raise InvalidRequest(violations)
        token_ids = await text.encode(
            prompt,
            path,
            max_model_len=max_model_len,
            fits_context=False,
            add_special_tokens=add_special_tokens,
        )
        self._rate_limits.charge(caller, len(token_ids))
        if len(token_ids) > (limit := max(CONTEXTS_TOKENIZED * max_model_len, ALWAYS_TOKENIZED)):
            why = f"{len(token_ids)} tokens are above the limit {limit}; split the text"
            raise InvalidRequest(path, why)
        ids: list[int] = token_ids.tolist()
        return ids

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        path: str = "token_ids",
    ) -> str:
        """Return the text of token ids.

        Raises:
            InvalidRequest, ModelNotFound, EngineUnavailable
        """
        text = self._text_model()
        vocab_size = self._router.find(model).model.vocab_size
        if len(token_ids) > MAX_DETOKENIZE:
            raise InvalidRequest(
                path, f"{len(token_ids)} tokens are above the limit {MAX_DETOKENIZE}; split them"
            )
        bad = await text.run(len(token_ids), find_bad_token_id, token_ids, vocab_size)
        if bad is not None:
            raise InvalidRequest(f"{path}[{bad[0]}]", bad[1])
        return await text.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def find_offsets(
        self, text: str, *, add_special_tokens: bool | None = None
    ) -> list[tuple[int, int]]:
        """Return where in a text each of the tokens that `tokenize` gives begins and ends, in code points."""
        adds_special_tokens = add_special_tokens is not False
        return await self._text_model().find_offsets(text, add_special_tokens=adds_special_tokens)

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the UTF-8 bytes of each token; they may be a part of a character."""
        text = self._text_model()
        return await text.run(len(token_ids), lambda: list(map(text.tokenizer.token_bytes, token_ids)))


def _look_up(paths: Mapping[str, str], name: str) -> str:
    """Return the path of a field in the client's words."""
    return paths.get(name, name)
