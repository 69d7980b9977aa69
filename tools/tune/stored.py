"""Writes the file of a device, which `triton.tuning.tunable` reads: one line per choice, whole at any time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tools.tune.cases import Case
from tools.tune.search import Outcome
from triptych_kernels.triton.tuning.tunable import Entry, KeyValue, Tunable, TunedFile, as_plain, read_file


def open_file(
    path: Path,
    device: str,
    compute_capability: tuple[int, int],
    tunables: Mapping[str, Tunable[Any]],
    show: Callable[[str], None],
) -> TunedFile:
    """Return the choices that the file has and the kernels still offer; a new file if there is none.

    Args:
        show: Is given what is left out, and why.
    Raises:
        ValueError: The file is another device's, or not understood at all.
    """
    empty = TunedFile(path, device, compute_capability, {})
    if not path.is_file():
        return empty
    file = read_file(path)
    if file.device != device:
        raise ValueError(f"{path}: device {file.device!r}, but this one is {device!r}")
    kept: dict[str, tuple[Entry, ...]] = {}
    for name, entries in file.kernel_to_entries.items():
        for entry in entries:
            try:
                check(replace(empty, kernel_to_entries={name: (entry,)}), tunables)
                kept[name] = (*kept.get(name, ()), entry)
            except ValueError as error:
                show(f"left out: {error}")
    return replace(empty, kernel_to_entries=kept)


def check(file: TunedFile, tunables: Mapping[str, Tunable[Any]]) -> None:
    """Check that every entry is one that a kernel offers.

    Raises:
        ValueError: It is not; names the file and the entry.
    """
    for name in file.kernel_to_entries:
        if name not in tunables:
            raise ValueError(f"{file.path}: no kernel is named {name!r}; there are {', '.join(tunables)}")
        tunables[name].read(file)


def with_outcome(file: TunedFile, case: Case, outcome: Outcome, measured: str) -> TunedFile:
    """Return the file with this choice, in the place of an older one if there is one."""
    entry = Entry(
        key={name: _plain(value) for name, value in case.named_key.items()},
        config=as_plain(outcome.config),
        measured=measured,
        us=round(outcome.seconds * 1e6, 2),
        default_us=round(outcome.default_seconds * 1e6, 2),
    )
    name = case.tunable.name
    others = [other for other in file.kernel_to_entries.get(name, ()) if other.key != entry.key]
    entries = sorted([*others, entry], key=lambda e: [(isinstance(v, str), v) for v in e.key.values()])
    return replace(file, kernel_to_entries={**file.kernel_to_entries, name: tuple(entries)})


def write(file: TunedFile) -> None:
    """Replace the file on disk."""
    lines = []
    for name, entries in sorted(file.kernel_to_entries.items()):
        rows = ",\n".join(f"   {json.dumps(asdict(entry))}" for entry in entries)
        lines.append(f"  {json.dumps(name)}: [\n{rows}\n  ]")
    head = (
        f' "device": {json.dumps(file.device)},\n "compute_capability": {json.dumps(file.compute_capability)}'
    )
    kernels = ",\n".join(lines)
    file.path.parent.mkdir(parents=True, exist_ok=True)
    draft = file.path.with_name(f"{file.path.name}.draft")
    draft.write_text(f'{{\n{head},\n "kernels": {{\n{kernels}\n }}\n}}\n')
    os.replace(draft, file.path)


def _plain(value: KeyValue) -> int | str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
