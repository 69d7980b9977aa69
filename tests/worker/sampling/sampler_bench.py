"""The sampler without a runner: parameters, tokens and logits by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from triptych.types.sampling import SamplingParams
from triptych_services.worker.sampling.batch import SamplingBuffers
from triptych_services.worker.sampling.logits_processors.create import create_logits_processors
from triptych_services.worker.sampling.logits_processors.structured_outputs import StructuredForms
from triptych_services.worker.sampling.params import SamplingArrays, SamplingColumns, TokenHistory
from triptych_services.worker.sampling.sampled import SampledTokens
from triptych_services.worker.sampling.sampler import Sampler

VOCAB_SIZE, EOS = 53, 2
_NUM_SLOTS = 8


def beyond_limits(**values: Any) -> SamplingParams:
    """Parameters that nobody can send."""
    params = SamplingParams(temperature=0.0)
    for name, value in values.items():
        object.__setattr__(params, name, value)
    return params


class SamplerBench:
    """A sampler over slots that a test fills one by one."""

    def __init__(
        self, create_more=lambda history: (), *, vocab_size=VOCAB_SIZE, eos=EOS, grammars=None
    ) -> None:
        """`create_more` makes further processors from the token history."""
        self.columns = SamplingColumns(max_num_seqs=_NUM_SLOTS, vocab_size=vocab_size)
        self.history = TokenHistory(
            np.zeros((_NUM_SLOTS, 64), np.int32),
            np.zeros(_NUM_SLOTS, np.int64),
            np.zeros(_NUM_SLOTS, np.int64),
        )
        self.forms = StructuredForms(
            _NUM_SLOTS, compiler=grammars, eos_token_ids=(eos,), history=self.history
        )
        processors = create_logits_processors(
            max_num_seqs=_NUM_SLOTS, eos_token_ids=(eos,), history=self.history, forms=self.forms
        )
        self.sampler = Sampler(self.columns, self.history, [*processors, *create_more(self.history)])
        self.arrays = SamplingArrays(_NUM_SLOTS)
        self.buffers = SamplingBuffers(self.arrays)

    def enter(self, slot, params, prompt=(5, 6, 7), output=(), seed=1) -> None:
        self.columns.leave(slot)
        self.history.num_prompt[slot] = len(prompt)
        self.history.num_known[slot] = 0
        self.extend(slot, *prompt, *output)
        assert self.columns.enter(slot, params, seed) is None

    def extend(self, slot, *token_ids) -> None:
        known = self.history.num_known[slot]
        self.history.token_ids[slot, known : known + len(token_ids)] = token_ids
        self.history.num_known[slot] += len(token_ids)

    def sample(self, logits, slots) -> SampledTokens:
        before, slots = logits.clone(), np.array(slots, np.int64)
        self.arrays.gather(self.columns, self.history, slots)
        chosen = self.buffers.batch(slots.size, logits.device).choose(logits)
        sampled = self.sampler.finish(logits, chosen, slots)
        assert torch.equal(logits.nan_to_num(0.5), before.nan_to_num(0.5))
        return sampled

    def sample_one(self, params, logits, **arguments) -> int:
        self.enter(0, params, **arguments)
        return int(self.sample(logits, [0]).token_ids[0])


def peaked(*token_ids: int) -> torch.Tensor:
    """Return one row of logits whose best tokens are these, in this order."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, list(token_ids)] = torch.arange(len(token_ids), 0, -1, dtype=torch.float32)
    return logits
