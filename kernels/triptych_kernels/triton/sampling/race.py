"""The token with the largest noisy logit among some tokens, found in float32 and decided in float64.

argmax(logit / T + gumbel) is also the first to arrive of exponential clocks with the rates exp(logit / T):
argmax(exp(logit / T) / E) with E = -log u, which takes one logarithm less. Tokens that are close to the best in
float32, nearly always one, are scored again in float64. So rounding decides nothing, and a row's token does not
depend on the split of its tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NO_TOKEN = tl.constexpr(2**31 - 1)
_CLOSE = tl.constexpr(1.0 - 1e-4)  # ten times the error of a float32 rate and clock
_COLDEST = tl.constexpr(1e-30)  # its inverse is finite; between logits no such small differences occur


@triton.jit
def load_quads(logits, quads, vocab_size):
    """Load [Q, 4] logits of tokens 4 * quad + 0..3, -inf past the end of the row that `logits` points to."""
    token = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    return tl.load(logits + token, mask=token < vocab_size, other=-float("inf"))


@triton.jit
def rates(x, best, temperature):
    """Compute exp((x - best) / temperature), 0 for -inf; `best` is finite and no x is larger."""
    return tl.exp2((x - best) * (LOG2_E / tl.maximum(temperature, _COLDEST)))


@triton.jit
def race(logits, x, quads, threshold, temperature, seed, position):
    """Return the winner among the tokens with logits of at least `threshold`.

    Args:
        logits: Pointer to the row.
        x: [Q, 4], its logits at `quads`.
        quads: [Q] int32.
        threshold: More than -inf.
    Returns:
        score: float64, logit / temperature + gumbel; -inf if no token takes part.
        token_id: int32, of equal scores the lowest.
    """
    token = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    best = tl.max(x)
    best = tl.where(tl.abs(best) < float("inf"), best, 0.0)
    rate = tl.where(x >= threshold, rates(x, best, temperature), 0.0)
    speed = rate / exponential(words_of_quads(seed, position, quads))
    # a row with infinite logits gets no token, and none of them is close
    close = (speed > 0.0) & (speed < float("inf")) & (speed >= tl.max(speed) * _CLOSE)
    best_score = tl.full((), -float("inf"), tl.float64)
    best_id = tl.full((), NO_TOKEN, tl.int32)
    token_id = tl.min(tl.where(close, token, NO_TOKEN))
    while token_id < NO_TOKEN:
        lane = (tl.arange(0, 4) == token_id % 4)[None, :]
        quad = tl.full((1,), 0, tl.int32) + token_id // 4
        word = tl.sum(tl.where(lane, words_of_quads(seed, position, quad), 0).to(tl.int64))
        score = tl.load(logits + token_id).to(tl.float64) / temperature.to(tl.float64) + gumbel(word)
        best_id = tl.where(score > best_score, token_id, best_id)
        best_score = tl.maximum(score, best_score)
        token_id = tl.min(tl.where(close & (token > token_id), token, NO_TOKEN))
    return best_score, best_id


@triton.jit
def words_of_quads(seed, position, quads):
    """Return [Q, 4] uint32, the words of tokens 4 * quad + 0..3.

    Args:
        seed: int64.
        position: int64.
        quads: [Q] int32.
    """
    low = quads.to(tl.uint32)
    position_low = tl.zeros_like(low) + (position & 0xFFFFFFFF).to(tl.uint32)
    position_high = tl.zeros_like(low) + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, position_low, position_high, low, tl.zeros_like(low))
    # a join adds an innermost axis: [Q, 2, 2] with word 2 * a + b as entry [a, b]
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (quads.shape[0], 4))


@triton.jit
def exponential(words):
    """Compute -log((word + 0.5) / 2^32) in float32, to a relative error of 1e-5 also if the word is close to 2^32."""
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # from 1 - 2^-7 on u has too few digits left, and 1 - u a short series
    v = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.where(words >= 0xFE000000, v * (1.0 + v * (0.5 + v * 0.33333334)), -tl.log(u))


@triton.jit
def gumbel(word):
    """Compute -log(-log((word + 0.5) / 2^32)) in float64."""
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(u))
