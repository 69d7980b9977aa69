"""Facts: answers of a machine or checkpoint, as opposed to the config of an operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from triptych.types.identity import ModelIdentity
from triptych.types.kv_transfer import KvEndpoint, TransferCounts
from triptych.types.pooling import GENERATION

_KV_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
_KV_SCALE_BYTES = {"int8": 4, "float8_e4m3fn": 4}  # of each key and each value, where elements have one

PositionT = TypeVar("PositionT", int, NDArray[np.int64])


class KvKind(Enum):
    """The positions that a query of a group's layers sees, its own included."""

    FULL = auto()
    """All of them."""
    WINDOW = auto()
    """The last `window`."""
    CHUNK = auto()
    """Those of its own chunk of `window` positions, up to its own."""
    STATE = auto()
    """No others: the layers keep a recurrent state, which a step reads, and writes again."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that keep the same positions. A request has one block table for all of them."""

    kind: KvKind
    num_layers: int
    """Layers of this worker: its stage's if the model is computed in stages."""
    block_size: int
    """Tokens per block. Of a group of states: the block's page holds the state behind its last token that is computed
    and no guess, and no step computes tokens of two blocks of a row."""
    block_bytes: int
    """Bytes of one block in all layers of the group, padding included."""
    window: int = 0
    """Positions of a window or a chunk. 0: the group has another kind."""

    def first_needed(self, position: PositionT) -> PositionT:
        """Return the index of the first block that is read from a position on, or of its own if that is none.

        Args:
            position: One, or an array of them.
        """
        if self.kind is KvKind.FULL:
            return position * 0
        if self.kind is KvKind.CHUNK:
            return position // self.window * self.window // self.block_size
        first = (position - (self.window - 1 if self.kind is KvKind.WINDOW else 1)) // self.block_size
        return first * (first > 0)

    def most_held(self, step_tokens: int) -> int | None:
        """Return the most blocks that a row holds at a time. None: all that its tokens fill.

        Args:
            step_tokens: Positions between what the row needs no more and the end of a step, at most.
        """
        if self.kind is KvKind.FULL:
            return None
        if self.kind is KvKind.STATE:
            return 2  # a step never goes beyond the end of a block; see `least_state_page`
        return max(self.window - 3 + step_tokens, 0) // self.block_size + 2


def least_state_page(max_steps_in_flight: int, max_samples_per_row: int) -> int:
    """Return the fewest tokens of a page of states where a row may get several tokens in a step.

    So many lie between the least that a row has got, while steps are in flight, and the most that it may get: no row
    holds more than two pages.
    """
    return (max_steps_in_flight + 1) * max_samples_per_row


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The paged cache as the worker built it.

    Groups of keys and values share one pool of equal blocks. Groups of states share another one.

        num_blocks         [ null | 1 | 2 | 3 | … ]     a block holds tokens of one group: any of full, window, chunk
        num_state_blocks   [ null | 1 | 2 | … ]         each a page of one group of states
    """

    num_blocks: int
    """Blocks of keys and values, including block 0, the null block, which no request ever holds."""
    block_size: int
    """Tokens per block. Groups may have longer blocks, each a multiple of this. A block hash names this many tokens."""
    num_layers: int
    """Layers of this worker with keys and values of the sizes below: its stage's if the model is computed in stages."""
    num_kv_heads: int
    """KV heads of this worker: its share if ranks divide the model's heads."""
    head_dim: int
    dtype: str
    soft_num_blocks: int | None = None
    """Blocks that the engine may touch without need, where a block takes memory once it is touched. None where all
    blocks have memory from the start."""
    groups: tuple[KvGroup, ...] = ()
    """Never empty. Where none are given, one full group of all layers."""
    num_state_blocks: int = 0
    """Blocks of states, including their null block; 0: no group has any."""
    continues_states: bool = False
    """Whether a row may go on from a page of states that is not full on another one, which leaves a snapshot behind.
    Only with one group of states."""

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", (self._one_group(),))

    @property
    def is_plain(self) -> bool:
        """Whether it is one full group of equal layers, as all were before there were groups."""
        return self.groups == (self._one_group(),)

    @property
    def is_one_full_group(self) -> bool:
        """Whether there is one group only, which keeps every position, whatever its layers are."""
        return [group.kind for group in self.groups] == [KvKind.FULL]

    @property
    def num_tokens(self) -> int:
        """Tokens that all blocks hold in one full group; the null block holds none."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of keys and values in all layers of its group; 0: there are only states."""
        return next((group.block_bytes for group in self.groups if group.kind is not KvKind.STATE), 0)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of states in all layers of its group; 0: there are none."""
        return next((group.block_bytes for group in self.groups if group.kind is KvKind.STATE), 0)

    def _one_group(self) -> KvGroup:
        element_bytes = _KV_DTYPE_BYTES.get(self.dtype, 0)  # 0: a dtype of a later version
        vector_bytes = self.head_dim * element_bytes + _KV_SCALE_BYTES.get(self.dtype, 0)
        block_bytes = self.num_layers * 2 * self.num_kv_heads * vector_bytes * self.block_size
        return KvGroup(KvKind.FULL, self.num_layers, self.block_size, block_bytes)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model that the tiers above the worker need. Only the worker reads the files for them."""

    name: str
    """Name that clients use."""
    identity: ModelIdentity
    """Everything that decides its tokens."""
    vocab_size: int
    max_model_len: int
    """Tokens of prompt and output together: min(the model's, what the blocks can hold)."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence. The first is the tokenizer's own. Clients see it as the end, and the ids
    of the others."""
    dtype: str
    kv_dtype: str
    quantization: str
    tasks: tuple[str, ...] = (GENERATION,)
    """Names of the tasks that its rows may have: `Task.label`."""
    embedding_size: int = 0
    """Numbers of a vector of the whole length; 0: it makes none."""
    num_labels: int = 0
    """Labels of its classifier; 0: it has none."""
    is_encoder: bool = False
    """Each text is computed whole in one step, and leaves no keys and values behind."""
    last_state_tasks: tuple[str, ...] = ()
    """Those of `tasks` with rows that read the state of their last token alone, unless they ask for another kind. Such
    rows may begin with cached blocks."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts of a worker: its half of the handshake."""

    boot_id: str
    """A uuid drawn at process start: another one means that every row and block is gone."""
    model: ModelFacts
    kv: KvLayout
    max_num_seqs: int
    max_num_batched_tokens: int
    max_steps_in_flight: int
    max_samples_per_row: int = 1
    """Tokens that one row can get in a step. More than 1 where the worker guesses tokens ahead and verifies them."""
    num_stages: int = 1
    """Stages that compute different steps at the same time. A step goes through all of them, and the next one of its
    rows begins when their tokens have left the last stage."""
    device_name: str = ""
    kernels: str = ""
    """Description of the kernels: the instruction set of the native ones and how they are called, or torch."""
    weight_bytes: int = 0
    load_s: float = 0.0
    kv_endpoint: KvEndpoint | None = None
    """The place at which other workers pull its KV blocks. None: the worker takes no part in that."""
    max_adapters: int = 0
    """Different adapters that the rows of a step may have; 0: it serves none."""
    max_adapter_rank: int = 0
    """The largest rank of an adapter that it takes."""


class Phase:
    """A worker's way to readiness, in order; from ready to asleep, and by way of loading back."""

    STARTING = "starting"
    LOADING = "loading"
    ALLOCATING = "allocating"
    WARMING = "warming"
    READY = "ready"
    ASLEEP = "asleep"
    DRAINING = "draining"


class PauseMode(Enum):
    """The treatment of running requests when an engine pauses."""

    WAIT = auto()
    """They finish; those that wait go on waiting."""
    ABORT = auto()
    """They are aborted, and those that wait."""
    KEEP = auto()
    """They freeze."""


class SleepLevel(Enum):
    """State of the weights while a worker sleeps. Its KV cache is released in any case."""

    WEIGHTS_ON_HOST = 1
    """They wait in the host's memory."""
    WEIGHTS_DROPPED = 2
    """They are read from the checkpoint again."""


@dataclass(frozen=True, slots=True)
class StatusRow:
    """A number of an engine's status, as everything that shows it needs it."""

    path: str
    """Its place in an `EngineStatus`: num_running, counters.num_steps."""
    help: str
    is_counter: bool
    """It only grows, as long as the engine lives."""
    metric: str
    """Its name in the engine's metrics, behind `triptych_engine_`. Empty: it is not there."""
    shared: str
    """Its name in the frontends' metrics, behind `triptych_frontend_`: vLLM's, where vLLM has it. Empty: not there."""
    heading: str
    """Its column in `triptych watch`, which shows what was added since the line before. Empty: it has none."""
    scale: float
    """Factor from the unit of the status to that of metrics."""

    def read(self, status: EngineStatus) -> float:
        """Return the number in a status, in the unit of metrics."""
        return float(attrgetter(self.path)(status) * self.scale)


def _gauge(help: str, metric: str = "", *, shared: str = "", scale: float = 1, default: Any = 0) -> Any:
    row = {"help": help, "metric": metric, "shared": shared, "heading": "", "scale": scale}
    return field(default=default, metadata={"row": row | {"is_counter": False}})


def _counter(help: str, metric: str, *, shared: str = "", heading: str = "") -> Any:
    row = {"help": help, "metric": metric, "shared": shared, "heading": heading, "scale": 1}
    return field(default=0, metadata={"row": row | {"is_counter": True}})


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start. Only the scheduler writes them. They never fall, even when the worker is lost."""

    num_steps: int = _counter("Steps planned.", "steps")
    num_scheduled_tokens: int = _counter("Tokens planned, recomputed ones included.", "scheduled_tokens")
    prefix_queries: int = _counter(
        "Prompt tokens looked up in the prefix cache, once per request.",
        "prefix_query_tokens",
        shared="prefix_cache_queries",
    )
    prefix_hits: int = _counter(
        "Prompt tokens found in the prefix cache, and not computed.",
        "prefix_hit_tokens",
        shared="prefix_cache_hits",
    )
    num_preemptions: int = _counter(
        "Times that a running request lost its row for lack of blocks.",
        "preemptions",
        shared="num_preemptions",
        heading="preempted",
    )
    num_guesses: int = _counter(
        "Guessed tokens that the worker verified.", "guesses", shared="spec_decode_num_draft_tokens"
    )
    num_accepted_guesses: int = _counter(
        "Guessed tokens that were the ones chosen, and took no step of their own.",
        "accepted_guesses",
        shared="spec_decode_num_accepted_tokens",
        heading="guessed",
    )
    num_finished: dict[str, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "repetition": 0, "abort": 0, "error": 0}
    )
    """Reason -> requests that ended for it."""

    def copy(self) -> EngineCounters:
        """Return the counters as they are now."""
        return replace(self, num_finished=dict(self.num_finished))


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """The blocks of the groups of layers that keep the same positions, at one moment."""

    name: str
    """Kind, and window if it has one: full, window-1024, chunk-8192, state."""
    num_groups: int
    """Groups that keep these positions. A request holds as many blocks of each."""
    num_blocks: int
    """Blocks of the pool that the groups draw from, with others: of keys and values, or of states."""
    num_used_blocks: int
    """Blocks that requests hold, in all of these groups."""
    num_hit_blocks: int
    """Blocks found in the prefix cache that requests began with, since the start."""
    num_released_blocks: int
    """Blocks that running requests gave back because no later token sees them, since the start."""
    num_snapshots: int
    """States in the prefix cache, from which a prompt can go on. 0: the groups keep none."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine's counters at one moment. A number with a help text is shown everywhere by its row of STATUS_ROWS."""

    engine_id: str
    ready: bool
    why_not_ready: str
    num_running: int = _gauge(
        "Choices with a row in the worker.", "running_requests", shared="num_requests_running"
    )
    num_waiting: int = _gauge(
        "Choices that wait for a row.", "waiting_requests", shared="num_requests_waiting"
    )
    num_blocks: int = _gauge("KV blocks that requests may hold.", "blocks")
    num_used_blocks: int = _gauge("KV blocks that requests hold.", "used_blocks")
    num_cached_blocks: int = _gauge("Free KV blocks with content that can still be hit.")
    num_touched_blocks: int = _gauge(
        "KV blocks that requests have held since the worker was ready. On a CPU only these take memory.",
        "touched_blocks",
    )
    steps_in_flight: int = _gauge(
        "Steps to keep in flight towards the worker, as measured or configured.", "steps_in_flight"
    )
    step_ns: int = _gauge("Moving average of the time between two results while busy, in nanoseconds.")
    counters: EngineCounters = field(default_factory=EngineCounters)
    paused: bool = False
    journal: str = "off"
    """off, recording, full, failed, closed."""
    asleep: bool = _gauge(
        "1 while the worker sleeps until an operator wakes it.",
        "asleep",
        shared="engine_sleep_state",
        default=False,
    )
    oldest_waiting_s: float = _gauge(
        "Time that the request which waits longest for a row has been queued; 0: none waits.",
        "oldest_waiting_seconds",
        default=0.0,
    )
    num_waiting_by_priority: dict[int, int] = field(default_factory=dict)
    """Priority -> requests of it that wait for a row."""
    kv_transfers: TransferCounts = field(default_factory=TransferCounts)
    journal_bytes: int = _gauge("Bytes of this engine's journals, earlier runs included.", "journal_bytes")
    journal_oldest_at_ms: int = _gauge(
        "Unix time of the start of the earliest run that the journals hold; 0: they hold none.",
        "journal_oldest_timestamp_seconds",
        scale=1e-3,
    )
    num_kept: int = _gauge("Requests that run on without a frontend that reads them.", "kept_requests")
    num_adapters: int = _gauge("LoRA adapters that requests may name.", "adapters")
    num_resident_adapters: int = _gauge(
        "LoRA adapters that the worker has in the host's memory.", "resident_adapters"
    )
    resident_adapter_bytes: int = _gauge("Bytes of these, on one rank.", "resident_adapter_bytes")
    num_adapter_reads: int = _counter(
        "LoRA adapters that were read again because a request named them.", "adapter_reads"
    )
    num_adapter_drops: int = _counter(
        "LoRA adapters that left the host's memory because another one needed the room.", "adapter_drops"
    )
    draining: bool = False
    """It takes no more requests, and goes on with those that it has."""
    soft_num_blocks: int | None = None
    """As in `KvLayout`."""
    block_bytes: int = 0
    """Bytes of one block in all layers of a rank."""
    page_bytes: int = 0
    """Bytes of one page of states in all layers of a rank; 0: no layer has any."""
    block_size: int = 0
    """Tokens per block."""
    groups: tuple[GroupStatus, ...] = ()
    """Blocks by kind of group. Empty where one group keeps every key."""


STATUS_ROWS: Mapping[str, StatusRow] = {
    each.name: StatusRow(path=prefix + each.name, **each.metadata["row"])
    for prefix, cls in (("", EngineStatus), ("counters.", EngineCounters))
    for each in fields(cls)
    if "row" in each.metadata
}
"""Field -> its row, of `EngineStatus` and of its counters."""
