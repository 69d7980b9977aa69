"""The native calls of a recorded step: names, operands, and what each computes and reads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from triptych_kernels.cpu import program
from triptych_kernels.cpu.launch import find_kernel
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.machine import Rates

PRODUCTS, HEAD, ATTENTION, STATES, SMALL, SAMPLING, OTHER = (
    "products", "head", "attention", "recurrent states", "norms, rotary, KV writes", "sampling", "other",
)  # fmt: skip
GROUPS = (PRODUCTS, HEAD, ATTENTION, STATES, SMALL, SAMPLING, OTHER)
_WORD_TO_GROUP: tuple[tuple[str, str], ...] = (
    ("linear", PRODUCTS),
    ("product", PRODUCTS),
    ("moe", PRODUCTS),
    ("attention", ATTENTION),
    ("attend", ATTENTION),
    ("choose_keys", ATTENTION),
    *((word, STATES) for word in ("conv", "scan")),
    *((word, SMALL) for word in ("norm", "rotary", "write_", "embedding", "gather_rows", "pointwise")),
    *((word, SMALL) for word in ("last_axis", "local_ids", "clear_other_rows", "over_ranks")),
    *((word, SAMPLING) for word in ("sample", "logprobs", "logits")),
)
"""Part of a kernel's name -> its group; the first that is found counts, so a product or attention counts with what was
joined to it."""
_DTYPE_BYTES = {0: 4, 1: 2, 2: 1}  # `DType` in kernel.h
_GROUP_SIZE = 32  # weights that share a scale


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens and contexts of one step."""

    keys: int
    """Keys in the cache of all rows together."""
    pairs: int
    """Pairs of a query and a key that it sees, of all rows together."""


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a call has to do, and the field of `Rates` that bounds it."""

    operations: float = 0.0
    """Multiplications and additions."""
    num_bytes: float = 0.0
    """Bytes of weights, or of keys and values, that it reads."""
    product: str = ""

    def limit_s(self, rates: Rates) -> float:
        """Return the least seconds that a machine of these rates takes; 0 if there is no such rate."""
        rate = getattr(rates, self.product) if self.product else 0.0
        computing_s = self.operations / (1e9 * rate) if rate else 0.0
        return max(computing_s, self.num_bytes / (1e9 * rates.memory)) if computing_s else 0.0


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a recorded program."""

    kernel: str
    fields: Mapping[str, int | float]
    """Fields of the kernel's struct; addresses are numbers."""

    def find(self, name: str) -> int | float | None:
        """Return a field, also one of a struct inside; None if there is none or if it is ambiguous."""
        if name in self.fields:
            return self.fields[name]
        found = [value for field, value in self.fields.items() if field.endswith(f"_{name}")]
        return found[0] if len(found) == 1 else None

    def group(self, vocab_size: int) -> str:
        """Return the group of `GROUPS` that it belongs to."""
        for word, group in _WORD_TO_GROUP:
            if word in self.kernel:
                return HEAD if group == PRODUCTS and self.find("out_features") == vocab_size else group
        return OTHER

    def work(self, group: str, rows: int, step: Step) -> Work:
        """Return what it has to do; nothing for a call that is not bound by products.

        Args:
            rows: Rows of its inputs.
        """
        if group in (PRODUCTS, HEAD):
            return self._product_work(rows)
        return self._attention_work(step) if group == ATTENTION else Work()

    def _product_work(self, rows: int) -> Work:
        size_in, size_out = self.find("in_features"), self.find("out_features")
        if size_in is None or size_out is None:
            return Work()
        bits = self.find("bits") if "quantized" in self.kernel else None
        if bits is not None:
            scales = 16 * (2 if self.find("affine") else 1) / _GROUP_SIZE
            weight_bits, product = bits + scales, f"int{self.find('input_bits') or 16}"
        elif "widened" in self.kernel:
            weight_bits, product = 16, "float32"
        else:
            dtype = int(self.find("dtype") or 0)
            weight_bits, product = 8 * _DTYPE_BYTES[dtype], "float32" if dtype == 0 else "bfloat16"
        return Work(2.0 * rows * size_in * size_out, size_in * size_out * weight_bits / 8, product)

    def _attention_work(self, step: Step) -> Work:
        names = ("num_heads", "num_kv_heads", "head_dim", "cache_dtype")
        num_heads, num_kv_heads, head_dim, cache_dtype = (self.find(name) for name in names)
        if num_heads is None or num_kv_heads is None or head_dim is None or cache_dtype is None:
            return Work()
        operations = 4.0 * step.pairs * num_heads * head_dim
        cache_bytes = _DTYPE_BYTES[int(cache_dtype)]
        product = "bfloat16" if self.find("dtype") == 1 else "float32"
        return Work(operations, 2.0 * step.keys * num_kv_heads * head_dim * cache_bytes, product)


@dataclass(slots=True)
class CallTimes:
    """Seconds of the calls of one step, call by call."""

    calls: list[tuple[Call, int, float]] = field(default_factory=list)
    """Call, its number of rows, seconds."""
    total_s: float = 0.0
    """Seconds of the whole program, including what finds out and measures the calls."""


@contextmanager
def call_by_call(times: CallTimes) -> Iterator[None]:
    """Let recorded programs run one call after the other inside the context, and add the time of each."""
    whole = program.Program.run
    programs: dict[int, list[Call]] = {}

    def run(self: program.Program, counts: Mapping[str, int]) -> None:
        began_s = time.perf_counter()
        calls = programs.get(id(self)) or programs.setdefault(id(self), list(_calls_of(self)))
        for number, call in enumerate(calls):
            started_s = time.perf_counter()
            self.run_call(number, counts)
            times.calls.append((call, counts[self.calls[number].count], time.perf_counter() - started_s))
        times.total_s += time.perf_counter() - began_s

    program.Program.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        program.Program.run = whole  # type: ignore[method-assign]


def _calls_of(recorded: program.Program) -> Iterator[Call]:
    for call in recorded.calls:
        kernel = find_kernel(isa(), call.kernel)
        yield Call(call.kernel, dict(zip(kernel.fields, kernel.layout.unpack(call.struct), strict=True)))
