"""The proposers of a worker: the project's own, and those of installed packages. Needs no torch.

    speculative.proposers    grammar, ngram, suffix, draft, mtp, lists
                             └─────────── own names ──────────┘  └ an entry point of the group triptych.proposers

A package's proposer is called by a `GuardedProposer`. So its faults cost guesses, and no request.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.config import SpeculativeConfig
from triptych.errors import FeatureDisabled
from triptych.types.facts import WorkerFacts
from triptych.types.step import NewRow
from triptych_services.worker.runner.drafting.base import I64, Guesses, Proposer
from triptych_services.worker.runner.drafting.grammar import FormMatchers, GrammarProposer
from triptych_services.worker.runner.drafting.ngram import NgramProposer
from triptych_services.worker.runner.drafting.speculation import Speculation
from triptych_services.worker.runner.drafting.suffix import SuffixProposer
from triptych_services.worker.runner.request_rows import RequestRows
from triptych_services.worker.sampling.params import TokenHistory

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "triptych.proposers"
"""Entry points of installed packages: name in `speculative.proposers` -> `module:function`, a `CreateProposer`."""
MAX_PROPOSERS = 16
DRAFT, MTP = "draft", "mtp"
"""The names of proposers that are loaded: `speculative.model`, and a layer of the checkpoint."""
_SLOW_S = 0.005
"""A call of a package's proposer that takes longer is slow: about a step of a small model."""
_MAX_SLOW = 3
"""Slow calls of a package's proposer, of the last 100 at most, that it may have."""

CreateProposer = Callable[[WorkerFacts, TokenHistory], Proposer]
"""Creates a package's proposer for a worker, which reads the tokens of its rows here and writes none."""
StartClock = Callable[[], Callable[[], float]]
"""Starts to measure, and returns what reads the seconds since then."""
CreateProposers = Callable[[WorkerFacts, TokenHistory, FormMatchers | None], Sequence[Proposer]]
"""Creates the proposers of a runner, which read this history of its rows. Without matchers it computes no forms."""


@dataclass(frozen=True, slots=True)
class _Sources:
    """The parts of a worker that proposers need."""

    config: SpeculativeConfig
    facts: WorkerFacts
    history: TokenHistory
    forms: FormMatchers | None
    loaded: Mapping[str, CreateProposer]


def _grammar(sources: _Sources) -> Proposer | None:
    if sources.forms is None:
        return None
    eos_token_ids = sources.facts.model.eos_token_ids
    return GrammarProposer(eos_token_ids, history=sources.history, forms=sources.forms)


def _ngram(sources: _Sources) -> Proposer:
    return NgramProposer(sources.facts.max_num_seqs, history=sources.history)


def _suffix(sources: _Sources) -> Proposer | None:
    if not sources.config.suffix_mib:
        return None
    max_bytes = sources.config.suffix_mib << 20
    return SuffixProposer(sources.facts.max_num_seqs, max_bytes, history=sources.history)


def _loaded(name: str) -> Callable[[_Sources], Proposer]:
    def create(sources: _Sources) -> Proposer:
        assert name in sources.loaded, f"{name} is loaded where it is to guess"
        return sources.loaded[name](sources.facts, sources.history)

    return create


_OWN: dict[str, Callable[[_Sources], Proposer | None]] = {
    "grammar": _grammar,
    "ngram": _ngram,
    "suffix": _suffix,
    DRAFT: _loaded(DRAFT),
    MTP: _loaded(MTP),
}


def ngram_only(
    facts: WorkerFacts, history: TokenHistory, forms: FormMatchers | None = None
) -> Sequence[Proposer]:
    """Create a proposer that needs nothing but the rows."""
    return [NgramProposer(facts.max_num_seqs, history=history)]


def proposers_of(
    config: SpeculativeConfig, loaded: Mapping[str, CreateProposer] | None = None
) -> CreateProposers:
    """Return what creates the proposers that an operator wants, in their order; none unless `enabled` is true.

    Args:
        loaded: Name -> what creates a proposer that is loaded; None: none is created, or there is no such one.

    Raises:
        FeatureDisabled: No proposer of this name is built or installed, or it cannot be imported; names it.
    """
    name_to_create = _named_by(config) if config.enabled == "true" else {}

    def create(
        facts: WorkerFacts, history: TokenHistory, forms: FormMatchers | None = None
    ) -> Sequence[Proposer]:
        sources = _Sources(config, facts, history, forms, loaded or {})
        return [
            proposer
            for create_one in name_to_create.values()
            if (proposer := create_one(sources)) is not None
        ]

    return create


def create_speculation(
    rows: RequestRows,
    facts: WorkerFacts,
    create: CreateProposers | None = None,
    forms: FormMatchers | None = None,
    *,
    is_recorded_late: bool = False,
) -> Speculation | None:
    """Return what guesses for a worker with these facts; None if a row gets one token in a step.

    Args:
        create: None: `ngram_only`.
        forms: The matchers of the rows with a form; None: there are none.
        is_recorded_late: Whether steps are launched before the tokens of those before them are here.
    """
    if facts.max_samples_per_row == 1:
        return None
    history = rows.recorded_history if is_recorded_late else rows.history
    proposers = (create or ngram_only)(facts, history, forms)
    return Speculation(rows, proposers, facts.max_samples_per_row - 1, asks_for_found=is_recorded_late)


def _named_by(config: SpeculativeConfig) -> dict[str, Callable[[_Sources], Proposer | None]]:
    names = list(config.proposer_names)
    if not 1 <= len(names) <= MAX_PROPOSERS:
        raise _refused(config, f"it names {len(names)}; 1 to {MAX_PROPOSERS} may be named")
    if DRAFT in names and not config.model:
        raise _refused(config, f"{DRAFT} needs a model; set speculative.model, or leave it out")
    if config.model and DRAFT not in names:
        names.append(DRAFT)
    found = {}
    for name in names:
        found[name] = _OWN.get(name) or _installed(name, config)
    return found


def _installed(name: str, config: SpeculativeConfig) -> Callable[[_Sources], Proposer]:
    """Return what creates the proposer of a package.

    Raises:
        FeatureDisabled: There is none of this name, or it cannot be imported.
    """
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if (point := points.get(name)) is None:
        known = ", ".join((*_OWN, *sorted(points)))
        raise _refused(config, f"{name} is neither built nor installed, only {known}; name some of these")
    try:
        create: CreateProposer = point.load()
    except Exception as error:  # of a package that is not ours
        why = f"{point.value} of {ENTRY_POINT_GROUP} cannot be imported: {error!r}; leave {name} out"
        raise _refused(config, why) from error

    def create_guarded(sources: _Sources) -> Proposer:
        return GuardedProposer(name, create, sources.facts, sources.history)

    return create_guarded


def _refused(config: SpeculativeConfig, why: str) -> FeatureDisabled:
    return FeatureDisabled(f"speculative.proposers = {config.proposers[:200]}", why)


def start_own_clock() -> Callable[[], float]:
    """Return what reads the seconds since now that this thread has needed: its own time, and all of it if it has waited
    for something. That a busy machine has stopped it meanwhile does not count.
    """
    started, own_started, num_waits = time.perf_counter(), time.thread_time(), _num_waits()

    def read() -> float:
        if (seconds := time.perf_counter() - started) > _SLOW_S and _num_waits() == num_waits:
            return time.thread_time() - own_started
        return seconds

    return read


def _num_waits() -> int:
    """Return how often this thread has waited for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class GuardedProposer:
    """A `Proposer` of another package. It guesses no more once it has raised, guessed what it may not, or was slow."""

    def __init__(
        self,
        name: str,
        create: CreateProposer,
        facts: WorkerFacts,
        history: TokenHistory,
        *,
        start_clock: StartClock | None = None,
    ) -> None:
        """
        Args:
            start_clock: None: `start_own_clock`.
        """
        self.name = name
        self._vocab_size = facts.model.vocab_size
        self._start_clock = start_clock or start_own_clock
        self._num_calls = 0
        self._slow_calls: list[int] = []
        """The latest slow calls, counted from the first call."""
        self._proposer: Proposer | None = None
        """The package's own; None: it is switched off."""
        try:
            self._proposer = create(facts, _read_only(history))
        except Exception:  # of a package that is not ours
            self._switch_off("it cannot be created", is_raised=True)

    def enter(self, row: NewRow) -> None:
        self._call("enter", row)

    def leave(self, slot: int) -> None:
        self._call("leave", slot)

    def accept(self, slots: I64, counts: I64) -> None:
        self._call("accept", slots.copy(), counts.copy())

    def propose(self, slots: I64, limits: I64) -> Guesses:
        guesses = self._call("propose", slots.copy(), limits.copy())
        if self._proposer is not None:
            try:
                return _checked(guesses, limits, self._vocab_size)
            except Exception as error:  # of what a package has returned
                self._switch_off(f"its guesses cannot be used: {error}", is_raised=False)
        return Guesses(np.zeros(0, np.int64), np.zeros(slots.size, np.int64))

    def _call(self, method: str, *arguments: object) -> Any:
        """Return what a method returns; None where it fails, or is not called any more."""
        if self._proposer is None:
            return None
        read_clock = self._start_clock()
        try:
            returned = getattr(self._proposer, method)(*arguments)
        except Exception:  # of a package that is not ours
            self._switch_off(f"{method} has failed", is_raised=True)
            return None
        self._num_calls += 1
        if (took_s := read_clock()) > _SLOW_S:
            self._slow_calls = [call for call in self._slow_calls if call > self._num_calls - 100]
            self._slow_calls.append(self._num_calls)
            if len(self._slow_calls) > _MAX_SLOW:
                self._switch_off(
                    f"{_MAX_SLOW} calls of 100 may take more than {1e3 * _SLOW_S:g} ms, and {method} took "
                    f"{1e3 * took_s:.1f} ms",
                    is_raised=False,
                )
        return returned

    def _switch_off(self, why: str, *, is_raised: bool) -> None:
        self._proposer = None
        log.warning(
            "speculative.proposers: %s of a package is switched off: %s", self.name, why, exc_info=is_raised
        )


def _checked(guesses: Any, limits: I64, vocab_size: int) -> Guesses:
    """Return guesses of a package in the right types.

    Raises:
        ValueError: They are not what was asked for; says why.
    """
    token_ids, counts = _integers(guesses.token_ids), _integers(guesses.counts)
    if counts.size != limits.size:
        raise ValueError(f"{counts.size} counts for {limits.size} rows")
    if counts.size and (counts.min() < 0 or (counts > limits).any()):
        raise ValueError(f"counts {counts.tolist()} where 0 to {limits.tolist()} are granted")
    if counts.sum() != token_ids.size:
        raise ValueError(f"{token_ids.size} tokens, and counts of {counts.sum()}")
    if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= vocab_size):
        raise ValueError(f"tokens {token_ids.tolist()}, of which some are not within 0 to {vocab_size - 1}")
    return Guesses(token_ids, counts)


def _integers(values: Any) -> I64:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{array.dtype} of shape {list(array.shape)} in place of one row of integers")
    return array.astype(np.int64)


def _read_only(history: TokenHistory) -> TokenHistory:
    """Return views of the same tokens that cannot be written to."""

    def view(array: NDArray[Any]) -> NDArray[Any]:
        seen = array.view()
        seen.flags.writeable = False
        return seen

    return TokenHistory(view(history.token_ids), view(history.num_prompt), view(history.num_known))
