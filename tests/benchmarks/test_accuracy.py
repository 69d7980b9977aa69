"""The accuracy benchmark's figures, and its questions to a peer."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.accuracy.__main__ import ALL, CHANGED, SHORT, figures, text
from benchmarks.accuracy.base import Pass, Scores
from benchmarks.accuracy.peer_scorer import PeerScorer
from benchmarks.peers.engines import Engine
from benchmarks.peers.models import ADAPTERS
from tests.oracle.entries import Entry

FAKE_ADAPTER = Path(__file__).with_name("peers") / "fake_adapter.py"


def scores(logprobs: list[float], num_best: int) -> Scores:
    return Scores(np.array(logprobs), np.arange(len(logprobs)) < num_best)


def test_figures_are_distances_over_all_tokens_and_over_those_of_short_prompts():
    entries = [Entry([1] * 3, [5, 6], []), Entry([1] * 200, [5, 6], [])]
    ours = [scores([-1.0, -2.0], 2), scores([-1.0, -1.0], 1)]
    exact = [scores([-1.5, -2.0], 2), scores([-1.0, -2.0], 2)]
    column_to_figure = {
        figure.name.rsplit(": ", 1)[1]: figure for figure in figures("a: whole", entries, ours, exact)
    }
    assert {name: column_to_figure[name].median for name in (ALL, SHORT, CHANGED)} == {
        ALL: 1.5 / 4,
        SHORT: 0.5 / 2,
        CHANGED: 100 / 4,
    }
    table = text({figure.name: figure for figure in column_to_figure.values()})
    assert all(cell in table for cell in ("| a ", "0.3750", "25.0%"))


def test_peer_is_asked_for_every_entry():
    engine = Engine(
        "fake", "", "", str(FAKE_ADAPTER), lambda: "nothing", env=lambda cpus: {"PYTHONPATH": str(ADAPTERS)}
    )
    [(how, answers)] = PeerScorer(engine).score([Entry([1, 2], [7, 8, 9], []), Entry([3], [4, 4, 4], [])])
    assert how is Pass.TOKENS
    assert [answer.logprobs.tolist() for answer in answers] == [[-7.0, -8.0, -9.0], [-4.0, -4.0, -4.0]]
    assert [answer.is_best.tolist() for answer in answers] == [[True, True, True], [False, False, False]]


@pytest.fixture
def adapters_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ADAPTERS), *sys.path])


@pytest.mark.usefixtures("adapters_path")
def test_scores_of_logits_are_torch_log_softmax():
    from scores import scored

    logits = torch.randn(5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 300
    tokens = [3, 0, 10, 10, int(logits[4].argmax())]
    answer = scored(logits.numpy(), tokens)
    expected = torch.log_softmax(logits, dim=-1)[torch.arange(5), torch.tensor(tokens)]
    np.testing.assert_allclose(answer.logprobs, expected.numpy(), rtol=1e-12)
    assert answer.is_best[4]
    assert answer.is_best == (logits.argmax(dim=-1) == torch.tensor(tokens)).tolist()
