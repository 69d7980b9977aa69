"""Judges a history: pure functions from what was seen to what is wrong with it. No violation is the empty list."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import jsonschema

from tests.chaos.recorder import ENDS, Answer, Choice, Request, Seen, answers_of

LATE_S = 1.0
"""How late a deadline may be noticed."""


@dataclass(frozen=True)
class Step:
    """A step that a worker has computed, or a session that it has granted."""

    worker: str
    """Its boot id."""
    engine: str
    """The engine's boot id."""
    epoch: int
    """The session that it belongs to."""
    step_id: int
    """0: the session was granted."""


@dataclass(frozen=True)
class Home:
    """Things that one process still holds when all clients have gone."""

    name: str
    held: Mapping[str, float]
    """Names of what may be held -> how much; all of it should be 0."""


@dataclass
class Evidence:
    """All that a run has left behind."""

    requests: Sequence[Request]
    history: Sequence[Seen]
    oracle: Mapping[str, Answer]
    """Answers to each request when nothing breaks."""
    other_oracles: Sequence[Mapping[str, Answer]] = ()
    """The same of models that others were replaced by. An answer is of one model from its first token to its last."""
    steps: Sequence[Step] = ()
    homes: Sequence[Home] = ()
    may_fail_with: Collection[str] = ()
    """Codes of errors that are right in this run."""
    is_exact_time: bool = False
    """The clock is one that does not hurry."""


def one_end(evidence: Evidence) -> list[str]:
    """Each request has one terminal message, each choice one reason, and nothing comes after either."""
    found = []
    by_request = defaultdict(list)
    for seen in evidence.history:
        by_request[seen.request].append(seen)
    for request in evidence.requests:
        seens = by_request[request.name]
        num_ends = sum(seen.what in ENDS for seen in seens)
        if num_ends != 1:
            found.append(f"{request.name}: {num_ends} ends")
        elif seens[-1].what not in ENDS:
            found.append(f"{request.name}: {seens[-1].what} after its end")
        ended: set[int] = set()
        for seen in seens:
            if seen.what == "delta":
                if seen.index in ended:
                    found.append(f"{request.name}: output of choice {seen.index} after its end")
                if seen.finish_reason:
                    ended.add(seen.index)
        if seens and seens[-1].what == "finished":
            missing = set(range(int(request.sampling.get("n", 1)))) - ended
            if missing:
                found.append(f"{request.name}: finished without an end of choices {sorted(missing)}")
    return found


def unchanged(evidence: Evidence) -> list[str]:
    """Each answer is a prefix of the unbroken run's tokens, text and log-probabilities; a whole answer is all of it."""
    found = []
    finished = {seen.request for seen in evidence.history if seen.what == "finished"}
    answers = answers_of(evidence.history)
    for request in evidence.requests:
        expected = evidence.oracle[request.name]
        for index, choice in answers.get(request.name, Answer()).choices.items():
            whole = expected.choices.get(index, Choice())
            if any(
                _is_of(choice, oracle[request.name].choices.get(index), request.name in finished)
                for oracle in evidence.other_oracles
            ):
                continue
            for name in ("token_ids", "text", "logprobs"):
                own, right = getattr(choice, name), getattr(whole, name)
                if own != right[: len(own)]:
                    found.append(f"{request.name}: {name} of choice {index}: {own!r}, unbroken {right!r}")
                elif request.name in finished and own != right:
                    found.append(f"{request.name}: choice {index} lacks {right[len(own) :]!r} of its {name}")
            if request.name in finished and choice.ends[:1] != whole.ends:
                found.append(f"{request.name}: choice {index} ended {choice.ends}, unbroken {whole.ends}")
    return found


def _is_of(choice: Choice, whole: Choice | None, is_finished: bool) -> bool:
    """Return whether a choice, as far as it has come, is this one."""
    if whole is None:
        return False
    if is_finished:
        return choice == whole
    return all(
        getattr(choice, name) == getattr(whole, name)[: len(getattr(choice, name))]
        for name in ("token_ids", "text", "logprobs")
    )


def forms_hold(evidence: Evidence) -> list[str]:
    """An answer with a form has it, unless it ended at its limit."""
    forms = {request.name: request.sampling.get("structured_outputs") for request in evidence.requests}
    return [
        f"{name}: choice {index} is not of its form: {choice.text!r}"
        for name, answer in answers_of(evidence.history).items()
        for index, choice in answer.choices.items()
        if (form := forms[name]) is not None and choice.ends[:1] == [("STOP", None)]
        if not _has_form(choice.text, form)
    ]


def _has_form(text: str, form: Mapping[str, str]) -> bool:
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    try:
        jsonschema.validate(json.loads(text), json.loads(form["json"]))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def none_lost(evidence: Evidence) -> list[str]:
    """A request whose client stays is answered, whatever breaks."""
    exempt = {request.name for request in evidence.requests if not request.must_finish}
    return [
        f"{seen.request}: {seen.error}"
        for seen in evidence.history
        if seen.what == "failed"
        and seen.request not in exempt
        and seen.error.partition(":")[0] not in evidence.may_fail_with
    ]


def usage_counted_once(evidence: Evidence) -> list[str]:
    """The usage is that of the unbroken run."""
    found = []
    for name, answer in answers_of(evidence.history).items():
        expected = evidence.oracle[name].usage
        if evidence.other_oracles and len(answer.choices) > 1:
            continue  # each choice may be of another model
        allowed = [expected, *(oracle[name].usage for oracle in evidence.other_oracles)]
        if answer.usage is not None and answer.usage not in allowed:
            found.append(f"{name}: usage {answer.usage}, unbroken {expected}")
    return found


def deadlines_hold(evidence: Evidence) -> list[str]:
    """Nothing outlives its deadline by more than a second."""
    if not evidence.is_exact_time:
        return []
    first: dict[str, float] = {}
    found = []
    limits = {request.name: request.timeout_s for request in evidence.requests}
    for seen in evidence.history:
        began = first.setdefault(seen.request, seen.at_s)
        limit = limits[seen.request]
        if limit is not None and seen.at_s > began + limit + LATE_S:
            found.append(f"{seen.request}: {seen.what} {seen.at_s - began:.2f} s on, deadline {limit:g} s")
    return found


def nothing_from_the_fenced(evidence: Evidence) -> list[str]:
    """A worker computes no step of an earlier session, and none of an engine after another has had it."""
    found, latest = [], defaultdict[str, int](int)
    engines = defaultdict[str, list[str]](list)
    for step in evidence.steps:
        if step.epoch < latest[step.worker]:
            found.append(
                f"{step.worker}: step {step.step_id} of epoch {step.epoch} after {latest[step.worker]}"
            )
        latest[step.worker] = max(latest[step.worker], step.epoch)
        if step.engine in engines[step.worker][:-1]:
            found.append(f"{step.worker}: step {step.step_id} of {step.engine}, which was replaced")
        elif step.engine not in engines[step.worker]:
            engines[step.worker].append(step.engine)
    return found


def all_home(evidence: Evidence) -> list[str]:
    """Blocks, rows, shares and numbers have come back."""
    return [
        f"{home.name}: {name} is {amount:g}"
        for home in evidence.homes
        for name, amount in home.held.items()
        if amount
    ]


VALIDATORS = (
    one_end,
    unchanged,
    forms_hold,
    none_lost,
    usage_counted_once,
    deadlines_hold,
    nothing_from_the_fenced,
    all_home,
)


def violations_of(evidence: Evidence) -> list[str]:
    """Return all that is wrong, each with the validator that says so."""
    return [f"{validate.__name__}: {what}" for validate in VALIDATORS for what in validate(evidence)]
