"""SamplingParams as Python programs make them."""

from __future__ import annotations

import pytest

from triptych import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("repetition_penalty", 0.001, "repetition_penalty: 0.001 is below the limit 0.01"),
        ("repetition_penalty", 1e9, "repetition_penalty: 1e+09 is above the limit 100"),
        ("top_p", 0.0, "top_p: 0 must be above 0"),
        ("max_tokens", 1 << 40, "max_tokens: 1099511627776 is above the limit 4294967295"),
        ("seed", -2, "seed: -2 is below the limit 0"),
        ("temperature", float("nan"), "temperature: nan is not a finite number"),
        ("temperature", "warm", "temperature: 'warm' is not a number"),
    ],
)
def test_limits_are_shown_as_users_write_them(field, value, told):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value) == told


def test_seed_minus_1_is_none():
    assert SamplingParams(seed=-1) == SamplingParams()
