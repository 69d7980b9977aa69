"""Tiles by measurement: a launcher gets those stored for its device, which are shipped, or the default by reasoning.

Nothing is measured here or at start-up; `make tune-gpu` measures and writes the files that this reads.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parents[1] / "tuned"

ROW_BUCKETS = (16, 32, 64, 128, 512, 4096)
"""Numbers of rows that share a choice: up to each of these, and beyond the last. Up to 64 a tile can be as narrow as
the rows; above, only the number of reads of a weight and the number of programs change."""

KeyValue = int | torch.dtype
"""A value that a choice depends on: a size, a flag or a dtype. In files a dtype is its name."""

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored choice."""

    key: Mapping[str, Any]
    config: Mapping[str, Any]
    measured: str
    """When and with which software it was measured, for readers."""
    us: float
    """Microseconds of the operation; the geometric mean if there are several workloads."""
    default_us: float
    """Microseconds with the default."""


@dataclass(frozen=True, slots=True)
class TunedFile:
    """The choices for one device."""

    path: Path
    device: str
    """Its exact name, as torch gives it."""
    compute_capability: tuple[int, int]
    kernel_to_entries: Mapping[str, tuple[Entry, ...]]


class Tunable(Generic[Config]):
    """The ways of cutting one kernel: the default by reasoning, and the candidates that are worth measuring."""

    def __init__(
        self,
        name: str,
        key: tuple[str, ...],
        *,
        default: Callable[..., Config],
        candidates: Callable[..., Iterable[Config]],
        same_bits: bool = False,
    ) -> None:
        """Declare a choice.

        Args:
            name: Name in files.
            key: Names of the values that the choice depends on, in the order in which `chosen` takes them. None of
                them varies with the batch, unless `same_bits` is set or a row's bits may vary with its batch.
            default: Takes the values of a key and returns the config if nothing is stored: a frozen dataclass of
                numbers. One without numbers may have a launcher leave the work to torch.
            candidates: Takes the values of a key and yields configs that fit a device's shared memory and are worth
                measuring.
            same_bits: Whether the key varies with the batch while a row's bits may not. Then a candidate must give the
                default's bits exactly, or it is refused.
        """
        self.name = name
        self.key = key
        self.default = default
        self.same_bits = same_bits
        self._candidates = candidates
        self._choices: dict[tuple[torch.device, tuple[KeyValue, ...]], Config] = {}

    def candidates(self, *key: KeyValue) -> tuple[Config, ...]:
        """Return each candidate once, the default first."""
        return tuple(dict.fromkeys((self.default(*key), *self._candidates(*key))))

    def chosen(self, device: torch.device, *key: KeyValue) -> Config:
        """Return the config to launch with: a look-up in a dictionary, except for a device's first question with a key.

        Raises:
            ValueError: The device's file is not understood, or names a config that this kernel does not offer.
        """
        try:
            return self._choices[device, key]
        except KeyError:
            config = self._choices[device, key] = self._choose(device, key)
            return config

    @contextmanager
    def forced(self, device: torch.device, key: tuple[KeyValue, ...], config: Config) -> Iterator[None]:
        """Launch with this config inside the context, to measure or compile it."""
        before = self._choices.get((device, key))
        self._choices[device, key] = config
        try:
            yield
        finally:
            del self._choices[device, key]
            if before is not None:
                self._choices[device, key] = before

    def forget(self) -> None:
        """Forget all choices, so that the files are read again."""
        self._choices.clear()

    def read(self, file: TunedFile) -> dict[tuple[KeyValue, ...], Config]:
        """Return a file's choices for this kernel.

        Raises:
            ValueError: An entry's key is not this kernel's, or its config is no candidate; names file and entry.
        """
        choices: dict[tuple[KeyValue, ...], Config] = {}
        for entry in file.kernel_to_entries.get(self.name, ()):
            where = f"{file.path}: {self.name} {json.dumps(dict(entry.key))}"
            if tuple(entry.key) != self.key:
                raise ValueError(f"{where}: the key must name {', '.join(self.key)}")
            key = tuple(_key_value(value, where) for value in entry.key.values())
            if key in choices:
                raise ValueError(f"{where}: the key occurs twice")
            for config in self.candidates(*key):
                if as_plain(config) == entry.config:
                    choices[key] = config
                    break
            else:
                raise ValueError(
                    f"{where}: config {json.dumps(dict(entry.config))} is none of the "
                    f"{len(self.candidates(*key))} that the kernel declares; measure again with `make tune-gpu`"
                )
        return choices

    def _choose(self, device: torch.device, key: tuple[KeyValue, ...]) -> Config:
        file = file_of_device(device)
        choices = {} if file is None else self.read(file)
        return choices[key] if key in choices else self.default(*key)


def row_bucket(num_rows: float) -> int:
    """Return the largest number of rows that shares a choice with this one."""
    return ROW_BUCKETS[min(bisect_left(ROW_BUCKETS, num_rows), len(ROW_BUCKETS) - 1)]


def as_plain(config: object) -> dict[str, int]:
    """Return a config as files have it."""
    return asdict(config)  # type: ignore[call-overload]


@cache
def file_of_device(device: torch.device) -> TunedFile | None:
    """Read the file shipped for a device of exactly this name, and log once whether there is one.

    Raises:
        ValueError: See `read_file`; or the file is of another device.
    """
    name = device_name(device)
    if not name:
        return None
    path = file_path(name)
    if not path.is_file():
        log.info("kernels: nothing measured is stored for %s, so all tiles are the reasoned ones", name)
        return None
    file = read_file(path)
    if file.device != name:
        raise ValueError(f"{path}: device {file.device!r}, but this one is {name!r}")
    log.info("kernels: tiles as measured on %s, from %s", name, path)
    return file


def file_path(device_name: str, folder: Path | None = None) -> Path:
    """Return the path of the file for such a device."""
    return (folder or FOLDER) / f"{''.join(c if c.isalnum() or c in '-.' else '_' for c in device_name)}.json"


def device_name(device: torch.device) -> str:
    """Return a device's name as in files; empty for devices that have no files."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def read_file(path: Path) -> TunedFile:
    """Read the choices for one device; each kernel checks its own, see `Tunable.read`.

    Raises:
        ValueError: The file is not JSON or not of this form; names the file, and the entry if it is one.
    """
    try:
        content = json.loads(path.read_text())
        major, minor = content["compute_capability"]
        device, kernels = content["device"], dict(content["kernels"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a file of tiles, which has device, compute_capability and kernels: {error!r}"
        ) from error
    return TunedFile(
        path,
        device,
        (major, minor),
        {
            name: tuple(_entry(e, f"{path}: {name}, entry {i}") for i, e in enumerate(entries))
            for name, entries in kernels.items()
        },
    )


def _entry(content: Any, where: str) -> Entry:
    try:
        entry = Entry(**content)
        dict(entry.key), dict(entry.config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {json.dumps(content)}: {error}") from error
    return entry


def _key_value(value: Any, where: str) -> KeyValue:
    if isinstance(value, int):
        return value
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{where}: {value!r} is neither a number nor a dtype")
    return dtype
