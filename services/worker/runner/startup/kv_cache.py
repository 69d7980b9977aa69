"""Allocation of the paged KV cache, in the size that `kv_plan` decides.

    tensor 0   [ null | block 1 | block 2 | … ]   each block [2 (key, value), num_kv_heads, block_size, head_dim]
    tensor 1   [ null | block 1 | block 2 | … ]   block 0 belongs to no request: padding points at it

Each layer has a tensor, or shares it with one layer of each other KV group, which holds other blocks in it. The blocks
of a layer that keeps fewer elements of a token have more tokens; those of latent attention are [1, 1, tokens, width].

A page of recurrent states holds those of all layers, one after the other; page 0 is zero, and belongs to no request.

What is kept of guesses is a piece of memory of its own: [slots, guesses of a row, numbers of all layers].

A cache of 8 bits also has scales, with the same block ids. Only ops index these tensors. Only the engine decides which
request holds which block.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triptych.types.facts import KvLayout
from triptych_kernels.cpu.memory import zeros_in_huge_pages
from triptych_kernels.kv_scales import LARGEST_ELEMENT
from triptych_services.worker.attention.base import KvCache
from triptych_services.worker.context.device import TORCH_DTYPES
from triptych_services.worker.runner.block_tables import GUESSING_SLOTS
from triptych_services.worker.runner.startup.kv_groups import LayerPlace, guess_bytes
from triptych_services.worker.runner.startup.kv_plan import (
    GUESSES,
    STATES,
    kv_parts,
    num_kv_tensors,
    vectors_per_token,
)

_FLOAT_BYTES = 4
_KV_DTYPES = TORCH_DTYPES | {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


def allocate_kv_cache(
    shape: KvLayout, device: torch.device, places: Sequence[LayerPlace] = (), *, num_guesses: int = 0
) -> tuple[KvCache, ...]:
    """Allocate the caches of all layers; the content of blocks other than block 0 is undefined.

    On a CPU the system allocates a page when it is first written, so blocks that no request has held take no memory;
    all of the cache is zero then. Block 0 is zeroed: padding may be read and masked, and a NaN would survive the mask.

    Args:
        places: As in `KvPlan`.
        num_guesses: Guesses of a row in a step, at most; 0: no row guesses.
    """
    scales_shape = (shape.num_blocks, vectors_per_token(shape), shape.num_kv_heads, shape.block_size)
    dtype = _KV_DTYPES[shape.dtype]
    tensors = [
        KvCache(
            _allocate((*scales_shape, shape.head_dim), dtype, device),
            _allocate(scales_shape, torch.float32, device) if dtype in LARGEST_ELEMENT else None,
        )
        for _ in range(num_kv_tensors(shape))
    ]
    num_elements = sum(place.state_elements for place in places)
    pages = _allocate((shape.num_state_blocks, num_elements), torch.float32, device) if num_elements else None
    caches = _by_layer(shape, tensors, places, pages, device)
    if not (num_bytes := guess_bytes(places, num_guesses)):
        return caches
    memory = _allocate((num_bytes // _FLOAT_BYTES,), torch.float32, device)
    return _with_guesses(caches, places, memory, num_guesses)


def view_kv_cache(
    shape: KvLayout,
    memory: mmap.mmap,
    places: Sequence[LayerPlace] = (),
    *,
    guess_memory: mmap.mmap | None = None,
    num_guesses: int = 0,
) -> tuple[KvCache, ...]:
    """Return the caches of all layers in memory that `kv_parts` divides, on the CPU.

    Args:
        places: As in `KvPlan`.
        guess_memory: That of the guesses' part; None: nothing is kept of guesses.
        num_guesses: As of `allocate_kv_cache`.
    """
    scales_shape = (shape.num_blocks, vectors_per_token(shape), shape.num_kv_heads, shape.block_size)
    tensors: dict[str, Tensor] = {}
    pages = None
    for name, start, num_bytes in kv_parts(shape):
        part = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=start)
        if name == STATES:
            pages = part.view(torch.float32).view(shape.num_state_blocks, -1)
        elif name.endswith("blocks"):
            tensors[name] = part.view(_KV_DTYPES[shape.dtype]).view(*scales_shape, shape.head_dim)
        else:
            tensors[name] = part.view(torch.float32).view(scales_shape)
    caches = [
        KvCache(tensors[f"{tensor}.blocks"], tensors.get(f"{tensor}.scales"))
        for tensor in range(num_kv_tensors(shape))
    ]
    layers = _by_layer(shape, caches, places, pages, torch.device("cpu"))
    if not (num_bytes := guess_bytes(places, num_guesses)):
        return layers
    assert guess_memory is not None, "the program of a model with states keeps guesses where rows have some"
    kept = torch.frombuffer(guess_memory, dtype=torch.float32, count=num_bytes // _FLOAT_BYTES)
    return _with_guesses(layers, places, kept, num_guesses)


def parts_of_caches(kv_caches: Sequence[KvCache]) -> dict[str, Tensor]:
    """Return name -> memory of each part, as `kv_parts` names them, and of what is kept of guesses.

    Layers meet the tensors of their groups in the order of the parts.
    """
    tensors = {cache.blocks.data_ptr(): cache for cache in kv_caches if cache.blocks.numel()}
    parts = {
        f"{number}.{name}": tensor
        for number, cache in enumerate(tensors.values())
        for name, tensor in (("blocks", cache.blocks), ("scales", cache.scales))
        if tensor is not None
    }
    states = [cache.state for cache in kv_caches if cache.state is not None]
    if states:
        num_elements = sum(state.numel() for state in states)
        parts[STATES] = states[0].as_strided((num_elements,), (1,))  # they begin with the first layer's
    guesses = [cache.guesses for cache in kv_caches if cache.guesses is not None]
    if guesses:
        num_elements = sum(kept.numel() for kept in guesses)
        parts[GUESSES] = guesses[0].as_strided((num_elements,), (1,))
    return parts


def _with_guesses(
    caches: Sequence[KvCache], places: Sequence[LayerPlace], memory: Tensor, num_guesses: int
) -> tuple[KvCache, ...]:
    """Return caches with their parts of what is kept of guesses, one layer after the other.

    Args:
        memory: [numbers of all slots, guesses and layers] float32.
    """
    kept = memory.view(GUESSING_SLOTS, num_guesses, -1)
    layers, first = [], 0
    for cache, place in zip(caches, places, strict=True):
        end = first + place.guess_elements
        layers.append(replace(cache, guesses=kept[:, :, first:end]) if place.guess_elements else cache)
        first = end
    return tuple(layers)


def _by_layer(
    shape: KvLayout,
    tensors: Sequence[KvCache],
    places: Sequence[LayerPlace],
    pages: Tensor | None,
    device: torch.device,
) -> tuple[KvCache, ...]:
    """Return the cache of each layer, with its part of the pages of states if it has some.

    Args:
        pages: [num_state_blocks, elements of all layers] float32; None: no layer here has states.
    """
    if not places:
        assert len(shape.groups) == 1, "layers of several groups have places"
        return tuple(tensors)
    layers, first = [], 0
    for place in places:
        if place.tensor < 0:
            layer = KvCache(torch.zeros(0, device=device))
        else:
            layer = replace(tensors[place.tensor], group=place.group)
            if place.heads is not None:
                tokens = shape.groups[place.group].block_size
                sizes = (shape.num_blocks, 2, place.heads.number, tokens, place.heads.dim)
                layer = replace(layer, blocks=layer.blocks.view(sizes))
        if place.state_elements:
            assert pages is not None, "there is a group of states"
            layer = replace(layer, state=pages[:, first : first + place.state_elements])
            first += place.state_elements
        layers.append(layer)
    return tuple(layers)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return zeros_in_huge_pages(shape, dtype)
    blocks = torch.empty(shape, dtype=dtype, device=device)
    blocks[0].zero_()
    return blocks
