"""Few cases in which any two values of two parameters meet."""

from __future__ import annotations

from itertools import combinations, product

from tests.helpers.pairwise import bring_new_pairs, bring_new_values

AXES: dict[str, list[object]] = {
    "dtype": ["half", "float"],
    "rows": [1, 3, 17],
    "heads": [[2], [4]],
    "flag": [True, 1],
}


def test_any_two_values_still_meet_in_fewer_cases() -> None:
    cases = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    kept = [case for case, is_new in zip(cases, bring_new_pairs(cases), strict=True) if is_new]
    assert len(kept) < len(cases)
    for one, other in combinations(AXES, 2):
        for pair in product(AXES[one], AXES[other]):
            assert any(case[one] is pair[0] and case[other] is pair[1] for case in kept)


def test_rows_of_a_table_and_cases_of_one_parameter_are_all_kept() -> None:
    assert all(bring_new_pairs([{"text": text, "error": "too long"} for text in "abcd"]))
    assert all(bring_new_pairs([{"text": text} for text in "abcd"]))
    assert list(bring_new_pairs([{"text": "a"}, {"text": "a"}])) == [True, False]


def test_each_value_is_in_a_case_that_brings_it() -> None:
    cases = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    kept = [case for case, is_new in zip(cases, bring_new_values(cases), strict=True) if is_new]
    assert len(kept) == 1 + sum(len(values) - 1 for values in AXES.values())
    for name, values in AXES.items():
        assert all(any(case[name] is value for case in kept) for value in values)
