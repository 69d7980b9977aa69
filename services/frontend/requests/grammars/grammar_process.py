"""Compiles grammars in a process of its own, so that one on which the compiler hangs or crashes ends nothing else.

`limited_child.py` runs it for `GrammarChecker`. It needs only llguidance and the standard library. The messages and
their answers:

    {"tokenizer": JSON, "vocab_size": n, "eos_token_ids": [...],
     "max_mask_items": n, "max_mask_s": seconds}                     {} or {"error": why}    first, once
    {"json": schema, "whitespace": {...}, "is_strict": ...}          {"grammar": text, "not_enforced": [[part, place]]}
    {"regex": ...}, {"choice": [...]}, {"lark": ...}, {"gbnf": ...}  or {"error": why, "part": which}
    {"any": lark or GBNF}
    {"tags": [{"trigger", "begin", "schema", "end"}], "are_special": whether triggers are control tokens}
    {"answer": {"form": one of these or null, "tools": [[number, name, parameters, is_strict]], "format", "has_text",
                "has_one", "reasoning": [opening, closing] or null, "is_reasoning", "tokens": {mark: id}}}

A part is the number of a tool, or -1: the form. A place is one in its schema.
"""

from __future__ import annotations

import functools
import json
import random
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

from triptych_services.frontend.requests.grammars.answer_grammars import AnswerGrammar, Tool
from triptych_services.frontend.requests.grammars.json_schemas import normalize

_MAX_ERROR_CHARS = 500
_NUM_TRIALS, _TRIAL_TOKENS = 4, 16  # outputs that are tried, and their tokens
_PUNCTUATION = frozenset(b"\"'{}[](),:;0123456789 ")


_FORM_PART = -1


class Trials(NamedTuple):
    """The limits under which a form is tried, and the tokens by which its outputs come forward."""

    limits: LLParserLimits
    max_mask_s: float
    """CPU time that a mask may take, but for one of each output."""
    marks: int
    """Bit t is set for each token t that is only punctuation, digits and spaces."""

    @classmethod
    def over(cls, tokenizer: LLTokenizer, max_mask_items: int, max_mask_s: float) -> Trials:
        """Return the trials over a vocabulary."""
        texts = (tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size))
        bits = "".join("1" if text and _PUNCTUATION.issuperset(text) else "0" for text in texts)
        return cls(LLParserLimits(step_max_items=max_mask_items), max_mask_s, int(bits[::-1], 2))


class Grammar(NamedTuple):
    """A form in llguidance's JSON."""

    text: str
    not_enforced: list[tuple[int, str]]
    """Part and place of what it lacks."""


def to_grammar(form: dict[str, Any], tokenizer: LLTokenizer) -> Grammar:
    """Return a form in llguidance's JSON.

    Raises:
        ValueError: It is not JSON, or not GBNF.
    """
    match form:
        case {"json": text}:
            schema = _read_schema(text, is_strict=form["is_strict"], tokenizer=tokenizer)
            # `lenient` would pass over keywords that cannot be enforced; a schema can ask for it by itself
            overrides: Any = {**form["whitespace"], **schema.options, "lenient": False}
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema.schema), overrides=overrides)
            return Grammar(grammar, [(_FORM_PART, place) for place in schema.not_enforced])
        case {"answer": whole}:
            return _to_answer_grammar(whole, tokenizer)
        case _:
            return Grammar(_to_text_grammar(form), [])


def _to_text_grammar(form: dict[str, Any]) -> str:
    kind, value = next(iter(form.items()))
    match kind:
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
            return _to_text_grammar({"lark" if _has_start_rule(value) else "gbnf": value})
        case "lark":
            return LLMatcher.grammar_from_lark(value)
        case _:
            try:
                return LLMatcher.grammar_from_lark(gbnf_to_lark(value))
            except Exception as error:  # the library's own kind, or recursion
                raise ValueError(f"is not GBNF: {error}") from None


class _ReadSchema(NamedTuple):
    schema: Any
    options: dict[str, Any]
    """Options of the compiler for it."""
    not_enforced: list[str]


def _read_schema(text: str, *, is_strict: bool, tokenizer: LLTokenizer) -> _ReadSchema:
    """Read a schema and rewrite it as the compiler takes it."""

    def is_enforceable(schema: Any) -> bool:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"lenient": False})
        return not LLMatcher.validate_grammar(grammar, tokenizer)

    def can_match(pattern: str) -> bool:
        return is_enforceable({"type": "string", "pattern": pattern})

    schema, not_enforced = normalize(json.loads(text), is_strict=is_strict, can_match=can_match)
    options = {}
    if not is_strict and '"oneOf"' in text and not is_enforceable(schema):
        options["coerce_one_of"] = True
        not_enforced = (*not_enforced, "oneOf")
    return _ReadSchema(schema, options, list(not_enforced))


def _to_answer_grammar(whole: dict[str, Any], tokenizer: LLTokenizer) -> Grammar:
    form = Grammar("", []) if whole["form"] is None else to_grammar(whole["form"], tokenizer)
    tools, numbers, not_enforced = [], [], form.not_enforced
    for number, name, parameters, is_strict in whole["tools"]:
        schema = _read_schema(parameters, is_strict=is_strict, tokenizer=tokenizer)
        tools.append(Tool(name, schema.schema, schema.options))
        numbers.append(number)
        not_enforced += [(number, place) for place in schema.not_enforced]
    # Marks that are no tokens to the compiler are text.
    tokens = {mark: id for mark, id in whole["tokens"].items() if tokenizer.is_special_token(id)}
    writer = AnswerGrammar(tokens)
    text = writer.write(
        form=_parts_of(form.text),
        tools=tools,
        format=whole["format"],
        has_text=whole["has_text"],
        has_one=whole["has_one"],
        reasoning=whole["reasoning"],
        is_reasoning=whole["is_reasoning"],
    )
    not_enforced += [(numbers[tool], place) for tool, place in writer.not_enforced]
    return Grammar(text, not_enforced)


def _parts_of(grammar: str) -> list[dict[str, Any]]:
    """Return the grammars that one is made of, of which the first begins it."""
    if not grammar:
        return []
    if grammar.startswith("{"):
        parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
        return parts
    return [{"lark_grammar": grammar}]


def _find_part(whole: dict[str, Any], tokenizer: LLTokenizer, trials: Trials) -> int | None:
    """Return the part of an answer for which it is refused, or None if each is good by itself."""
    if whole["form"] is not None and "error" in answer(whole["form"], tokenizer, trials):
        return _FORM_PART
    for number, _, parameters, is_strict in whole["tools"]:
        form = {"json": parameters, "whitespace": {}, "is_strict": is_strict}
        if "error" in answer(form, tokenizer, trials):
            return int(number)
    return None


def _has_start_rule(grammar: str) -> bool:
    # Without line breaks in the space before it: the search would try each run of them from each of its lines.
    return re.search(r"^[ \t]*([?!]*start\b[^:\n]*:(?!:)|%llguidance\b)", grammar, re.MULTILINE) is not None


def answer(form: dict[str, Any], tokenizer: LLTokenizer, trials: Trials) -> dict[str, Any]:
    """Compile a form as the worker will, and try the beginnings of a few outputs."""
    result = _compile(form, tokenizer, trials)
    if "error" in result and "answer" in form:
        part = _find_part(form["answer"], tokenizer, trials)
        return result if part is None else {**result, "part": part}
    return result


def _compile(form: dict[str, Any], tokenizer: LLTokenizer, trials: Trials) -> dict[str, Any]:
    try:
        grammar = to_grammar(form, tokenizer)
        matcher = LLMatcher(tokenizer, grammar.text, log_level=0, limits=trials.limits)
        slow_s = 0.0
        for seed in range(_NUM_TRIALS):
            if matcher.is_error():
                break
            trial = matcher.deep_copy()
            times_s = begin_output(trial, tokenizer, random.Random(seed), trials)
            slow_s = max(slow_s, *sorted(times_s)[:-1], 0.0)  # a single one may have built an automaton
            if trial.is_error():
                matcher = trial
    except Exception as error:
        return {"error": _shortened(str(error))}
    if matcher.is_error():
        return {"error": _shortened(matcher.get_error())}
    if slow_s > trials.max_mask_s:
        limit = f"the limit of {1e3 * trials.max_mask_s:g} ms"
        return {
            "error": f"tokens take {1e3 * slow_s:.0f} ms of CPU time each, above {limit}; make it less ambiguous"
        }
    return {"grammar": grammar.text, "not_enforced": grammar.not_enforced}


def begin_output(
    matcher: LLMatcher, tokenizer: LLTokenizer, choice: random.Random, trials: Trials
) -> list[float]:
    """Take some tokens that the form allows, drawn by `choice`; return the CPU time of each mask.

    Where a limit is reached the matcher has an error then. Some limits are not checked when a form is compiled: 1,800
    optional properties compile and have a first mask, and fail at the first token. Every other token is punctuation
    where it can be: texts go on for long otherwise, and what takes the most is what may follow behind them.
    """
    times_s: list[float] = []
    for _ in range(_TRIAL_TOKENS):
        started = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        times_s.append(time.thread_time() - started)
        marks = mask & trials.marks
        token_id = _draw(marks if choice.random() < 0.5 and marks else mask, choice)
        if token_id is None or token_id in tokenizer.eos_tokens or not matcher.consume_token(token_id):
            break
    return times_s


def _draw(mask: int, choice: random.Random) -> int | None:
    """Return a token whose bit is set; None if none is."""
    if not mask:
        return None
    later = mask >> (start := choice.randrange(mask.bit_length()))
    return start + (later & -later).bit_length() - 1


_NO_TEXT = "NoExtensionBias"
"""A name of the library's own in one of its errors, which tells a client nothing."""


def _shortened(error: str) -> str:
    """Return an error in one line, without the state of the parser."""
    if _NO_TEXT in error:
        return "no text can be derived: a rule leads to nothing but itself"
    line = re.sub(r"\s+", " ", error.split("\n<state>")[0]).strip()
    return line if len(line) <= _MAX_ERROR_CHARS else line[:_MAX_ERROR_CHARS] + "…"


def begin(
    message: dict[str, Any],
) -> tuple[dict[str, str], Callable[[dict[str, Any]], dict[str, Any]] | None]:
    """Read the tokenizer of the first message. Return its answer, and the function that compiles forms or None."""
    try:
        tokenizer = LLTokenizer(
            message["tokenizer"], n_vocab=message["vocab_size"], eos_token=message["eos_token_ids"]
        )
    except Exception as error:
        return {"error": _shortened(str(error))}, None
    trials = Trials.over(tokenizer, message["max_mask_items"], message["max_mask_s"])
    return {}, functools.partial(answer, tokenizer=tokenizer, trials=trials)
