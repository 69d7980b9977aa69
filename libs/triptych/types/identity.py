"""The identity of a model, and the one comparison of two of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import NamedTuple

_SHOWN_DIGITS = 12  # of a digest, in an error


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """All that decides a model's tokens, given a request.

    Every place that asks whether two models are the same one asks `compare`.
    """

    fingerprint: str
    """sha256 over architecture, tensor names, shapes, dtypes, file sizes, dtype and quantization; of a simulated
    worker, `simulated-` and the sha256 of what decides its tokens."""
    weights: str = ""
    """sha256 over samples of the weights' bytes. Empty: not known, as from a worker of an earlier version."""
    adapter: str = ""
    """sha256 of the adapter that is applied to the weights. Empty: none is."""
    numerics: str = ""
    """JSON object of what decides the bits beside the weights: processor, kernels, libraries, options. Workers with
    equal ones give equal bits for equal steps. Empty: not known, and equal to no other."""
    is_batch_invariant: bool = False
    """A request's bits do not depend on what runs beside it, nor on how its prompt is cut into steps."""

    @property
    def digest(self) -> str:
        """Names this identity, and no other one: sha256 over its fields that are set, hexadecimal.

        A field that has its default does not join: builds that know different fields take each other's moves.
        """
        given = [(each.name, getattr(self, each.name)) for each in fields(self)]
        is_set = [f"{name}={value!r}" for name, value in given if value]
        return hashlib.sha256("\n".join(is_set).encode()).hexdigest()


class Likeness(IntEnum):
    """How much of two models is alike. Each level includes those before it."""

    NOTHING = 0
    """Nothing that counts."""
    FORM = 1
    """Architecture, tensors and precisions: what a token id and a block of the KV cache are. The weights may differ, as
    those of two fine-tunes do."""
    WEIGHTS = 2
    """They are one model, computed in other ways. Both give good answers, which differ in the long run."""
    NUMERICS = 3
    """Equal steps give equal bits, and KV blocks of one are valid in the other."""
    TOKENS = 4
    """A request that moves from one to the other goes on as if it had not."""


class Comparison(NamedTuple):
    """The result of comparing two models."""

    likeness: Likeness
    difference: str
    """The first thing that keeps them from being more alike, with both values. Empty: there is none."""


def compare(one: ModelIdentity, other: ModelIdentity) -> Comparison:
    """Return how much of two models is alike, and the first thing that is not.

    Weights of which one side says nothing are taken to be alike: it is of an earlier version, which could not know.
    """
    if one.fingerprint != other.fingerprint:
        return _differ(Likeness.NOTHING, "fingerprint", one.fingerprint, other.fingerprint)
    if one.weights and other.weights and one.weights != other.weights:
        return _differ(Likeness.FORM, "weights", one.weights, other.weights)
    if one.adapter != other.adapter:
        return _differ(Likeness.FORM, "adapter", one.adapter or "none", other.adapter or "none")
    if one.numerics != other.numerics or not one.numerics:
        return Comparison(Likeness.WEIGHTS, f"numerics: {_numerics_difference(one.numerics, other.numerics)}")
    if not (one.is_batch_invariant and other.is_batch_invariant):
        return Comparison(Likeness.NUMERICS, "batch invariance: it is off")
    return Comparison(Likeness.TOKENS, "")


def _differ(likeness: Likeness, name: str, one: str, other: str) -> Comparison:
    return Comparison(likeness, f"{name}: {_both(one, other)}")


def _both(one: str, other: str) -> str:
    shown = [value[:_SHOWN_DIGITS] or "not known" for value in (one, other)]
    return f"{shown[0]} and {shown[1]}"


def _numerics_difference(one: str, other: str) -> str:
    """Return the names that have other values on the two sides, with both values."""
    try:
        ours, theirs = json.loads(one), json.loads(other)
        names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    except (ValueError, AttributeError):  # of an earlier version, which has a digest here
        return _both(one, other)
    return ", ".join(
        f"{name} {ours.get(name, 'not known')} and {theirs.get(name, 'not known')}" for name in names
    )
