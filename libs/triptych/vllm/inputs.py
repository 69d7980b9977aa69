"""The forms of a prompt, under vLLM's names and at the path by which scripts import them from vLLM."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from triptych.client.prompts import AnyPrompt as PromptType

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]


class TextPrompt(TypedDict):
    """A prompt that is text."""

    prompt: str
    cache_salt: NotRequired[str]
    """Share cached prefixes only with requests of the same salt."""


class TokensPrompt(TypedDict):
    """A prompt that is token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """The text that the ids are of, for the output."""
    cache_salt: NotRequired[str]
    """Share cached prefixes only with requests of the same salt."""
