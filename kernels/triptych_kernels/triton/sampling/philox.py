"""The noise of tokens on the device: Philox4x32-10 words as exponential and Gumbel noise.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    # a join adds an innermost axis: [Q, 2, 2] whose entry [a, b] is word 2 * a + b
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
