"""A row's vectors: as torch computes them, and with the same bits however its states come."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from triptych.checkpoint.pooling import ClassifierSpec, DenseSpec, PoolingSpec
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.step import F32, RowError
from triptych_services.worker.runner.pooling import (
    MAX_TOKEN_VECTOR_BYTES,
    NOT_FINITE,
    DenseLayer,
    Pooler,
    apply_activation,
)

HIDDEN = 48


def states_of(length: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).normal(size=(length, HIDDEN)).astype(np.float32)


def vectors_in(pooler: Pooler, params: PoolingParams, states: F32, cuts: list[int]) -> F32:
    """The vectors of a text that comes in chunks, in memory that is overwritten after each."""
    row = pooler.row(params)
    for start, stop in itertools.pairwise([0, *cuts, len(states)]):
        wanted = row.wanted(start, stop - start, is_last=stop == len(states))
        memory = states[start:stop][wanted].copy()
        if len(memory):
            row.add(memory)
        memory[:] = np.nan
    vectors = pooler.vectors(params, row)
    assert not isinstance(vectors, RowError)
    return vectors


@pytest.mark.parametrize("kind", list(PoolingKind))
@pytest.mark.parametrize("task", [Task.EMBED, Task.TOKEN_EMBED])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 1000])
def test_the_bits_do_not_depend_on_the_cuts(task: Task, kind: PoolingKind, length: int) -> None:
    pooler, params = Pooler(PoolingSpec(kind), HIDDEN), PoolingParams(task)
    states, rng = states_of(length), np.random.default_rng(1)
    whole = vectors_in(pooler, params, states, [])
    for num_cuts in (1, 3, 20):
        cuts = sorted(set(rng.integers(1, length, num_cuts).tolist())) if length > 1 else []
        assert vectors_in(pooler, params, states, cuts).tobytes() == whole.tobytes()


def test_a_long_mean_loses_nothing() -> None:
    states = states_of(8192) + np.float32(100.0)
    params = PoolingParams(Task.EMBED, normalize=False)
    (mean,) = vectors_in(Pooler(PoolingSpec(PoolingKind.MEAN), HIDDEN), params, states, [5, 4000])
    np.testing.assert_allclose(mean, states.astype(np.float64).mean(axis=0), rtol=5e-7)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("none", torch.nn.Identity()),
        ("softmax", torch.nn.Softmax(-1)),
        ("sigmoid", torch.nn.Sigmoid()),
        ("tanh", torch.nn.Tanh()),
        ("relu", torch.nn.ReLU()),
        ("gelu", torch.nn.GELU()),
        ("silu", torch.nn.SiLU()),
    ],
)
def test_activations_are_those_of_torch(name: str, theirs: torch.nn.Module) -> None:
    values = np.array([-1000.0, -90.0, -3.0, -1e-6, 0.0, 0.5, 4.0, 80.0, 1000.0], np.float32)
    found = apply_activation(name, values)
    assert found.dtype == np.float32
    wide = theirs(torch.from_numpy(values).double())
    torch.testing.assert_close(torch.from_numpy(found), wide.float(), rtol=1e-6, atol=1e-7)


def test_layers_then_the_cut_then_the_scale() -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(HIDDEN, 30), torch.nn.Tanh(), torch.nn.Linear(30, 20, bias=False)
    )
    first, _, last = layers
    dense = [
        DenseLayer(first.weight.detach().numpy(), first.bias.detach().numpy(), "tanh"),
        DenseLayer(last.weight.detach().numpy()),
    ]
    specs = (
        DenseSpec("2_Dense", HIDDEN, 30, bias=True, activation="tanh"),
        DenseSpec("3_Dense", 30, 20, bias=False, activation="none"),
    )
    pooler = Pooler(PoolingSpec(PoolingKind.LAST, dense=specs), HIDDEN, dense=dense)
    states = states_of(5)
    found = vectors_in(pooler, PoolingParams(Task.EMBED, dimensions=7), states, [2])
    theirs = torch.nn.functional.normalize(layers(torch.from_numpy(states[-1:]))[:, :7], dim=1)
    torch.testing.assert_close(torch.from_numpy(found), theirs.detach(), rtol=1e-5, atol=1e-6)
    assert pooler.refusal(PoolingParams(Task.EMBED, dimensions=20), 5) is None
    assert pooler.refusal(PoolingParams(Task.EMBED, dimensions=21), 5) is not None
    assert pooler.refusal(PoolingParams(Task.TOKEN_EMBED, dimensions=21), 5) is None, "layers are for texts"


def test_a_classifier_reads_the_state_that_it_was_trained_on() -> None:
    weight = states_of(3, seed=5)
    spec = PoolingSpec(PoolingKind.MEAN, classifier=ClassifierSpec(("a", "b", "c"), "softmax"))
    states = states_of(6)
    for kind, state in ((PoolingKind.FIRST, states[0]), (PoolingKind.LAST, states[-1])):
        pooler = Pooler(spec, HIDDEN, classifier=DenseLayer(weight), classifier_kind=kind)
        (found,) = vectors_in(pooler, PoolingParams(Task.CLASSIFY, PoolingKind.MEAN), states, [3])
        theirs = torch.softmax(torch.from_numpy(weight) @ torch.from_numpy(state), 0)
        torch.testing.assert_close(torch.from_numpy(found), theirs, rtol=1e-5, atol=1e-6)


def test_a_text_that_was_computed_whole_has_the_same_vectors() -> None:
    states = states_of(300)
    for task, kind in itertools.product((Task.EMBED, Task.TOKEN_EMBED), PoolingKind):
        pooler, params = Pooler(PoolingSpec(kind), HIDDEN), PoolingParams(task)
        found = pooler.pool(params, states)
        assert not isinstance(found, RowError)
        assert found.tobytes() == vectors_in(pooler, params, states, [7, 150]).tobytes()


def test_a_function_of_another_package_gets_all_states() -> None:
    def largest(states: F32) -> F32:
        found: F32 = states.max(axis=0)
        return found

    pooler = Pooler(PoolingSpec(PoolingKind.MEAN, normalize=False), HIDDEN, own=largest)
    states = states_of(40)
    (found,) = vectors_in(pooler, PoolingParams(), states, [7, 31])
    np.testing.assert_array_equal(found, states.max(axis=0))
    (last,) = vectors_in(pooler, PoolingParams(kind=PoolingKind.LAST), states, [7])
    np.testing.assert_array_equal(last, states[-1])
    assert not pooler.row(PoolingParams()).reads_last_alone
    refusal = pooler.refusal(PoolingParams(), MAX_TOKEN_VECTOR_BYTES // (4 * HIDDEN) + 1)
    assert refusal is not None


@pytest.mark.parametrize("wrong", [lambda states: states, lambda states: states[0, :3], lambda states: 1 / 0])
def test_a_function_that_fails_fails_its_row_alone(wrong: Callable[[F32], F32]) -> None:
    pooler, params = Pooler(PoolingSpec(PoolingKind.MEAN), HIDDEN, own=wrong), PoolingParams()
    found = pooler.pool(params, states_of(4))
    assert isinstance(found, RowError)
    assert "the model's pooler" in found.message


def test_a_vector_of_zeros_stays_so() -> None:
    pooler = Pooler(PoolingSpec(PoolingKind.LAST), HIDDEN)
    found = vectors_in(pooler, PoolingParams(), np.zeros((1, HIDDEN), np.float32), [])
    assert not found.any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("task", [Task.EMBED, Task.TOKEN_EMBED])
def test_states_that_are_not_finite_are_reported(value: float, task: Task) -> None:
    pooler, params = Pooler(PoolingSpec(PoolingKind.MEAN), HIDDEN), PoolingParams(task)
    states = states_of(9)
    states[4, 7] = value
    row = pooler.row(params)
    row.add(states)
    assert pooler.vectors(params, row) is NOT_FINITE


def test_a_layer_that_overflows_is_reported() -> None:
    dense = [DenseLayer(np.full((2, HIDDEN), 3e38, np.float32))]
    pooler, params = Pooler(PoolingSpec(PoolingKind.LAST), HIDDEN, dense=dense), PoolingParams()
    row = pooler.row(params)
    row.add(np.ones((1, HIDDEN), np.float32))
    assert pooler.vectors(params, row) is NOT_FINITE


def test_a_checkpoint_that_names_its_sizes_has_no_others() -> None:
    pooler = Pooler(PoolingSpec(PoolingKind.LAST, matryoshka_dimensions=(8, 16)), HIDDEN)
    refusals = [pooler.refusal(PoolingParams(dimensions=size), 3) for size in (0, 8, 16, HIDDEN, 12)]
    assert [refusal is None for refusal in refusals] == [True, True, True, True, False]
    assert refusals[-1] is not None
    assert "dimensions: 12 is none of 8, 16" in refusals[-1].message


def test_refusals_name_the_field() -> None:
    pooler = Pooler(PoolingSpec(PoolingKind.LAST), HIDDEN)
    for params, num_tokens, words in (
        (PoolingParams(Task.CLASSIFY), 3, "task: classify needs a classifier"),
        (PoolingParams(dimensions=49), 3, "dimensions: 49 is not within 1..48"),
        (PoolingParams(dimensions=-1), 3, "dimensions: -1"),
        (
            PoolingParams(Task.TOKEN_EMBED),
            MAX_TOKEN_VECTOR_BYTES // (4 * HIDDEN) + 1,
            "prompt: the states of",
        ),
    ):
        refusal = pooler.refusal(params, num_tokens)
        assert refusal is not None
        assert words in refusal.message
    assert pooler.refusal(PoolingParams(Task.TOKEN_EMBED), MAX_TOKEN_VECTOR_BYTES // (4 * HIDDEN)) is None
