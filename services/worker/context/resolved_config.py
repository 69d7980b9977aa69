"""The operator's config with every `auto` resolved for one model on one machine. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.config import EngineConfig
from triptych_services.worker.context.expert_placement import ExpertPlacement

_MAX_STEPS_IN_FLIGHT = 4  # more would make a stop come too late to save work


def max_steps_in_flight(num_stages: int) -> int:
    """Return the most steps that a worker takes before it answers the first; stages compute different ones."""
    return _MAX_STEPS_IN_FLIGHT + num_stages - 1


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The place of this process among the ranks of its model, and its device.

                      tensor_parallel_rank 0    1        num_stages = 2, tensor_parallel_size = 2
    stage 0, first layers        rank 0    rank 1       the ranks of a stage share each of its layers
    stage 1, last layers         rank 2    rank 3
    """

    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    device: str = "cpu"
    """`cpu`, `cuda:<local_rank>` or `simulated`."""
    ranks_on_host: int = 1
    """Ranks that share this machine's cores and memory."""
    stage: int = 0
    """The part of the layers that this process computes; stages compute one after the other."""
    num_stages: int = 1

    @property
    def rank(self) -> int:
        """Number of this process among all ranks of the model."""
        return self.stage * self.tensor_parallel_size + self.tensor_parallel_rank

    @property
    def num_ranks(self) -> int:
        """Number of all ranks of the model."""
        return self.num_stages * self.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        """Whether the embedding is here."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the last norm and the head are here, and tokens are chosen here."""
        return self.stage == self.num_stages - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """The facts of a device that decide what `auto` means on it."""

    device: str
    """`cpu`, `cuda:<local_rank>` or `simulated`."""
    prefers_bfloat16: bool = False
    """Whether the device multiplies bfloat16 faster than float32."""
    native_kernels: bool = False
    """Whether the native kernels for CPUs are built and run on this processor."""
    byte_input_forms: tuple[str, ...] = ()
    """Forms of quantized weights that the native kernels multiply faster with inputs in 8 bits than in 16."""
    native_float8: bool = False
    """Whether the device multiplies 8-bit floats itself."""
    compute_capability: tuple[int, int] = (0, 0)
    """Compute capability of a CUDA device."""
    attention_packages: frozenset[str] = frozenset()
    """As of `installed_packages`."""
    device_bytes: int = 0
    """Memory of a CUDA device."""


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The operator's config, the checkpoint's architecture and this machine's answers to `auto`.

    Resolved once per worker process. It holds values only; what the process holds open is in `ModelContext`.
    """

    engine: EngineConfig
    architecture: ModelArchitecture
    rank: RankFacts = field(default_factory=RankFacts)
    dtype: str = "float32"
    """`engine.model.dtype` with `auto` resolved: float32, bfloat16 or float16."""
    weight_dtype: str = "float32"
    """Precision of weights that are not quantized and have none in their stored form: blocks of GGUF files that are
    dequantized, and random weights. Tensors stored in 16 bits are held in those if `dtype` is float32."""
    kv_dtype: str = "float32"
    """`engine.cache.dtype` with `auto` resolved: int8, float8_e4m3fn, or one of `dtype`'s."""
    quantization: str = "none"
    """`engine.model.quantization` with `auto` resolved: none, q4, q8, int8 or fp8; or stored: linear weights are as
    the tool that wrote the checkpoint, or the GGUF file, has quantized them."""
    activation_bits: int = 16
    """`engine.model.activation_bits` with `auto` resolved: 8 or 16. It says nothing where weights are not
    quantized, and on CUDA devices."""
    attention_backend: str = "torch"
    """`engine.worker.attention_backend` with `auto` resolved: native, triton, torch, flash-attn (of version 2),
    flash-attn-3 or flashinfer; none on a simulated device."""
    batch_invariant: bool = True
    """`engine.model.batch_invariant` with `auto` resolved."""
    expert_placement: ExpertPlacement | None = None
    """Which experts ranks hold by `engine.parallel.expert_counts`; None: it is empty, and they hold neighbours."""
    guesses_for_another: bool = False
    """Whether the model guesses for another one, so that its choices of experts are not counted."""
    no_guesses: str = ""
    """The reason for which `engine.speculative.enabled`, which is resolved there, became false; empty: it did not."""
    has_step_by_device: bool = False
    """The operator has left `engine.scheduler.max_num_batched_tokens` to the device, so that a smaller number may be
    taken where memory is short."""

    @property
    def max_samples_per_row(self) -> int:
        """Most tokens that a row gets in a step: its own, and those that were guessed."""
        speculative = self.engine.speculative
        return 1 + speculative.max_tokens if speculative.enabled == "true" else 1
