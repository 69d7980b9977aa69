"""The choice of logits processors."""

from __future__ import annotations

from collections.abc import Sequence

from triptych_services.worker.sampling.logits_processors.allowed_ids import AllowedIds
from triptych_services.worker.sampling.logits_processors.bad_words import BadWords
from triptych_services.worker.sampling.logits_processors.base import AnyProcessor
from triptych_services.worker.sampling.logits_processors.logit_bias import LogitBias
from triptych_services.worker.sampling.logits_processors.min_tokens import MinTokens
from triptych_services.worker.sampling.logits_processors.penalties import Penalties
from triptych_services.worker.sampling.logits_processors.structured_outputs import StructuredForms
from triptych_services.worker.sampling.logits_processors.thinking_budget import ThinkingBudgets
from triptych_services.worker.sampling.params import TokenHistory


def create_logits_processors(
    *,
    max_num_seqs: int,
    eos_token_ids: Sequence[int],
    history: TokenHistory,
    forms: StructuredForms,
) -> list[AnyProcessor]:
    """Return the processors in the order in which they apply.

    If a request is left with no usable logit, the last of its processors that has a `fault` gives the reason. That
    of the forms comes before those of what masks beside them, which it names.

    Args:
        forms: The processor of structured outputs, which the runner steers.
    """
    return [
        AllowedIds(max_num_seqs),
        MinTokens(max_num_seqs, eos_token_ids=eos_token_ids, history=history),
        LogitBias(max_num_seqs),
        Penalties(max_num_seqs, history=history),
        BadWords(max_num_seqs, history=history),
        forms,
        ThinkingBudgets(max_num_seqs, history=history),
    ]
