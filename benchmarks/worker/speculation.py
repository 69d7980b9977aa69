"""Measures what guesses bring: tokens per second of scheduler and runner in one process, with guesses and without.

    python -m benchmarks.worker.speculation [--streams 1] [--model.quantization q4] [any other option of the config]

Greedy answers to prompts of four kinds, those of the last one in the form of a JSON schema. Both runners answer each
prompt in turn; prompts are cached, so the time is that of decoding. An answer that differs is an error. With `--wrong`
each guess is a wrong one, so the ratio is what guesses lose at most; with `--speculative.model`, or `mtp` in
`--speculative.proposers`, these are the model's or the layer's, each made wrong when it has taken the time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from llguidance import LLMatcher
from tokenizers import Tokenizer

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from tests.helpers.in_process import InProcessEngine
from triptych.config import EngineConfig
from triptych.config.loader import add_config_flags, config_from_arguments
from triptych.hub import resolve_model
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow
from triptych.types.structured import StructuredOutputs, compiled
from triptych_services.worker.runner.base import Runner
from triptych_services.worker.runner.drafting import create as drafting
from triptych_services.worker.runner.drafting.base import I64, Guesses, Proposer
from triptych_services.worker.sampling.params import TokenHistory
from triptych_services.worker.service.startup import load_runner

_TEXT = (
    "The town council met on Tuesday to discuss the new bridge over the river Alder. The old bridge, "
    "built in 1932, was closed in March after engineers found cracks in two of its pillars. The new "
    "bridge will cost about 4.2 million euros and will carry both cars and trams. Construction is to "
    "begin in spring and to last eighteen months. Until then, a ferry will cross the river every twenty "
    "minutes. Several shop owners complained that the ferry stops too far from the market square."
)
_CODE = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total = total + value\n"
    "    return total / len(values)\n\n"
    "def variance(values):\n    m = mean(values)\n    total = 0\n    for value in values:\n"
    "        total = total + (value - m) ** 2\n    return total / len(values)\n"
)
_TYPE_TO_FIELDS = {
    "string": ("title", "author", "language", "publisher", "summary", "category"),
    "integer": ("year", "pages", "rating"),
    "boolean": ("is_free",),
}
_BOOKS = (
    "The Silent Forest is a novel by Peter Olsen, published in 1987 by Northwind Press in English, 312 pages, about a "
    "ranger who loses his way. Readers gave it 4 of 5 stars. It is not free.",
    "Cooking for Two, a guide of 96 pages by Maria Rossi in Italian, was published by Table Books in 2015. It is about "
    "small meals, rated 5, and costs nothing.",
    "Report 2020: energy in cities. Author: Li Wei. Publisher: Green Institute. 48 pages in German. The report "
    "compares heating systems. Category: science. Rating: 3. Free.",
    "The Daily Herald, 12 March 2024, by Jane Miller, 3 pages, English. A new bridge for the town. Local news, rated "
    "2, free to read.",
)
_SCHEMA_KIND = "schema of 10 fields"
_KIND_TO_QUESTIONS = {
    "editing": (
        f"Repeat the following text exactly, word for word:\n\n{_TEXT}",
        f"Copy this text and replace the word bridge by tunnel:\n\n{_TEXT}",
        f"Correct the spelling of this text and write it out in full:\n\n{_TEXT.replace('the', 'teh', 3)}",
        f"Add a docstring to each function of this code and write out the whole code:\n\n```python\n{_CODE}```",
        f"Rename the variable total to result in this code:\n\n```python\n{_CODE}```",
    ),
    "summarising": (
        f"Summarise this text in three sentences:\n\n{_TEXT}",
        f"List the facts of this text as bullet points:\n\n{_TEXT}",
        f"Answer with a quote from the text. What will the new bridge cost and carry?\n\n{_TEXT}",
        f"Explain what this code does, line by line:\n\n{_CODE}",
        f"Write the key facts of this text as a JSON object:\n\n{_TEXT}",
    ),
    "chat": (
        "What is the capital of France, and what is it known for?",
        "Write a short story about a lighthouse keeper.",
        "How do I boil an egg?",
        "Give me five tips for learning to play the guitar.",
        "Why is the sky blue?",
    ),
    _SCHEMA_KIND: tuple(
        f"Describe this publication as a JSON object, in few words:\n\n{text}" for text in _BOOKS
    ),
}


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config = config_from_arguments(arguments)
    if arguments.wrong:
        config = _with_wrong_guesses(config)
    directory = resolve_model(config.model.model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    engines = {
        is_on: InProcessEngine(runner_of(config, is_on), max_num_seqs=config.scheduler.max_num_seqs)
        for is_on in (False, True)
    }
    sampling = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.output_len, seed=7)
    numbers = iter(range(0, 1 << 30, 1024))
    for kind in arguments.kinds:
        questions = _KIND_TO_QUESTIONS[kind]
        sampling = replace(sampling, structured_outputs=_form() if kind == _SCHEMA_KIND else None)
        prompts = [tokenizer.encode(_chat(question), add_special_tokens=False).ids for question in questions]
        rates: defaultdict[bool, list[float]] = defaultdict(list)
        for round_number in range(-1, arguments.rounds):  # the first one fills the cache of prefixes
            seconds, num_tokens = defaultdict[bool, float](float), 0
            for prompt in prompts:
                answers: dict[bool, Sequence[Sequence[int]]] = {}
                for is_on, engine in engines.items():
                    started = time.perf_counter()
                    answers[is_on] = engine.generate(
                        [prompt] * arguments.streams, sampling, first_number=next(numbers)
                    )
                    seconds[is_on] += time.perf_counter() - started
                assert answers[True] == answers[False], "a guess has changed a token"
                num_tokens += sum(map(len, answers[True]))
            if round_number >= 0:
                for is_on in engines:
                    rates[is_on].append(num_tokens / seconds[is_on])
        title = f"{arguments.streams} streams, {kind}"
        for is_on in engines:
            yield Figure(f"{title}, guesses {'on' if is_on else 'off'}", "tokens/s", tuple(rates[is_on]))
        gains = [on / off for on, off in zip(rates[True], rates[False], strict=True)]
        yield Figure(f"{title}, on against off", "x", tuple(gains))


class WrongProposer:
    """A `Proposer` that guesses as many tokens as it may, each the token before it: few texts go on like that."""

    name = "wrong"

    def __init__(self, history: TokenHistory) -> None:
        self._history = history

    def enter(self, row: NewRow) -> None:
        """Do nothing: it knows nothing of rows."""

    def leave(self, slot: int) -> None:
        """Do nothing."""

    def accept(self, slots: I64, counts: I64) -> None:
        """Do nothing."""

    def propose(self, slots: I64, limits: I64) -> Guesses:
        newest = self._history.token_ids[slots, self._history.num_known[slots] - 1]
        return Guesses(np.repeat(newest.astype(np.int64), limits), limits)


def _made_wrong(proposer: Proposer, vocab_size: int) -> Proposer:
    """Make each guess of a proposer another token, once it has taken its time."""
    propose = proposer.propose

    def propose_wrong(slots: I64, limits: I64) -> Guesses:
        guesses = propose(slots, limits)
        return replace(guesses, token_ids=(guesses.token_ids + 1) % vocab_size)

    proposer.propose = propose_wrong  # type: ignore[method-assign]
    return proposer


def _with_wrong_guesses(config: EngineConfig) -> EngineConfig:
    """Return a config with one proposer, which is always wrong from now on."""
    name = "draft" if config.speculative.model else "mtp"
    if not config.speculative.model and not config.speculative.wants_mtp:
        name = "ngram"
        drafting._OWN[name] = lambda sources: WrongProposer(sources.history)
    else:
        create = drafting._loaded(name)
        drafting._OWN[name] = lambda sources: _made_wrong(create(sources), sources.facts.model.vocab_size)
    return replace(config, speculative=replace(config.speculative, proposers=name))


def runner_of(config: EngineConfig, is_on: bool) -> Runner:
    """Load the model into a runner that guesses, or into one that does not.

    It remembers no outputs, since each prompt comes again.
    """
    speculative = replace(config.speculative, enabled="true" if is_on else "false", suffix_mib=0)
    return load_runner(replace(config, speculative=speculative), lambda phase, progress: None)


def _form() -> StructuredOutputs:
    """Return an object of ten fields, all of them required, as a frontend compiles it."""
    field_to_type = {name: {"type": kind} for kind, names in _TYPE_TO_FIELDS.items() for name in names}
    schema = {"type": "object", "properties": field_to_type, "required": list(field_to_type)}
    whole = json.dumps({**schema, "additionalProperties": False})
    return compiled(LLMatcher.grammar_from_json_schema(whole, overrides={"whitespace_flexible": False}))


def _chat(question: str) -> str:
    """Return a prompt of the embedded model."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--streams", type=int, default=1)
    kinds = tuple(_KIND_TO_QUESTIONS)
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--wrong", action="store_true", help="guess wrong tokens only")
    parser.add_argument("--temperature", type=float, default=0.0)
    add_config_flags(parser)
    sys.exit(run(parser, measure))
