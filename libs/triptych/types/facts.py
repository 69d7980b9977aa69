"""Facts: answers of a machine or checkpoint, as opposed to the config of an operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from triptych.types.identity import ModelIdentity
from triptych.types.kv_transfer import KvEndpoint, TransferCounts

_KV_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
_KV_SCALE_BYTES = {"int8": 4, "float8_e4m3fn": 4}  # of each key and each value, where elements have one


@dataclass(frozen=True, slots=True)
class KvShape:
    """The paged KV cache as the worker built it."""

    num_blocks: int
    """Including block 0, the null block, which no request ever holds."""
    block_size: int
    """Tokens per block."""
    num_layers: int
    """Layers of this worker: its stage's if the model is computed in stages."""
    num_kv_heads: int
    """KV heads of this worker: its share if ranks divide the model's heads."""
    head_dim: int
    dtype: str
    soft_num_blocks: int | None = None
    """Blocks that the engine may touch without need, where a block takes memory once it is touched. None where all
    blocks have memory from the start."""

    @property
    def num_tokens(self) -> int:
        """Tokens that all blocks hold; the null block holds none."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        vector_bytes = self.head_dim * _KV_DTYPE_BYTES[self.dtype] + _KV_SCALE_BYTES.get(self.dtype, 0)
        return self.num_layers * 2 * self.num_kv_heads * vector_bytes * self.block_size


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


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts of a worker: its half of the handshake."""

    boot_id: str
    """A uuid drawn at process start: another one means that every row and block is gone."""
    model: ModelFacts
    kv: KvShape
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
class EngineStatus:
    """One engine's counters at one moment."""

    engine_id: str
    ready: bool
    why_not_ready: str
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    """Blocks that requests may hold (the null block is not one)."""
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    """Free blocks whose content can still be hit."""
    num_steps: int = 0
    steps_in_flight: int = 0
    step_ns: int = 0
    """Moving average between two results while busy."""
    prefix_queries: int = 0
    """Prompt tokens looked up since start."""
    prefix_hits: int = 0
    """Tokens among them that the prefix cache held."""
    num_preemptions: int = 0
    num_scheduled_tokens: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)
    """Requests ended, by reason (stop, length, abort, error)."""
    paused: bool = False
    journal: str = "off"
    """off, recording, full, failed, closed."""
    asleep: bool = False
    """The worker sleeps until an operator wakes it."""
    oldest_waiting_s: float = 0.0
    """Seconds for which the request that waits for a row longest has been queued. 0: none waits."""
    num_waiting_by_priority: dict[int, int] = field(default_factory=dict)
    """Priority -> requests of it that wait for a row."""
    kv_transfers: TransferCounts = field(default_factory=TransferCounts)
    journal_bytes: int = 0
    """Bytes of this engine's journals, those of earlier runs included."""
    journal_oldest_at_ms: int = 0
    """Unix time of the start of the earliest run that they hold. 0: they hold none."""
    num_kept: int = 0
    """Requests that run on without a frontend that reads them."""
    draining: bool = False
    """It takes no more requests, and goes on with those that it has."""
    num_touched_blocks: int = 0
    """Blocks that requests have held since the worker was ready. On a CPU only these take memory."""
    soft_num_blocks: int | None = None
    """As in `KvShape`."""
    block_bytes: int = 0
    """Bytes of one block in all layers of a rank."""
    block_size: int = 0
    """Tokens per block."""
