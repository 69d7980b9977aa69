"""What the longest step takes besides weights and KV cache, found by running it before the cache is sized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from services.worker.attention.base import AttentionBackend, AttentionBatch
from services.worker.layers.step_context import StepContext
from services.worker.models.base import CausalLM
from services.worker.runner.prompt_logprobs import MAX_SCORED_AT_ONCE
from services.worker.runner.startup.kv_cache import allocate_kv_cache
from services.worker.sampling.batch import SamplingBatch
from triptych.types.facts import KvShape
from triptych.types.sampling import MAX_LOGPROBS
from triptych_kernels.ops import gather_rows, token_logprobs

PeakOf = Callable[[Callable[[], None]], int]
"""Runs something and says how many bytes it took at its peak."""


@torch.inference_mode()
def measure_activations(
    model: CausalLM,
    kv: KvShape,
    device: torch.device,
    *,
    attention: AttentionBackend,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    max_graph_tokens: int,
    peak_of: PeakOf | None = None,
) -> int:
    """Bytes to be left free for steps.

    That is what the larger takes of a step full of the ends of prompts, whose log-probabilities are asked for, and one
    that decodes every row, both at the full context, with filters and changed logits; and once more for graphs, whose
    pool is their own, the largest that one is recorded of.

    Args:
        max_graph_tokens: tokens of the longest step with prompts that is recorded; 0: none is, and no decode.
        kv: whatever its number of blocks: the rows of these steps read the null block and write nothing.
        peak_of: for tests; None: as the device's allocator says.
    """
    cache = allocate_kv_cache(replace(kv, num_blocks=1), device)
    peak_of = peak_of or (lambda launch: _peak_on_cuda(launch, device))

    def run(query_lens: list[int], seq_lens: list[int], *, scores_prompt: bool = False) -> None:
        num_tokens, num_rows = sum(query_lens), len(query_lens)
        num_sampling = min(max_num_seqs, num_tokens)
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        batch = AttentionBatch(
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
            block_tables=torch.zeros(
                num_rows, -(-max(seq_lens) // kv.block_size), dtype=torch.int32, device=device
            ),
            query_starts=starts.to(device, torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            backend=attention,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_lens_list=tuple(query_lens),
            seq_lens_list=tuple(seq_lens),
        )
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        hidden = model(zeros, zeros, StepContext(batch, cache))
        logits = model.compute_logits(gather_rows(hidden, torch.arange(num_sampling, device=device)))
        changed = logits.clone()  # as of requests that change theirs
        _with_filters(num_sampling, device).choose(changed)
        if scores_prompt:
            del changed
            rows = torch.arange(min(MAX_SCORED_AT_ONCE, num_tokens), device=device)
            scored = model.compute_logits(gather_rows(hidden, rows))
            token_logprobs(scored, rows, zeros[: len(rows)], min(MAX_LOGPROBS, scored.shape[1]))

    prompt = _prompt_lengths(max_num_batched_tokens, max_num_seqs, max_model_len)
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    of_prompt = peak_of(lambda: run(prompt, [max_model_len] * len(prompt), scores_prompt=True))
    of_decode = peak_of(lambda: run([1] * num_rows, [max_model_len] * num_rows))
    of_graphs = 0
    if max_graph_tokens:
        recorded = _prompt_lengths(min(max_num_batched_tokens, max_graph_tokens), max_num_seqs, max_model_len)
        of_graphs = max(of_decode, peak_of(lambda: run(recorded, recorded)))
    return max(of_prompt, of_decode) + of_graphs


def _prompt_lengths(num_tokens: int, max_num_rows: int, max_len: int) -> list[int]:
    """As many tokens as fit, in as few rows as hold them."""
    lengths: list[int] = []
    while num_tokens and len(lengths) < max_num_rows:
        lengths.append(min(num_tokens, max_len))
        num_tokens -= lengths[-1]
    return lengths


def _with_filters(num_rows: int, device: torch.device) -> SamplingBatch:
    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    return SamplingBatch(
        temperature=column(1.0, torch.float32),
        top_k=column(50, torch.int32),
        top_p=column(0.9, torch.float32),
        min_p=column(0.01, torch.float32),
        seeds=column(0, torch.int64),
        positions=column(0, torch.int64),
    )


def _peak_on_cuda(launch: Callable[[], None], device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    launch()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
