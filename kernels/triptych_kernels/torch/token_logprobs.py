"""Log-probabilities in plain torch, without a log-softmax of the whole vocabulary."""

from __future__ import annotations

from torch import Tensor


def token_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = logits[rows]
    # relative to the best, so that large logits cost no digits
    logits = logits - logits.amax(dim=-1, keepdim=True)
    log_total = logits.exp().sum(dim=-1, keepdim=True).log()
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    top_logits, top_ids = logits.topk(num_top, dim=-1)
    return (chosen - log_total).squeeze(1), ranks, top_ids, top_logits - log_total
