"""The twenty prompts of the oracle: 1 to 1,500 tokens, plain text and chat, the same at every run."""

from __future__ import annotations

import random

from triptych.text.tokenizer import Tokenizer

_SHORT = (
    "Hello",
    "Hello, my name is",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    "Once upon a time, in a village at the foot of a mountain,",
    "Water boils at a hundred degrees because",
    "La révolution française a commencé en",
)
_CHAT = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three uses of a paper clip.",
)
_LONG = (90, 128, 200, 257, 400, 640, 1024, 1500)
"""Lengths in tokens of the prompts drawn from the story below."""

_WHO = ("the fisherman", "an old teacher", "my sister", "the captain", "a young doctor", "the librarian")
_DID = ("walked to", "wrote a letter about", "remembered", "painted", "asked about", "dreamed of")
_WHAT = ("the harbour", "a red house", "the long winter", "a broken clock", "the river", "an empty station")
_WHEN = ("in the morning", "after the war", "on a Tuesday", "when it rained", "long ago", "before dinner")


def oracle_prompts(tokenizer: Tokenizer, render_chat: object) -> list[list[int]]:
    """Token ids of each prompt.

    Args:
        render_chat: messages -> prompt text, with the model's own template.
    """
    prompts = [tokenizer.encode("A")[:1]]
    prompts += [tokenizer.encode(text) for text in _SHORT[1:]]
    prompts += [
        tokenizer.encode(render_chat([{"role": "user", "content": text}]), add_special_tokens=False)
        for text in _CHAT
    ]
    return prompts + [_story(tokenizer, length) for length in _LONG]


def _story(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """Prose of exactly `num_tokens` tokens; each length tells another story, so that nothing is shared."""
    draw = random.Random(num_tokens)
    text = f"Story number {num_tokens}."
    while len(ids := tokenizer.encode(text)) < num_tokens:
        who, did, what, when = (draw.choice(words) for words in (_WHO, _DID, _WHAT, _WHEN))
        text += (
            f" {when.capitalize()}, {who} {did} {what}, and {draw.choice(_WHO)} {draw.choice(_DID)} it too."
        )
    return ids[:num_tokens]
