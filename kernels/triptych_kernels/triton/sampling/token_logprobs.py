"""Log-probabilities in two launches: one pass over the logits, then a look into the groups that hold the best.

    weigh      a program per chunk of a row: its best token, its mass, the number of tokens likelier than the chosen
    one look_up    a program per row: sums these up, and picks the best out of the groups with the largest maxima

Picking takes a pass over these groups for each of the best, which is meant for a few tens of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triptych_kernels.triton.sampling.race import load_quads, rates
from triptych_kernels.triton.sampling.scan import (
    CHUNK,
    GROUP,
    best_of_chunks,
    is_usable,
    key_of,
    pack,
    packed_key,
    packed_token,
    store_group_maxima,
    usable_value,
    value_of,
)
from triptych_kernels.triton.sampling.select import bound_of_largest, list_where, listed_quads, load_maxima

_NUM_WARPS = 8
# Groups that are looked into at a time: one for each of the best that are asked for, within bounds, so that few kernels
# serve all requests.
_LEAST_TILE_GROUPS = 16
_MOST_TILE_GROUPS = 64


def token_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, vocab_size, device = len(rows), logits.shape[1], logits.device
    chosen_logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(num_rows, num_top, dtype=torch.float32, device=device)
    if not num_rows:
        return chosen_logprobs, ranks, top_ids, top_logprobs
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, token_ids = rows.contiguous(), token_ids.contiguous()
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    num_groups = num_chunks * CHUNK // GROUP
    chunk_best = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=device)
    chunk_mass = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    chunk_likelier = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    group_maxima = groups = None
    if num_top:
        group_maxima = torch.empty(num_rows, num_groups, dtype=torch.float32, device=device)
        groups = torch.empty(num_rows, min(num_top, num_groups), dtype=torch.int32, device=device)
    _weigh[(num_rows, num_chunks)](
        logits, logits.stride(0), vocab_size, rows, token_ids,
        chunk_best, chunk_mass, chunk_likelier, group_maxima,
        num_chunks, CHUNK=CHUNK, GROUP=GROUP, num_warps=_NUM_WARPS,
    )  # fmt: skip
    _look_up[(num_rows,)](
        logits, logits.stride(0), vocab_size, rows, token_ids, num_top,
        chunk_best, chunk_mass, chunk_likelier, group_maxima, groups,
        chosen_logprobs, ranks, top_ids, top_logprobs,
        num_chunks, num_groups,
        NUM_CHUNKS=triton.next_power_of_2(num_chunks), NUM_GROUPS=triton.next_power_of_2(num_groups),
        TILE_GROUPS=min(max(triton.next_power_of_2(num_top), _LEAST_TILE_GROUPS), _MOST_TILE_GROUPS), GROUP=GROUP,
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    return chosen_logprobs, ranks, top_ids, top_logprobs


@triton.jit
def _weigh(
    logits, stride, vocab_size, rows, token_ids,
    chunk_best, chunk_mass, chunk_likelier, group_maxima,
    num_chunks, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    logits += tl.load(rows + row) * stride
    chosen = tl.load(logits + tl.load(token_ids + row))
    quads = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    x = load_quads(logits, quads, vocab_size)
    token = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    best = tl.max(pack(key_of(x), token))
    best_logit = usable_value(packed_key(best), 0.0)
    out = row * num_chunks + chunk
    tl.store(chunk_best + out, best)
    tl.store(chunk_mass + out, tl.sum(rates(x, best_logit, 1.0)))
    tl.store(chunk_likelier + out, tl.sum((x > chosen).to(tl.int32)))
    if group_maxima is not None:
        store_group_maxima(group_maxima, x, row, chunk, num_chunks, CHUNK, GROUP)


@triton.jit(do_not_specialize=("num_top",))  # which changes from step to step
def _look_up(
    logits, stride, vocab_size, rows, token_ids, num_top,
    chunk_best, chunk_mass, chunk_likelier, group_maxima, groups,
    chosen_logprobs, ranks, top_ids, top_logprobs,
    num_chunks, num_groups,
    NUM_CHUNKS: tl.constexpr, NUM_GROUPS: tl.constexpr, TILE_GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + row) * stride
    chunk = tl.arange(0, NUM_CHUNKS)
    here = chunk < num_chunks
    likelier = tl.load(chunk_likelier + row * num_chunks + chunk, mask=here, other=0)
    tl.store(ranks + row, 1 + tl.sum(likelier).to(tl.int64))
    best_key = packed_key(best_of_chunks(chunk_best, row, num_chunks, NUM_CHUNKS))
    best = usable_value(best_key, 0.0)
    chunk_key = packed_key(tl.load(chunk_best + row * num_chunks + chunk, mask=here, other=0))
    mass = tl.load(chunk_mass + row * num_chunks + chunk, mask=here, other=0.0)
    total = tl.sum(mass * rates(usable_value(chunk_key, best), best, 1.0))
    # beside the best, so that large logits cost no digits
    log_mass = tl.log(tl.where(is_usable(best_key), total, float("nan")))
    chosen = tl.load(logits + tl.load(token_ids + row))
    tl.store(chosen_logprobs + row, chosen - best - log_mass)
    if group_maxima is not None:
        num_listed = tl.minimum(num_top, num_groups)
        groups += row * num_listed
        _list_best_groups(groups, group_maxima + row * num_groups, num_groups, num_listed, NUM_GROUPS)
        last = tl.full((), 2**63 - 1, tl.int64)
        for i in range(num_top):
            # the best of those behind the last
            following = tl.full((TILE_GROUPS * GROUP // 4,), -(2**63), tl.int64)
            for first in range(0, num_listed, TILE_GROUPS):
                quads = listed_quads(groups, first, num_listed, TILE_GROUPS, GROUP)
                token = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
                packed = pack(key_of(load_quads(logits, quads, vocab_size)), token)
                packed = tl.where((packed < last) & (token < vocab_size), packed, -(2**63))
                following = tl.maximum(following, tl.max(packed, axis=1))
            last = tl.max(following)
            tl.store(top_ids + row * num_top + i, packed_token(last).to(tl.int64))
            tl.store(top_logprobs + row * num_top + i, value_of(packed_key(last)) - best - log_mass)


@triton.jit
def _list_best_groups(groups, group_maxima, num_groups, num_listed, NUM_GROUPS: tl.constexpr):
    """List the `num_listed` groups with the largest maxima, of equals the first: they hold that many best tokens."""
    group = tl.arange(0, NUM_GROUPS)
    keys = key_of(load_maxima(group_maxima, num_groups, NUM_GROUPS))
    bound = bound_of_largest(keys, num_listed, num_listed)
    num_above = list_where(groups, group, keys > bound, 0)
    equal = (keys == bound) & (group < num_groups)
    equal = equal & (tl.cumsum(equal.to(tl.int32), 0) <= num_listed - num_above)
    num_above = list_where(groups, group, equal, num_above)
    # fewer numbers than that: groups without any are as good as others
    rest = (keys < bound) & (group < num_groups)
    rest = rest & (tl.cumsum(rest.to(tl.int32), 0) <= num_listed - num_above)
    list_where(groups, group, rest, num_above)
    tl.debug_barrier()
