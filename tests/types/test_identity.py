"""The comparison of two models: how much is alike, and the first thing that is not."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace

import pytest

from triptych.types.identity import Likeness, ModelIdentity, compare

MODEL = ModelIdentity("f" * 64, weights="a" * 64, adapter="", numerics="avx2", is_batch_invariant=True)


@pytest.mark.parametrize(
    ("other", "likeness", "difference"),
    [
        (MODEL, Likeness.TOKENS, ""),
        (replace(MODEL, is_batch_invariant=False), Likeness.NUMERICS, "batch invariance: it is off"),
        (replace(MODEL, numerics="cuda"), Likeness.WEIGHTS, "numerics: avx2 and cuda"),
        (
            replace(MODEL, numerics='{"activation_bits": 8, "dtype": "float32"}'),
            Likeness.WEIGHTS,
            'numerics: avx2 and {"activation',
        ),
        (replace(MODEL, numerics=""), Likeness.WEIGHTS, "numerics: avx2 and not known"),
        (replace(MODEL, adapter="b" * 64), Likeness.FORM, "adapter: none and bbbbbbbbbbbb"),
        (replace(MODEL, weights="b" * 64), Likeness.FORM, "weights: aaaaaaaaaaaa and bbbbbbbbbbbb"),
        (
            replace(MODEL, fingerprint="e" * 64),
            Likeness.NOTHING,
            "fingerprint: ffffffffffff and eeeeeeeeeeee",
        ),
    ],
)
def test_the_first_difference_decides(other: ModelIdentity, likeness: Likeness, difference: str) -> None:
    assert compare(MODEL, other) == (likeness, difference)
    assert compare(other, MODEL).likeness is likeness


def test_a_digest_names_one_identity_and_no_field_that_is_not_set() -> None:
    @dataclass(frozen=True, slots=True)
    class OfTheNextVersion(ModelIdentity):
        precision: str = ""

    fields = {each.name: getattr(MODEL, each.name) for each in dataclasses.fields(MODEL)}
    assert OfTheNextVersion(**fields).digest == MODEL.digest
    changed = [OfTheNextVersion(**fields, precision="tf32"), replace(MODEL, weights="", adapter="a" * 64)]
    digests = {MODEL.digest, *(other.digest for other in changed)}
    digests |= {replace(MODEL, **{name: type(value)()}).digest for name, value in fields.items() if value}
    assert len(digests) == 1 + 2 + 4


def test_numerics_that_differ_are_named_with_both_values() -> None:
    avx2 = replace(
        MODEL, numerics='{"activation_bits": 8, "dtype": "float32", "processor": "avx2", "torch": "2.13"}'
    )
    vnni = replace(MODEL, numerics='{"activation_bits": 16, "dtype": "float32", "processor": "avx512_vnni"}')
    assert compare(avx2, vnni) == (
        Likeness.WEIGHTS,
        "numerics: activation_bits 8 and 16, processor avx2 and avx512_vnni, torch 2.13 and not known",
    )


def test_numerics_that_neither_side_knows_are_not_alike() -> None:
    unknown = replace(MODEL, numerics="")
    assert compare(unknown, unknown).likeness is Likeness.WEIGHTS


def test_a_worker_of_an_earlier_version_names_no_weights() -> None:
    earlier = replace(MODEL, weights="")
    assert compare(MODEL, earlier).likeness is Likeness.TOKENS
    assert compare(earlier, earlier).likeness is Likeness.TOKENS
