"""The threshold that a program finds for a row, against sorted float64."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.triton.sampling.scan import LOWEST, key_of
from triptych_kernels.triton.sampling.select import MASS_OF_BEST, bound_of_largest, find_threshold

GROUP, TILE_GROUPS, MAX_GATHERED = 8, 32, 32
TEMPERATURE = 0.8


@triton.jit
def _find(
    out, logits, groups, gathered, group_maxima, num_groups, vocab_size, bound, lowest_bound, needed, best,
    temperature, by_mass,
    NUM_GROUPS: tl.constexpr, TILE_GROUPS: tl.constexpr, GROUP: tl.constexpr, MAX_GATHERED: tl.constexpr,
):  # fmt: skip
    best_key = key_of(tl.load(best))
    threshold = find_threshold(
        logits, groups, gathered, group_maxima, num_groups, vocab_size, tl.load(bound), tl.load(lowest_bound),
        tl.load(needed), best_key, temperature, by_mass != 0, NUM_GROUPS, TILE_GROUPS, GROUP, MAX_GATHERED,
    )  # fmt: skip
    tl.store(out, threshold)


def threshold_of(logits: Tensor, *, bound: float, lowest_bound: float, needed: float, by_mass: bool) -> float:
    num_groups = triton.cdiv(len(logits), GROUP)
    padded = torch.nn.functional.pad(logits, (0, num_groups * GROUP - len(logits)), value=-torch.inf)
    out = torch.full((1,), torch.nan, device=logits.device)
    _find[(1,)](
        out, logits, torch.full((num_groups,), 2**30, dtype=torch.int32, device=logits.device),
        torch.full((MAX_GATHERED,), 2**30, dtype=torch.int32, device=logits.device),
        padded.view(num_groups, GROUP).amax(1), num_groups, len(logits),
        torch.tensor([bound], device=logits.device), torch.tensor([lowest_bound], device=logits.device),
        torch.tensor([int(needed)], device=logits.device), logits.amax().view(1), TEMPERATURE, int(by_mass),
        NUM_GROUPS=triton.next_power_of_2(num_groups), TILE_GROUPS=TILE_GROUPS, GROUP=GROUP,
        MAX_GATHERED=MAX_GATHERED,
    )  # fmt: skip
    return out.item()


def distribution(name: str, device: torch.device) -> Tensor:
    """[403] logits."""
    logits = torch.randn(403, generator=torch.Generator().manual_seed(5)) * 3
    shaped = {
        "spread": logits,
        "flat": 7 + logits / 1000,
        "many equals": logits.round(),
        "a third masked": torch.where(torch.arange(403) % 3 == 0, -torch.inf, logits),
        "of all sizes": logits**25,
        "all equal": torch.zeros(403),
    }
    return shaped[name].to(device)


DISTRIBUTIONS = ["spread", "flat", "many equals", "a third masked", "of all sizes", "all equal"]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("first_bound", ["close", "too high", "too low"])
def test_as_many_as_asked_are_kept_with_their_equals(
    name: str, first_bound: str, device: torch.device
) -> None:
    logits = distribution(name, device)
    ordered = logits.sort(descending=True).values
    num_kept = 268
    kth = ordered[num_kept - 1].item()
    bound = {"close": ordered[300].item(), "too high": ordered[100].item(), "too low": LOWEST.value}[
        first_bound
    ]
    threshold = threshold_of(
        logits, bound=max(bound, LOWEST.value), lowest_bound=LOWEST.value, needed=num_kept, by_mass=False
    )
    assert (logits >= threshold).sum() == (logits >= max(kth, LOWEST.value)).sum()
    assert threshold > -torch.inf


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(("share", "first"), [(1e-9, 20), (0.5, 240), (0.999, 20)])
def test_the_fewest_are_kept_whose_mass_suffices(
    name: str, share: float, first: int, device: torch.device
) -> None:
    logits = distribution(name, device)
    ordered = logits.sort(descending=True).values
    masses = ((logits.double() - ordered[0].double()) / TEMPERATURE).exp()
    needed = masses.sum().item() * share
    threshold = threshold_of(
        logits,
        bound=ordered[first].item(),
        lowest_bound=LOWEST.value,
        needed=needed * MASS_OF_BEST.value,
        by_mass=True,
    )
    threshold = logits[logits >= threshold].min()
    # a sum may miss the need by the rounding of float32
    assert masses[logits >= threshold].sum() >= needed * (1 - 1e-5)
    assert masses[logits > threshold].sum() < needed * (1 + 1e-5)


@triton.jit
def _bound(out, keys, num_needed, num_tolerated, SIZE: tl.constexpr):
    tl.store(out, bound_of_largest(tl.load(keys + tl.arange(0, SIZE)), num_needed, num_tolerated))


@pytest.mark.parametrize(("num_needed", "num_tolerated"), [(1, 1), (5, 5), (5, 9), (100, 120)])
@pytest.mark.parametrize("step", [1, 40])  # the second makes many equals
def test_a_bound_is_reached_by_no_more_than_tolerated(
    num_needed: int, num_tolerated: int, step: int, device: torch.device
) -> None:
    keys = torch.randint(
        -(2**30), 2**30, (128,), generator=torch.Generator().manual_seed(6), dtype=torch.int32
    )
    keys = (keys // 2**20 // step * step).to(device)
    out = torch.empty(1, dtype=torch.int32, device=device)
    _bound[(1,)](out, keys, num_needed, num_tolerated, SIZE=128)
    reaching = int((keys >= out).sum())
    assert reaching >= num_needed
    assert reaching <= num_tolerated or int((keys > keys[keys >= out].min()).sum()) < num_needed
