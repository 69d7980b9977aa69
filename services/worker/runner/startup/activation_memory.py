"""The largest steps, run before the KV cache exists: to measure their memory, or to note their kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from triptych.types.sampling import MAX_LOGPROBS, SAMPLING_FIELDS
from triptych_kernels.logit_index import TokenMasks
from triptych_kernels.ops import gather_rows, token_logprobs
from triptych_kernels.state_batch import StateBatch
from triptych_services.worker.attention.base import AttentionBackend, AttentionBatch
from triptych_services.worker.context.resolved_config import RankFacts
from triptych_services.worker.layers.adapted import AdaptedLayer
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.models.base import CausalLM, logits_of
from triptych_services.worker.runner.prompt_logprobs import MAX_SCORED_AT_ONCE
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import KvPlan
from triptych_services.worker.sampling.batch import SamplingBatch
from triptych_services.worker.sampling.params import COLUMN_TO_DTYPE

PeakOf = Callable[[Callable[[], None]], int]
"""A function that runs another and returns how many bytes that took at its peak."""


class LargestSteps:
    """The largest steps within some limits, as a model computes them.

    Their rows read the null block, and write no keys and values.
    """

    def __init__(
        self,
        model: CausalLM,
        kv: KvPlan,
        device: torch.device,
        *,
        attention: AttentionBackend,
        max_num_batched_tokens: int,
        max_num_rows: int,
        max_model_len: int,
        rank: RankFacts | None = None,
        hidden_size: int = 0,
        verifies_guesses: bool = False,
    ) -> None:
        """
        Args:
            kv: Plan of the KV cache; its number of blocks is not used.
            max_num_rows: Requests of a step, and guesses of which each is a row of its own.
            rank: The stage that `model` is; None: all layers.
            hidden_size: Size of the states that a stage gets from the one before.
            verifies_guesses: Whether logits are copied for the rows that choose at one place after the other.
        """
        self._rank = rank or RankFacts()
        self._hidden_size = hidden_size
        self._verifies_guesses = verifies_guesses
        self._model = model
        self._device = device
        self._attention = attention
        self._block_size, self._num_groups = kv.shape.block_size, len(kv.shape.groups)
        assert isinstance(model, nn.Module), "the contract of CausalLM"
        self._has_adapters = any(
            isinstance(layer, AdaptedLayer) and layer.adapters is not None for layer in model.modules()
        )
        self._kv_caches = allocate_kv_cache(
            replace(kv.shape, num_blocks=1, num_state_blocks=1), device, kv.places
        )
        self._max_num_tokens = max_num_batched_tokens
        self._max_num_rows = max_num_rows
        self._max_model_len = max_model_len

    def run_prompts(self) -> None:
        """Run a step full of the ends of prompts at the full context, which report log-probabilities."""
        lengths = self._prompt_lengths(self._max_num_tokens)
        self._run(lengths, [self._max_model_len] * len(lengths), scores_prompt=True)

    def run_decodes(self) -> None:
        """Run a step in which every row computes one token at the full context."""
        num_rows = min(self._max_num_rows, self._max_num_tokens)
        self._run([1] * num_rows, [self._max_model_len] * num_rows)

    def run_short_prompts(self, max_num_tokens: int) -> None:
        """Run a step of whole prompts, of at most `max_num_tokens` tokens together."""
        lengths = self._prompt_lengths(min(self._max_num_tokens, max_num_tokens))
        self._run(lengths, lengths)

    def _prompt_lengths(self, num_tokens: int) -> list[int]:
        """Return the lengths of prompts of so many tokens together, in as few rows as possible."""
        lengths: list[int] = []
        while num_tokens and len(lengths) < self._max_num_rows:
            lengths.append(min(num_tokens, self._max_model_len))
            num_tokens -= lengths[-1]
        return lengths

    @torch.inference_mode()
    def _run(self, query_lens: list[int], seq_lens: list[int], *, scores_prompt: bool = False) -> None:
        """Run the model over rows of these lengths, with filters and changed logits."""
        device, num_tokens = self._device, sum(query_lens)
        num_sampling = min(self._max_num_rows, num_tokens)
        max_blocks = -(-max(seq_lens) // self._block_size)
        batch = AttentionBatch(
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
            block_tables=torch.zeros(len(query_lens), max_blocks, dtype=torch.int32, device=device),
            query_starts=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            backend=self._attention,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_lens_list=tuple(query_lens),
            seq_lens_list=tuple(seq_lens),
        )
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        entry = zeros
        if not self._rank.is_first_stage:
            entry = torch.zeros(num_tokens, self._hidden_size, device=device)
        slots = torch.zeros(num_tokens, dtype=torch.int32, device=device) if self._has_adapters else None
        pages = torch.zeros(len(query_lens), dtype=torch.int32, device=device)  # none is read or written
        context = StepContext(
            (batch,) * self._num_groups,
            self._kv_caches,
            StateBatch(pages, pages, batch.query_starts, batch.query_lens_list),
            slots,
            state_pages=[cache.state for cache in self._kv_caches],
        )
        hidden = self._model(entry, zeros, context)
        if not self._rank.is_last_stage:
            return
        of_sampling, of_scored = (
            None if slots is None else slots[:count] for count in (num_sampling, MAX_SCORED_AT_ONCE)
        )
        sampled = gather_rows(hidden, torch.arange(num_sampling, device=device))
        logits = logits_of(self._model, sampled, of_sampling)
        sampling, masks = _with_filters(num_sampling, device), _one_mask(logits)
        sampling.choose(logits, rows=torch.arange(num_sampling, device=device), masks=masks)
        taken = logits.clone() if self._verifies_guesses else logits
        changed = taken.clone()  # as for requests that change theirs
        sampling.choose(changed, masks=masks)
        if scores_prompt:
            del taken, changed
            rows = torch.arange(min(MAX_SCORED_AT_ONCE, num_tokens), device=device)
            scored = logits_of(self._model, gather_rows(hidden, rows), of_scored)
            token_logprobs(scored, rows, zeros[: len(rows)], min(MAX_LOGPROBS, scored.shape[1]))


def measure_activations(
    steps: LargestSteps, device: torch.device, *, max_graph_tokens: int, peak_of: PeakOf | None = None
) -> int:
    """Return the number of bytes to be left free for steps.

    That is the peak of the larger of two steps, one full of prompts and one of decodes. Graphs have a pool of their
    own, so the peak of the largest step that is recorded is added.

    Args:
        max_graph_tokens: Number of tokens of the longest step with prompts that is recorded; 0: nothing is recorded.
        peak_of: For tests; None: as the device's allocator says.
    """
    peak_of = peak_of or (lambda launch: _peak_on_cuda(launch, device))
    of_prompts, of_decodes = peak_of(steps.run_prompts), peak_of(steps.run_decodes)
    of_graphs = 0
    if max_graph_tokens:
        of_graphs = max(of_decodes, peak_of(lambda: steps.run_short_prompts(max_graph_tokens)))
    return max(of_prompts, of_decodes) + of_graphs


def _with_filters(num_rows: int, device: torch.device) -> SamplingBatch:
    """Return the parameters of rows that use every filter."""
    columns = {}
    for name, dtype in COLUMN_TO_DTYPE.items():
        trial = SAMPLING_FIELDS[name].trial if name in SAMPLING_FIELDS else 0
        columns[name] = torch.from_numpy(np.full(num_rows, trial, dtype)).to(device)
    return SamplingBatch(columns)


def _one_mask(logits: Tensor) -> TokenMasks:
    """Return a mask of all rows that forbids nothing, as for requests with a form."""
    num_rows, vocab_size = logits.shape
    words = torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32, device=logits.device)
    return TokenMasks(torch.zeros(num_rows, dtype=torch.int32, device=logits.device), words)


def _peak_on_cuda(launch: Callable[[], None], device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    launch()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
