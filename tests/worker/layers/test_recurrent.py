"""Mixers with a recurrent state: their shares among ranks, their pages, and the bits of a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.ops.recurrent import rows
from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.checkpoint.architecture import StateSpec
from triptych.errors import ConfigError, FeatureDisabled
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.rank_group import OneRank
from triptych_services.worker.context.resolved_config import RankFacts
from triptych_services.worker.layers.recurrent import create_mixer
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.layers.weights import find_weight_targets

DELTA = StateSpec(
    kind="gated_delta", taps=4, num_heads=8, value_dim=5, num_key_heads=4, key_dim=6, norm="before_gate"
)
MAMBA2 = StateSpec(kind="mamba2", taps=4, num_heads=6, value_dim=8, num_key_heads=2, key_dim=5, norm_groups=2)
SPECS = {
    "gated_delta": DELTA,
    "mamba2": MAMBA2,
    "mamba": StateSpec(
        kind="mamba", taps=3, num_heads=1, value_dim=40, key_dim=6, dt_rank=3, dt_norm="plain"
    ),
    "short_conv": StateSpec(kind="short_conv", taps=5, num_heads=1, value_dim=24, conv_bias=True, bias=True),
}


def create(spec: StateSpec, *, rank: int = 0, num_ranks: int = 1) -> nn.Module:
    """A mixer with this rank's share of random weights, the same for all ranks."""
    place = RankFacts(tensor_parallel_rank=rank, tensor_parallel_size=num_ranks)
    config = replace(tiny_config(tiny_architecture()), rank=place)
    mixer = create_mixer(spec, layer_index=0, context=ModelContext(config, OneRank()), prefix="mixer")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, target in sorted(find_weight_targets(mixer).items()):
            target.load(name, torch.randn(target.checkpoint_shape, generator=generator) * 0.3)
    return mixer


def compute(mixer: nn.Module, hidden: Tensor, pages: Tensor, lens: list[int], first: list[bool]) -> Tensor:
    """Compute a step in which row i has page i + 1, and begins or goes on there."""
    own = list(range(1, len(lens) + 1))
    read = [0 if begins else page for begins, page in zip(first, own, strict=True)]
    context = StepContext((), (), rows(lens, read, own), state_pages=[pages])
    with torch.inference_mode():
        out: Tensor = mixer(hidden, context)
    return out


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [("gated_delta", 2), ("gated_delta", 4), ("mamba2", 2), ("short_conv", 4)]
)
def test_ranks_share_a_mixer(kind: str, num_ranks: int) -> None:
    """Those that add up only what comes out; tests/worker/parallel has the others."""
    spec, generator = SPECS[kind], torch.Generator().manual_seed(1)
    hidden, lens, first = torch.randn(12, 24, generator=generator), [9, 3], [True, True]
    whole_pages = torch.zeros(3, spec.page_elements)
    whole = compute(create(spec), hidden, whole_pages, lens, first)
    parts = []
    for rank in range(num_ranks):
        pages = torch.zeros(3, spec.page_elements // num_ranks)
        parts.append(compute(create(spec, rank=rank, num_ranks=num_ranks), hidden, pages, lens, first))
        if spec.num_key_heads:
            heads, sizes = spec.num_heads // num_ranks, (spec.key_dim, spec.value_dim)
            states = pages[:, -heads * sizes[0] * sizes[1] :].unflatten(1, (-1, *sizes))
            expected = whole_pages[:, -spec.num_channels * spec.key_dim :].unflatten(1, (-1, *sizes))
            own = expected[:, heads * rank : heads * (rank + 1)]
            torch.testing.assert_close(states, own, rtol=1e-5, atol=1e-5)
    assert whole.abs().max() > 0.1
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "num_ranks", "problem"),
    [
        (DELTA, 3, "3 does not divide heads of gated_delta = 8"),
        (
            replace(DELTA, num_heads=12, num_key_heads=4),
            3,
            "3 does not divide key heads or groups of gated_delta = 4",
        ),
        (MAMBA2, 4, "4 does not divide heads of mamba2 = 6"),
        (replace(MAMBA2, norm_groups=3), 2, "2 does not divide groups of a norm = 3"),
        (SPECS["mamba"], 3, "3 does not divide channels of mamba = 40"),
        (SPECS["short_conv"], 5, "5 does not divide channels of short_conv = 24"),
    ],
)
def test_what_ranks_do_not_divide_is_refused(spec: StateSpec, num_ranks: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"parallel.tensor_parallel_size: {problem}"):
        create(spec, num_ranks=num_ranks)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(FeatureDisabled, match="state rwkv: this worker knows gated_delta, mamba2"):
        create(replace(MAMBA2, kind="rwkv"))


@pytest.mark.skipif(not isa(), reason="plain torch sums by the shape")
@pytest.mark.parametrize("kind", SPECS)
def test_a_row_has_the_same_bits_however_it_is_cut_and_batched(kind: str) -> None:
    """Prompts, single tokens and steps beside another row; also the page that is left."""
    mixer = create(SPECS[kind])
    hidden = torch.randn(30, 24, generator=torch.Generator().manual_seed(2))
    pages = torch.full((3, SPECS[kind].page_elements), torch.nan)
    whole = compute(mixer, hidden, pages, [30], [True])
    for lens in ([1] * 30, [13, 17], [4, 1, 25]):
        own, start, outs = torch.full_like(pages, torch.nan), 0, []
        for length in lens:
            other = hidden[: 2 * length]
            both = torch.cat((hidden[start : start + length], other))
            out = compute(mixer, both, own, [length, len(other)], [start == 0, True])
            outs.append(out[:length])
            start += length
        assert torch.equal(torch.cat(outs), whole)
        assert torch.equal(own[1], pages[1])
