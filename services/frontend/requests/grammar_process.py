"""Compiles grammars in a process of its own, so that one on which the compiler hangs or crashes ends nothing else.

`limited_child.py` runs it for `GrammarChecker`. It needs only llguidance and the standard library. The messages and
their answers:

    {"tokenizer": JSON, "vocab_size": n, "eos_token_ids": [...],
     "max_mask_items": n}                                            {} or {"error": why}    first, once
    {"json": schema, "whitespace": {...}}                            {"grammar": text} or {"error": why}
    {"regex": ...}, {"choice": [...]}, {"lark": ...}, {"gbnf": ...}, {"any": lark or GBNF}
    {"tags": [{"trigger", "begin", "schema", "end"}], "are_special": whether triggers are control tokens}
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

_MAX_ERROR_CHARS = 500
_NUM_TRIALS, _TRIAL_TOKENS = 2, 8  # outputs that are tried, and their tokens


def to_grammar(form: dict[str, Any]) -> str:
    """Return a form in llguidance's JSON.

    Raises:
        ValueError: It is not JSON, or not GBNF.
    """
    kind, value = next(iter(form.items()))
    match kind:
        case "json":
            # `lenient` would pass over keywords that cannot be enforced; a schema can ask for it by itself
            overrides: Any = {**form["whitespace"], "lenient": False}
            return LLMatcher.grammar_from_json_schema(value, overrides=overrides)
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in value)
            # as one terminal 2,500 texts and more fit, and a mask of 1,000 takes 0.1 ms in place of 7
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(texts))
        case "tags":
            tags = [
                StructTag(
                    trigger=tag["trigger"],
                    begin=tag["begin"],
                    grammar=json.dumps(tag["schema"]),
                    end=tag["end"],
                )
                for tag in value
            ]
            return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=form["are_special"]))
        case "any":
            return to_grammar({"lark" if _has_start_rule(value) else "gbnf": value})
        case "lark":
            return LLMatcher.grammar_from_lark(value)
        case _:
            try:
                return LLMatcher.grammar_from_lark(gbnf_to_lark(value))
            except Exception as error:  # the library's own kind, or recursion
                raise ValueError(f"is not GBNF: {error}") from None


def _has_start_rule(grammar: str) -> bool:
    # Without line breaks in the space before it: the search would try each run of them from each of its lines.
    return re.search(r"^[ \t]*(start\b[^:\n]*:(?!:)|%llguidance\b)", grammar, re.MULTILINE) is not None


def answer(form: dict[str, Any], tokenizer: LLTokenizer, limits: LLParserLimits) -> dict[str, str]:
    """Compile a form as the worker will, and try the beginnings of a few outputs."""
    try:
        grammar = to_grammar(form)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        for seed in range(_NUM_TRIALS):
            if matcher.is_error():
                break
            trial = matcher.deep_copy()
            _begin_output(trial, tokenizer, random.Random(seed))
            if trial.is_error():
                matcher = trial
    except Exception as error:
        return {"error": _shortened(str(error))}
    if matcher.is_error():
        return {"error": _shortened(matcher.get_error())}
    return {"grammar": grammar}


def _begin_output(matcher: LLMatcher, tokenizer: LLTokenizer, choice: random.Random) -> None:
    """Take some tokens that the form allows, drawn by `choice`. Where a limit is reached the matcher has an error then.

    Some limits are not checked when a form is compiled: 1,800 optional properties compile and have a first mask, and
    fail at the first token.
    """
    for _ in range(_TRIAL_TOKENS):
        token_id = _draw(matcher.compute_bitmask(), choice)
        if token_id is None or token_id in tokenizer.eos_tokens or not matcher.consume_token(token_id):
            return


def _draw(mask: bytes, choice: random.Random) -> int | None:
    """Return a token that a mask allows, bit t % 8 of byte t // 8 for token t; None if it allows none."""
    start = choice.randrange(len(mask))
    for place in (*range(start, len(mask)), *range(start)):
        if byte := mask[place]:
            return 8 * place + choice.choice([bit for bit in range(8) if byte >> bit & 1])
    return None


def _shortened(error: str) -> str:
    """Return an error in one line, without the state of the parser."""
    line = re.sub(r"\s+", " ", error.split("\n<state>")[0]).strip()
    return line if len(line) <= _MAX_ERROR_CHARS else line[:_MAX_ERROR_CHARS] + "…"


def begin(
    message: dict[str, Any],
) -> tuple[dict[str, str], Callable[[dict[str, Any]], dict[str, str]] | None]:
    """Read the tokenizer of the first message. Return its answer, and the function that compiles forms or None."""
    try:
        tokenizer = LLTokenizer(
            message["tokenizer"], n_vocab=message["vocab_size"], eos_token=message["eos_token_ids"]
        )
    except Exception as error:
        return {"error": _shortened(str(error))}, None
    limits = LLParserLimits(step_max_items=message["max_mask_items"])
    return {}, functools.partial(answer, tokenizer=tokenizer, limits=limits)
