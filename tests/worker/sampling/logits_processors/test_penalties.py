"""Counting a growing sequence."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from triptych_services.worker.sampling.logits_processors.penalties import TokenCounts


@given(
    st.lists(st.integers(0, 120), min_size=1, max_size=200),
    st.lists(st.integers(0, 120), max_size=40),
    st.lists(st.integers(1, 12), max_size=8),
)
def test_counts_in_steps_equal_counts_of_the_whole(prompt, output, growth):
    sequence = np.array(prompt + output, np.int32)
    counts = TokenCounts()
    length = len(prompt)
    for grown in (0, *growth):
        length = min(length + grown, sequence.size)
        counts.count(sequence[:length], len(prompt))
    counts.count(sequence, len(prompt))
    spoken = Counter(output)
    assert len(set(counts.token_ids.tolist())) == counts.token_ids.size
    assert dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True)) == {
        token_id: spoken[token_id] for token_id in prompt + output
    }


def test_a_prompt_that_does_not_count_leaves_no_entries() -> None:
    counts = TokenCounts(counts_prompt=False)
    counts.count(np.array([5, 6, 5]), 3)
    assert counts.token_ids.tolist() == []
    counts.count(np.array([5, 6, 5, 6, 7, 6]), 3)
    assert dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True)) == {6: 2, 7: 1}


def test_a_long_prompt_counts_once_and_in_order() -> None:
    sequence = np.random.default_rng(0).integers(0, 3000, 9000)
    counts = TokenCounts()
    counts.count(sequence, 8990)
    assert counts.token_ids.tolist() == list(dict.fromkeys(sequence.tolist()))
    output = sequence[8990:].tolist()
    assert counts.output_counts.tolist() == [output.count(token_id) for token_id in counts.token_ids.tolist()]
