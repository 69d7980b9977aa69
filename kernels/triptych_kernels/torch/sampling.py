"""Sampling in plain torch: filters are thresholds, and noise is drawn only for tokens that can win."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns, TokenMasks

MASK32 = 0xFFFFFFFF
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)

Words4 = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words4, key: tuple[Tensor, Tensor]) -> Words4:
    """Return four u32 for each counter and key; all are int64 tensors that broadcast against each other.

    A tensor that is constant along an axis may have size 1 there, and costs nothing in the first rounds. A product of
    two u32 wraps around in int64 without losing a bit: its high word is read by an arithmetic shift, and the next mask
    removes the copies of the sign. Words 1 and 3 stay unmasked until the end, since xor never carries.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1 = ((product1 >> 32) ^ (c1 ^ k0)) & MASK32, product1
        c2, c3 = ((product0 >> 32) ^ (c3 ^ k1)) & MASK32, product0
        k0 = (k0 + _KEY_INCREMENTS[0]) & MASK32
        k1 = (k1 + _KEY_INCREMENTS[1]) & MASK32
    return c0, c1 & MASK32, c2, c3 & MASK32


def process_logits(
    logits: Tensor,
    rows: Tensor,
    allowed: TokenColumns | None,
    banned: TokenColumns | None,
    biases: BiasColumns | None,
    penalties: PenaltyColumns | None,
) -> Tensor:
    processed = logits[rows]  # a copy
    if allowed is not None:
        kept = processed[allowed.rows, allowed.token_ids]
        processed[allowed.rows] = -torch.inf
        processed[allowed.rows, allowed.token_ids] = kept
    if banned is not None:
        processed[banned.rows, banned.token_ids] = -torch.inf
    if biases is not None:
        processed.index_put_((biases.rows, biases.token_ids), biases.biases, accumulate=True)
    if penalties is not None:
        _penalize(processed, penalties)
    return processed


def _penalize(logits: Tensor, penalties: PenaltyColumns) -> None:
    rows, counts = penalties.rows, penalties.output_counts
    entries = logits[rows, penalties.token_ids]
    repetition = penalties.repetition[rows]
    entries = torch.where(entries > 0, entries / repetition, entries * repetition)
    entries -= penalties.frequency[rows] * counts
    entries -= penalties.presence[rows] * (counts > 0)
    logits[rows, penalties.token_ids] = entries


GUMBEL_SPAN = 26.1
"""A bound of the largest noise minus the smallest, -log(-log(1 - 2^-33)) + log(-log(2^-33)) = 26.01."""

_FIRST_TOP_P_CANDIDATES = 64
"""Number of largest tokens that are sorted first for top_p, then 16 times as many in rows with a sum beyond them.
Of 49,152 tokens the 64 largest take 0.03 ms to find, 1,024 take 0.4 ms and sorting all takes 5 ms."""

TILE_COUNTERS = 1 << 16
"""Number of counters that Philox computes at a time: 0.5 MB a word, so that its passes stay in the cache."""


def sample(
    logits: Tensor,
    *,
    rows: Tensor | None,
    masks: TokenMasks | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    if rows is not None:
        logits = logits[rows]
    if masks is not None:
        logits = _masked(logits, masks)
    random_rows = temperature.nonzero().flatten()
    if len(random_rows) == len(logits):
        token_ids = _sample_random(logits, temperature, top_k, top_p, min_p, seeds, positions)
    else:
        token_ids = logits.argmax(dim=-1)
    if 0 < len(random_rows) < len(logits):
        columns = (logits, temperature, top_k, top_p, min_p, seeds, positions)
        token_ids[random_rows] = _sample_random(*(column[random_rows] for column in columns))
    # a maximum carries NaN along, at a tenth of the cost of looking for it in every logit
    return token_ids.masked_fill_(~torch.isfinite(logits.amax(dim=-1)), -1)


def _masked(logits: Tensor, masks: TokenMasks) -> Tensor:
    """Return a copy with -inf for the tokens that may not be chosen."""
    masked = (masks.rows >= 0).nonzero().flatten()
    words = masks.words[masks.rows[masked].long()]
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = ((words[:, :, None] >> places) & 1).flatten(1)[:, : logits.shape[1]].bool()
    return logits.index_copy(0, masked, torch.where(allowed, logits[masked], -torch.inf))


def _sample_random(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    scaled = logits / temperature[:, None]
    best = scaled.amax(dim=-1)
    thresholds = filter_thresholds(scaled, best, top_k, top_p, min_p)
    # tokens that no noise could bring past the best need none
    thresholds = torch.maximum(thresholds, best - GUMBEL_SPAN)
    kept = scaled >= thresholds[:, None]
    # one counter serves four neighbouring tokens, or a single one
    if torch.count_nonzero(kept) * 4 < kept.numel():
        return draw_among_few(scaled, kept, seeds, positions)
    return draw_among_many(scaled, kept, seeds, positions)


def filter_thresholds(scaled: Tensor, best: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return [num_rows] the smallest scaled logit that every filter keeps.

    Each filter keeps the largest logits, equal ones together, so each is a threshold above the one before.
    """
    thresholds = best + min_p.log()  # log 0 = -inf keeps all
    k_rows = ((top_k > 0) & (top_k < scaled.shape[1])).nonzero().flatten()
    if len(k_rows) > 0:
        k = top_k[k_rows].long()
        largest = scaled[k_rows].topk(int(k.max()), dim=-1).values
        kth_largest = largest.gather(1, k[:, None] - 1).squeeze(1)
        thresholds[k_rows] = torch.maximum(thresholds[k_rows], kth_largest)
    p_rows = (top_p < 1.0).nonzero().flatten()
    if len(p_rows) > 0:
        thresholds[p_rows] = _raise_for_top_p(scaled[p_rows], thresholds[p_rows], top_p[p_rows])
    return thresholds


def _raise_for_top_p(scaled: Tensor, thresholds: Tensor, top_p: Tensor) -> Tensor:
    """Return [num_rows] the threshold of top-p: the largest logits down to it are the fewest that reach top_p."""
    vocab_size = scaled.shape[1]
    # what the earlier filters dropped has probability 0
    scaled = scaled.masked_fill(scaled < thresholds[:, None], -torch.inf)
    log_total = scaled.logsumexp(dim=-1, keepdim=True)
    raised = torch.empty_like(thresholds)
    rows = torch.arange(len(scaled), device=scaled.device)
    num_candidates = _FIRST_TOP_P_CANDIDATES
    while len(rows) > 0:
        largest = scaled[rows].topk(min(num_candidates, vocab_size), dim=-1).values
        sums = (largest - log_total[rows]).double().exp().cumsum(dim=-1)
        reached = sums >= top_p[rows, None]
        reached[:, -1] |= num_candidates >= vocab_size  # a sum of all may fall short of 1 by rounding
        first_reached = reached.int().argmax(dim=-1, keepdim=True)
        raised[rows] = largest.gather(1, first_reached).squeeze(1)
        rows = rows[~reached[:, -1]]
        num_candidates *= 16
    return raised


def draw_among_few(scaled: Tensor, kept: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the token with the largest sum of logit and noise, with noise computed token by token."""
    rows, token_ids = kept.nonzero(as_tuple=True)
    words = torch.stack(token_words(seeds[rows], positions[rows], token_ids // 4), dim=-1)
    word = words.gather(1, (token_ids % 4)[:, None]).squeeze(1)
    scores = torch.full_like(scaled, -torch.inf)
    scores[rows, token_ids] = scaled[rows, token_ids] + gumbel(word)
    return scores.argmax(dim=-1)


def draw_among_many(scaled: Tensor, kept: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the token with the largest sum of logit and noise, with noise computed for the whole vocabulary."""
    num_rows, vocab_size = scaled.shape
    quads = torch.arange(-(-vocab_size // 4), device=scaled.device)  # four tokens share a counter
    tile = max(TILE_COUNTERS // len(quads), 1)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=scaled.device)
    for start in range(0, num_rows, tile):
        rows = slice(start, start + tile)
        words = torch.stack(token_words(seeds[rows, None], positions[rows, None], quads[None, :]), dim=-1)
        scores = scaled[rows] + gumbel(words.flatten(1)[:, :vocab_size])
        token_ids[rows] = scores.masked_fill_(~kept[rows], -torch.inf).argmax(dim=-1)
    return token_ids


def token_words(seeds: Tensor, positions: Tensor, quads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the u32 of the tokens 4 * quad + 0..3, as int64."""
    counter = (positions & MASK32, (positions >> 32) & MASK32, quads, torch.zeros_like(quads))
    return philox4x32(counter, (seeds & MASK32, (seeds >> 32) & MASK32))


def gumbel(words: Tensor) -> Tensor:
    """Compute -log(-log((word + 0.5) / 2^32)) in float64.

    In float32 the largest words would round to 1, and their noise would be infinite.
    """
    exponential = words.double().add_(0.5).mul_(2.0**-32).log_().neg_()
    return exponential.float().log_().neg_()


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
