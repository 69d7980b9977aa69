"""Attention, rotary embeddings and the paged cache in plain torch.

Paged attention is scaled_dot_product_attention over gathered pages. Rows of one query are gathered together in tiles of
similar length. Longer rows are computed one by one, and so are all rows of a layer with options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.kv_scales import LARGEST_ELEMENT

TILE_BYTES = 4 << 20
"""Bytes of keys and values gathered at a time. They are read back at once, so they should stay in the cache, and
buffers past 32 MB come from the system as untouched pages: 64 rows of 1,024 keys took 33 ms in one piece and 7 ms in
pieces of 1.5 to 6 MB."""

SLACK_PAGES = 16
"""Pages of padding that a tile may hold beyond a quarter of its own: less work than another tile's fixed cost."""

MAX_CHUNK_QUERIES = 256
"""Queries of a chunk at a time, if the mask must be explicit; no query scores keys that far ahead of it."""


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeTile:
    """Rows of one query and similar length, padded to the longest."""

    rows: Tensor
    """[num_rows] int64."""
    tokens: Tensor
    """[num_rows] int64, the token that is each row's query."""
    min_len: int
    max_len: int
    seen: Tensor | None
    """[num_rows, max_len] bool, whether a key is the row's own; None means that all are."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of several queries."""

    row: int
    first_token: int
    query_len: int
    seq_len: int


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """The tiles and chunks of a step, the same for every layer."""

    decode_tiles: tuple[_DecodeTile, ...]
    chunks: tuple[_Chunk, ...]


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    options: AttendOptions,
    *,
    kv_scales: Tensor | None,
    query_lens_list: tuple[int, ...],
    seq_lens_list: tuple[int, ...],
) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    page_bytes = kv_cache[0].nbytes
    pages = _Pages(kv_cache, kv_scales, block_tables)
    plan = plan_step(
        query_lens_list, seq_lens_list, block_size, max(TILE_BYTES // page_bytes, 1), query.device
    )
    # the query heads that share a key head are neighbours
    query = query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = torch.empty_like(query)
    if options.in_use:
        starts = accumulate(query_lens_list, initial=0)
        for row, (start, query_len, seq_len) in enumerate(
            zip(starts, query_lens_list, seq_lens_list, strict=False)
        ):
            chunk = _Chunk(row, start, query_len, seq_len)
            _attend_with_options(chunk, query, pages, options, out)
        return out.view(num_tokens, num_heads, head_dim)
    for tile in plan.decode_tiles:
        _attend_decodes(tile, query, pages, options.scale, out)
    for chunk in plan.chunks:
        _attend_chunk(chunk, query, pages, options.scale, out)
    return out.view(num_tokens, num_heads, head_dim)


def _attend_decodes(tile: _DecodeTile, query: Tensor, pages: _Pages, scale: float, out: Tensor) -> None:
    # [2, num_rows, num_kv_heads, max_len, head_dim]
    keys_values = pages.gather(tile.rows, tile.max_len, query.dtype)
    mask = None
    if tile.seen is not None:
        # a masked weight is 0, but 0 * NaN is NaN: what is not the row's own must be a number
        unseen = ~tile.seen[:, None, tile.min_len :, None]
        keys_values[:, :, :, tile.min_len :].masked_fill_(unseen, 0.0)
        mask = tile.seen[:, None, None, :]
    # heads that share keys act as queries of one head: no key is repeated, and one query needs no causal mask
    out[tile.tokens] = scaled_dot_product_attention(
        query[tile.tokens], keys_values[0], keys_values[1], attn_mask=mask, scale=scale
    )


def _attend_with_options(
    chunk: _Chunk, query: Tensor, pages: _Pages, options: AttendOptions, out: Tensor
) -> None:
    """Attend from a row's queries, in float32 or more, with all scores of MAX_CHUNK_QUERIES at a time."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    # [num_kv_heads, 1, seq_len, head_dim] each
    rows = slice(chunk.row, chunk.row + 1)
    keys, values = pages.gather(rows, chunk.seq_len, dtype).transpose(1, 2)
    positions = torch.arange(chunk.seq_len, device=query.device)
    num_earlier = chunk.seq_len - chunk.query_len
    for start in range(0, chunk.query_len, MAX_CHUNK_QUERIES):
        end = min(start + MAX_CHUNK_QUERIES, chunk.query_len)
        tokens = slice(chunk.first_token + start, chunk.first_token + end)
        some = slice(
            _first_seen(num_earlier + start, options), num_earlier + end
        )  # keys that one of these sees
        own, others = positions[num_earlier + start : num_earlier + end, None], positions[some]
        # [num_kv_heads, heads per key head, queries, keys]
        products = query[tokens].to(dtype).permute(1, 2, 0, 3) @ keys[:, :, some].transpose(2, 3)
        seen = others <= own  # [queries, keys]
        if options.window:
            seen &= others > own - options.window
        if options.chunk:
            seen &= others >= own // options.chunk * options.chunk
        weights = _softmax(products * options.scale, others - own, seen, options)
        out[tokens] = (weights @ values[:, :, some]).permute(2, 0, 1, 3).to(out.dtype)


def _first_seen(position: int, options: AttendOptions) -> int:
    """Return the first key that a query at `position` sees."""
    of_window = max(position - options.window + 1, 0) if options.window else 0
    of_chunk = position // options.chunk * options.chunk if options.chunk else 0
    return max(of_window, of_chunk)


def _softmax(scores: Tensor, distances: Tensor, seen: Tensor, options: AttendOptions) -> Tensor:
    """Return weights from scores.

    Args:
        scores: [num_kv_heads, heads per key head, queries, keys], as the weights.
        distances: [queries, keys], the position of the key minus that of the query.
        seen: [queries, keys] bool.
    """
    heads = (*scores.shape[:2], 1, 1)
    if options.soft_cap:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    if options.alibi is not None:
        scores = scores + options.alibi.view(heads) * distances
    scores = scores.masked_fill(~seen, -torch.inf)
    if options.sinks is None:
        return scores.softmax(dim=-1)
    sinks = options.sinks.to(scores.dtype).view(heads).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def _attend_chunk(chunk: _Chunk, query: Tensor, pages: _Pages, scale: float, out: Tensor) -> None:
    keys_values = pages.gather(slice(chunk.row, chunk.row + 1), chunk.seq_len, query.dtype)
    # [num_kv_heads, heads per key head, seq_len, head_dim]: a view, repeated by a stride of 0
    keys, values = keys_values.transpose(1, 2).expand(-1, -1, query.shape[2], -1, -1)
    num_earlier = chunk.seq_len - chunk.query_len  # keys that every query sees
    step = chunk.query_len if num_earlier == 0 else MAX_CHUNK_QUERIES
    for start in range(0, chunk.query_len, step):
        end = min(start + step, chunk.query_len)
        num_keys = num_earlier + end
        mask = None
        if num_earlier > 0:
            mask = torch.ones(end - start, num_keys, dtype=torch.bool, device=query.device)
            mask = mask.tril_(num_earlier + start)  # query start + i sees the keys 0..num_earlier + start + i
        tokens = slice(chunk.first_token + start, chunk.first_token + end)
        attended = scaled_dot_product_attention(
            query[tokens].permute(1, 2, 0, 3),
            keys[:, :, :num_keys],
            values[:, :, :num_keys],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
        )
        out[tokens] = attended.permute(2, 0, 1, 3)


@dataclass(frozen=True, slots=True, eq=False)
class _Pages:
    """The cache, and the blocks of each row."""

    kv_cache: Tensor
    kv_scales: Tensor | None
    block_tables: Tensor

    def gather(self, rows: Tensor | slice, num_keys: int, dtype: torch.dtype) -> Tensor:
        """The first `num_keys` keys and values of some rows, [2, num_rows, num_kv_heads, num_keys, head_dim]."""
        _, _, num_kv_heads, block_size, _ = self.kv_cache.shape
        num_pages = -(-num_keys // block_size)
        block_ids = self.block_tables[rows, :num_pages].long()  # [num_rows, num_pages]
        halves = torch.arange(2 * num_kv_heads, device=self.kv_cache.device).view(2, 1, num_kv_heads, 1)
        # [2, num_rows, num_kv_heads, num_pages], the order that attention wants
        pages = block_ids[None, :, None, :] * (2 * num_kv_heads) + halves
        gathered = _select_pages(self.kv_cache, pages, num_keys)
        if self.kv_scales is None:
            return gathered.to(dtype)
        scales = _select_pages(self.kv_scales[..., None], pages, num_keys)
        # scaled_dot_product_attention makes 0 of a row if its only score is NaN, but not of values that are
        scales[1] += 0.0 * scales[0]
        # in float32 first: neither a scale nor an element is to be rounded by itself
        return (gathered.float() * scales).to(dtype)


def _select_pages(cache: Tensor, pages: Tensor, num_keys: int) -> Tensor:
    """[*pages.shape[:3], num_keys, size] of a cache [num_blocks, 2, num_kv_heads, block_size, size]: one index_select
    of whole pages."""
    block_size, size = cache.shape[3:]
    gathered = cache.view(-1, block_size * size).index_select(0, pages.flatten())
    return gathered.view(*pages.shape[:3], -1, size)[:, :, :, :num_keys]


@lru_cache(maxsize=2)  # every layer of a step asks the same
def plan_step(
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    block_size: int,
    tile_pages: int,
    device: torch.device,
) -> _Plan:
    decodes: list[tuple[int, int, int]] = []  # (seq_len, row, token)
    chunks: list[_Chunk] = []
    token = 0
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len == 1:
            decodes.append((seq_len, row, token))
        else:
            chunks.append(_Chunk(row, token, query_len, seq_len))
        token += query_len
    tiles = tuple(_decode_tile(rows, device) for rows in _tile(sorted(decodes), block_size, tile_pages))
    return _Plan(tiles, tuple(chunks))


def _tile(
    decodes: Iterable[tuple[int, int, int]], block_size: int, tile_pages: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Cut rows, the shortest first, into runs of at most `tile_pages` pages with little padding."""
    tile: list[tuple[int, int, int]] = []
    own_pages = 0
    for decode in decodes:
        num_pages = -(-decode[0] // block_size)
        own_pages += num_pages
        padded_pages = (len(tile) + 1) * num_pages
        if tile and (padded_pages > tile_pages or padded_pages > own_pages + own_pages // 4 + SLACK_PAGES):
            yield tile
            tile, own_pages = [], num_pages
        tile.append(decode)
    if tile:
        yield tile


def _decode_tile(decodes: list[tuple[int, int, int]], device: torch.device) -> _DecodeTile:
    lens, rows, tokens = torch.tensor(decodes, device=device).unbind(1)
    min_len, max_len = decodes[0][0], decodes[-1][0]
    seen = None
    if min_len < max_len:
        seen = torch.arange(max_len, device=device)[None, :] < lens[:, None]
    return _DecodeTile(rows, tokens, min_len, max_len, seen)


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    # [num_tokens, 1, rotary_dim / 2] each
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    rotated, rotated_key = (_rotate(x, cos, sin, interleaved=interleaved) for x in (query, key))
    return rotated, rotated_key


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    rotary_dim = 2 * cos.shape[-1]
    turned = x[..., :rotary_dim].float()
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    if rotary_dim == x.shape[-1]:
        return rotated.to(x.dtype)
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), dim=-1)


def write_kv(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, kv_scales: Tensor | None
) -> None:
    written = slot_mapping >= 0
    if not written.all():
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block_size = kv_cache.shape[3]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    for half, vectors in enumerate((key, value)):
        # the two index tensors are around a slice, so the indexed shape is [num_tokens, num_kv_heads, …]
        if kv_scales is not None:
            vectors, scales = _quantize(vectors, kv_cache.dtype)
            kv_scales[:, half][block_ids, :, offsets] = scales
        kv_cache[:, half][block_ids, :, offsets] = vectors.to(kv_cache.dtype)


def _quantize(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return elements of `dtype`, shaped like `vectors`, and the float32 scales of its last axis."""
    largest_element = LARGEST_ELEMENT[dtype]
    vectors = vectors.float()
    scales = vectors.abs().amax(dim=-1) / largest_element
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    elements = (vectors / scales[..., None]).clamp(-largest_element, largest_element)
    if dtype == torch.int8:
        elements = elements.round()
    elements = torch.where(scales[..., None] > 0.0, elements, 0.0)  # neither for 0 nor for NaN
    return elements.to(dtype), scales


def rotary_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: Tensor | None,
    interleaved: bool,
    rotate: Callable[..., tuple[Tensor, Tensor]] = rotary_embedding,
    write: Callable[..., None] = write_kv,
) -> Tensor:
    """Rotate, then write, with the implementations of these two ops that are passed."""
    query, key = rotate(query, key, positions, cos_sin_cache, interleaved=interleaved)
    write(key, value, kv_cache, slot_mapping, kv_scales=kv_scales)
    return query
