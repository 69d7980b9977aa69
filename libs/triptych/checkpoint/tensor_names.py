"""How a family names and lays out its tensors, in terms of the names that our layers have.

Layers ask for tensors under Llama's names (`model.layers.0.self_attn.q_proj.weight`). A family with others says how
they differ: words that are exchanged, tensors that hold several projections, tensors that lie the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.checkpoint.safetensors_header import SINGLE_FILE, read_header, read_shard_index
from triptych.errors import ModelError

_PARTS_OF_BODY = ("embed_tokens", "embed_positions", "embed_norm", "layers", "norm")

_EXPERT = re.compile(r"\.experts\.(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """One tensor of the checkpoint that holds several projections, along their outputs."""

    name: str
    """The module's name in the checkpoint, as it follows the layer's prefix: `self_attn.qkv_proj`."""
    parts: tuple[str, ...]
    """The projections in their order, under the names of our layers: `self_attn.q_proj`, …"""
    interleaved: str = "no"
    """no: one projection after the other. kv_heads: for each key head its queries, its key, its value. rows: one row of
    each projection in turn. groups: for each of `num_groups` its part of each projection."""
    num_groups: int = 0
    of_experts: bool = False
    """Whether it holds the projections of all experts of a mixture, expert by expert along an axis before the others.
    The parts are then those of one expert, without its number: `mlp.experts.down_proj`."""
    is_transposed: bool = False
    """of_experts: whether an expert's weights are stored [in_features, out_features]."""
    suffixes: tuple[str, str] = (".weight", ".bias")
    """Endings of the name: of a tensor of weights, and of biases."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The checkpoint's tensor that holds one of ours."""

    name: str
    fused: FusedTensor | None = None
    """How it is fused; None: it holds nothing else."""
    part: str = ""
    """Ours among its parts."""
    expert: int = 0
    """of_experts: the number of ours."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The differences between a checkpoint's tensors and those that our layers ask for."""

    renamed: tuple[tuple[str, str], ...] = ()
    """(our word, the checkpoint's word), exchanged in this order wherever a name has the word."""
    fused: tuple[FusedTensor, ...] = ()
    fused_in_some: tuple[FusedTensor, ...] = ()
    """Those that only some files have, while others have their parts; see `of_files`."""
    transposed: tuple[str, ...] = ()
    """Endings of the checkpoint's modules with weights stored [in_features, out_features]."""
    older: tuple[tuple[str, str], ...] = ()
    """(beginning of a name in older files, the beginning that it has today), of which the first that fits counts."""
    ignored: tuple[str, ...] = ()
    """Endings of tensors that checkpoints may contain and the model does not use."""
    ignored_prefixes: tuple[str, ...] = ()
    """Beginnings of such names: of parts of the checkpoint that are no part of the decoder."""

    def stored(self, name: str) -> str:
        """Return the checkpoint's name for a tensor that is not part of a fused one."""
        for ours, theirs in self.renamed:
            name = name.replace(ours, theirs)
        return name

    def of_files(self, tensors: Collection[str]) -> TensorNames:
        """Return these names with the fused tensors of `fused_in_some` that are among the tensors of the files."""
        own = [name for name in tensors if not name.startswith(self.ignored_prefixes or ("\0",))]
        endings = [f".{fused.name}{fused.suffixes[0]}" for fused in self.fused_in_some]
        found = tuple(
            fused
            for fused, ending in zip(self.fused_in_some, endings, strict=True)
            if any(name.endswith(ending) for name in own)
        )
        others = tuple(fused for fused in self.fused if fused not in self.fused_in_some)
        return replace(self, fused=(*others, *found))

    def current(self, name: str) -> str:
        """Return the checkpoint's name of today for one of an older file."""
        for before, today in self.older:
            if name.startswith(before):
                return today + name[len(before) :]
        return name

    def holder(self, name: str) -> Holder:
        """Return the checkpoint's tensor that holds one of ours."""
        module, _, kind = name.rpartition(".")
        found = _EXPERT.search(module)
        expert = 0 if found is None else int(found[1])
        for fused in self.fused:
            inner = _EXPERT.sub(".experts", module) if fused.of_experts else module
            for part in fused.parts:
                if inner.endswith("." + part):
                    suffix = fused.suffixes[kind == "bias"]
                    return Holder(
                        f"{self.stored(inner[: -len(part)])}{fused.name}{suffix}", fused, part, expert
                    )
        return Holder(self.stored(name))


def bare_names(names: TensorNames) -> tuple[tuple[str, str], ...]:
    """Return the beginnings of names in a file that holds the body of a decoder alone -> those of the whole decoder."""
    whole = [names.stored(f"model.{part}.") for part in _PARTS_OF_BODY]
    return tuple((name.partition(".")[2], name) for name in whole if name.count(".") > 1)


def names_of_tensors(directory: Path) -> frozenset[str]:
    """Return the names in a directory's safetensors files, read from the index or from the only file's header.

    Empty where there is none, or what cannot be read, which is reported when the weights are.
    """
    try:
        return frozenset(read_shard_index(directory) or read_header(directory / SINGLE_FILE).tensors)
    except ModelError:
        return frozenset()
