"""A process that compiles grammars, so that one on which the compiler hangs or crashes ends nothing else.

Run as a script by `GrammarChecker`. It needs only llguidance and the standard library. Each line of its input is a JSON
object, and is answered by one line:

    {"tokenizer": JSON, "vocab_size": n, "eos_token_ids": [...]}     {} or {"error": why}    first, once
    {"json": schema, "whitespace": {...}}                            {"grammar": text} or {"error": why}
    {"regex": ...}, {"choice": [...]}, {"lark": ...}, {"gbnf": ...}
    {"tags": [{"trigger", "begin", "schema", "end"}], "are_special": whether triggers are control tokens}
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

# The compiler recurses along chains of rules; the worker gives it as much.
_STACK_BYTES = 512 << 20
_MAX_BYTES = 4 << 30
"""The most address space of the process, of which the stack is a part. Beyond it the library aborts."""
_MAX_ERROR_CHARS = 500


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
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
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
        case "lark":
            return LLMatcher.grammar_from_lark(value)
        case _:
            try:
                return LLMatcher.grammar_from_lark(gbnf_to_lark(value))
            except Exception as error:  # the library's own kind, or recursion
                raise ValueError(f"is not GBNF: {error}") from None


def answer(form: dict[str, Any], tokenizer: LLTokenizer) -> dict[str, str]:
    """Compile a form as the worker will, up to the mask of the first token."""
    try:
        grammar = to_grammar(form)
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
    except Exception as error:
        return {"error": _shortened(str(error))}
    if matcher.is_error():
        return {"error": _shortened(matcher.get_error())}
    return {"grammar": grammar}


def _shortened(error: str) -> str:
    """Return an error in one line, without the state of the parser."""
    line = re.sub(r"\s+", " ", error.split("\n<state>")[0]).strip()
    return line if len(line) <= _MAX_ERROR_CHARS else line[:_MAX_ERROR_CHARS] + "…"


def read_tokenizer(message: dict[str, Any]) -> tuple[LLTokenizer | None, dict[str, str]]:
    """Return the tokenizer of the first message, or None, and the answer."""
    try:
        tokenizer = LLTokenizer(
            message["tokenizer"], n_vocab=message["vocab_size"], eos_token=message["eos_token_ids"]
        )
    except Exception as error:
        return None, {"error": _shortened(str(error))}
    return tokenizer, {}


def serve() -> None:
    """Answer line by line until the input ends."""
    tokenizer = None
    for line in sys.stdin.buffer:
        form = json.loads(line)
        if tokenizer is None:
            tokenizer, result = read_tokenizer(form)
        else:
            result = answer(form, tokenizer)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the frontend's, whose end closes our input
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    os._exit(0)
