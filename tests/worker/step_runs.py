"""Runners over an asynchronous device or none, what they are told to compute, and whether two say the same.

Needs no plug-in of pytest: tests of the GPU's machine import it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from tests.worker.deferred import DeferredStream
from tests.worker.sampling_kinds import KINDS
from tests.worker.tiny import new_row, step_plan, tiny_facts
from triptych.types.step import StepPlan, StepResult
from triptych_services.worker.adapters.store import AdapterStore
from triptych_services.worker.context.rank_group import RankGroup
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.runner.model_runner import LastingParts, ModelRunner
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache
from triptych_services.worker.sampling.grammars import GrammarCompiler

CPU = torch.device("cpu")


def runner_for(
    model: nn.Module,
    config: ResolvedConfig,
    stream: DeferredStream | None,
    group: RankGroup | None = None,
    grammars: GrammarCompiler | None = None,
    adapters: AdapterStore | None = None,
) -> ModelRunner:
    kv = plan_kv_cache(config, free_bytes=1 << 30)
    facts = tiny_facts(config, kv.max_model_len, kv.shape)
    return ModelRunner(
        model=model,
        kv_caches=allocate_kv_cache(kv.shape, CPU, kv.places),
        facts=facts,
        enforce_eager=True,
        stream=stream,
        group=group,
        lasting=LastingParts(grammars, adapters),
    )


def plans(kinds: list[str], num_steps: int) -> list[StepPlan]:
    """A chunked prefill, then decodes; half-way one row leaves and its slot and blocks get another."""
    rng = np.random.default_rng(4)
    rows = [
        new_row(
            slot,
            rng.integers(3, 97, 6 + slot).tolist(),
            range(1 + 12 * slot, 13 + 12 * slot),
            sampling=KINDS[kind],
            seed=17 + slot,
        )
        for slot, kind in enumerate(kinds)
    ]
    first = step_plan(1, new=rows, chunks=dict.fromkeys(range(len(rows)), 4))
    second = step_plan(2, chunks={slot: 2 + slot for slot in range(len(rows))})
    decodes = [step_plan(step_id) for step_id in range(3, num_steps + 1)]
    middle = len(decodes) // 2
    content = replace(rows[0].content, prompt_token_ids=rows[0].token_ids[::-1].copy())
    successor = replace(rows[0], slot_version=9, content=content)
    decodes[middle] = step_plan(middle + 3, removed=[0], new=[successor], chunks={0: 6})
    return [first, second, *decodes]


def assert_same(one: StepResult, other: StepResult) -> None:
    assert one.step_id == other.step_id
    assert one.token_ids.dtype == np.uint32
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.row_errors == other.row_errors
    assert one.prompt_logprobs.keys() == other.prompt_logprobs.keys()
    for row, first in one.prompt_logprobs.items():
        second = other.prompt_logprobs[row]
        assert first.first_position == second.first_position
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_array_equal(first.ranks, second.ranks)
        np.testing.assert_allclose(first.logprobs, second.logprobs, rtol=2e-6)
    assert (one.logprobs is None) == (other.logprobs is None)
    if one.logprobs is not None and other.logprobs is not None:
        for name in ("rows", "offsets", "token_ids", "ranks"):
            np.testing.assert_array_equal(getattr(one.logprobs, name), getattr(other.logprobs, name))
        # torch's products may round otherwise in a batch with padding
        np.testing.assert_allclose(one.logprobs.logprobs, other.logprobs.logprobs, rtol=2e-6)
