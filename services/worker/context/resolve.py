"""What the operator's config means for a model on a device, and what of it is refused. Needs no torch."""

from __future__ import annotations

from services.worker.context.attention_choice import (
    BATCH_INVARIANT_CHOICES,
    NATIVE_DTYPES,
    AttentionSite,
    choose_attention_backend,
)
from services.worker.context.resolved_config import RankFacts, ResolvedConfig
from triptych.checkpoint.architecture import ModelArchitecture
from triptych.config import EngineConfig
from triptych.errors import ConfigError, FeatureDisabled

_GROUP_SIZE = 32  # of quantized weights
_WEIGHTS_ALONE = ("q4", "q8")
"""Forms whose inputs stay in `model.dtype`; on CUDA devices their products of many rows are several times slower
where they must not depend on the batch."""


def resolve_for_device(
    engine: EngineConfig,
    architecture: ModelArchitecture,
    *,
    device: str,
    native_bfloat16: bool,
    native_kernels: bool,
    native_float8: bool = False,
    compute_capability: tuple[int, int] = (0, 0),
    attention_packages: frozenset[str] = frozenset(),
) -> ResolvedConfig:
    """Join the operator's config, the checkpoint's architecture and what is known of the device.

    Args:
        device: `cpu`, `cuda:<local_rank>` or `simulated`.
        native_bfloat16: whether it multiplies bfloat16 itself.
        native_kernels: whether the native kernels for CPUs are built and understood here.
        native_float8: whether it multiplies 8-bit floats itself.
        compute_capability: of a CUDA device.
        attention_packages: see `installed_packages`.
    Raises:
        ConfigError: a max_model_len above the model's own, or a rank that its group does not have.
        FeatureDisabled: a value that this build knows and does not serve.
    """
    rank = find_rank(engine, device)
    own_limit, asked = architecture.max_position_embeddings, engine.model.max_model_len
    if asked > own_limit:
        raise ConfigError(
            f"model.max_model_len: {asked} is above the model's own limit {own_limit}; set it to "
            f"at most {own_limit}, or to 0 for the model's limit"
        )
    dtype = choose_dtype(engine.model.dtype, architecture, device=device, native_bfloat16=native_bfloat16)
    quantization = choose_quantization(
        engine.model.quantization,
        architecture,
        dtype,
        device=device,
        native_kernels=native_kernels,
        native_float8=native_float8,
        num_ranks=rank.tensor_parallel_size,
    )
    kv_dtype = choose_kv_dtype(
        engine.cache.dtype, dtype, device=device, native_kernels=native_kernels, native_float8=native_float8
    )
    site = AttentionSite(
        architecture,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=engine.cache.block_size,
        native_kernels=native_kernels,
        compute_capability=compute_capability,
        packages=attention_packages,
    )
    return ResolvedConfig(
        engine=engine,
        architecture=architecture,
        rank=rank,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        attention_backend=choose_attention_backend(engine.worker.attention_backend, site),
        batch_invariant=choose_batch_invariance(engine, site, quantization),
    )


def find_rank(engine: EngineConfig, device: str) -> RankFacts:
    """Return this process's place among the ranks.

    Raises:
        ConfigError: there is no such rank.
        FeatureDisabled: layers on other ranks.
    """
    parallel, rank = engine.parallel, engine.worker.rank
    size = parallel.tensor_parallel_size
    if parallel.pipeline_parallel_size > 1:
        raise FeatureDisabled(
            f"parallel.pipeline_parallel_size = {parallel.pipeline_parallel_size}",
            "every rank runs all layers; set it to 1",
        )
    if rank >= size:
        raise ConfigError(
            f"worker.rank: {rank}, but parallel.tensor_parallel_size = {size} ranks are numbered from 0"
        )
    return RankFacts(
        tensor_parallel_rank=rank,
        tensor_parallel_size=size,
        device=device,
    )


def check_supported(engine: EngineConfig) -> None:
    """Refuse, naming key and value, what the config can say and no served worker does yet: an engine feeds one worker,
    though runners of several ranks can be created.

    Raises:
        FeatureDisabled: more than one worker per model.
    """
    for key, value, served in (
        ("parallel.tensor_parallel_size", engine.parallel.tensor_parallel_size, 1),
        ("parallel.pipeline_parallel_size", engine.parallel.pipeline_parallel_size, 1),
        ("worker.rank", engine.worker.rank, 0),
    ):
        if value != served:
            raise FeatureDisabled(
                f"{key} = {value}",
                f"an engine does not feed several workers yet, so a worker serves {key} = {served} alone; set it so",
            )


def choose_dtype(
    requested: str, architecture: ModelArchitecture, *, device: str, native_bfloat16: bool
) -> str:
    """Return the precision that `model.dtype` means; `auto` is the checkpoint's, where the device can do it.

    GGUF files are quantized, so their own precision says nothing: they count as bfloat16, which becomes
    float32 on a device that would only emulate it. So does float16 on a CPU, where no native kernel takes it.

    Args:
        device: as `resolve_for_device` takes it.
    """
    if requested != "auto":
        return requested
    stored = "bfloat16" if architecture.is_gguf else architecture.dtype
    is_half = stored == "bfloat16" or (stored == "float16" and device == "cpu")
    if not is_half:
        return stored
    return "bfloat16" if native_bfloat16 else "float32"


def choose_kv_dtype(
    requested: str, dtype: str, *, device: str, native_kernels: bool, native_float8: bool = False
) -> str:
    """Return the precision of keys and values that `cache.dtype` means; `auto` is that of the activations.

    Args:
        dtype: of activations.
        device, native_kernels, native_float8: as `resolve_for_device` takes them.
    Raises:
        FeatureDisabled: 8 bits where no kernel reads them: plain torch would first spell them out, so it would cost
            time instead of saving it.
    """
    if requested == "auto":
        return dtype
    obstacle = None
    if requested == "float8_e4m3fn":
        obstacle = _obstacle_to_float8(device, native_float8=native_float8)
    elif requested == "int8" and device == "cpu":
        obstacle = _obstacle_to_int8_on_cpu(dtype, native_kernels=native_kernels)
    if obstacle is not None:
        raise FeatureDisabled(f"cache.dtype = {requested}", f"{obstacle} auto, which is {dtype} here")
    return requested


def _obstacle_to_float8(device: str, *, native_float8: bool) -> str | None:
    if device == "cpu":
        return "8-bit floats are read on CUDA devices alone; set it to int8, or to"
    if device.startswith("cuda") and not native_float8:
        return (
            "8-bit floats are converted by devices of compute capability 8.9 and above, which this is not; set it to "
            "int8, or to"
        )
    return None


def _obstacle_to_int8_on_cpu(dtype: str, *, native_kernels: bool) -> str | None:
    if not native_kernels:
        return (
            "on CPUs it is read by the native kernels alone, which are not in use here; on Linux and x86-64 with AVX2 "
            "`python -m triptych_kernels.cpu.build` builds them; or set it to"
        )
    if dtype not in NATIVE_DTYPES:
        return f"the native kernels take {' and '.join(NATIVE_DTYPES)}, not model.dtype = {dtype}; set it to"
    return None


def choose_quantization(
    requested: str,
    architecture: ModelArchitecture,
    dtype: str,
    *,
    device: str,
    native_kernels: bool,
    native_float8: bool = False,
    num_ranks: int = 1,
) -> str:
    """The form of linear weights that `model.quantization` means: none, q4, q8, int8 or fp8.

    `auto` is q4 where the native kernels for CPUs serve it, else none: on CUDA devices nobody has measured yet which
    is the fastest.

    Args:
        dtype: of activations.
        device, native_kernels, native_float8: as `resolve_for_device` takes them.
        num_ranks: that share out the inputs of some layers.
    Raises:
        FeatureDisabled: a form that no kernel multiplies there.
    """
    if requested == "none":
        return "none"
    wanted = "q4" if requested == "auto" else requested
    obstacle = (
        _obstacle_on_cpu(wanted, dtype, native_kernels=native_kernels)
        if device == "cpu"
        else _obstacle_on_cuda(wanted, device, native_float8=native_float8)
    ) or _indivisible_inputs(architecture, num_ranks)
    if requested == "auto":
        return "q4" if device == "cpu" and obstacle is None else "none"
    if obstacle is None:
        return requested
    raise FeatureDisabled(f"model.quantization = {requested}", f"{obstacle}; set it to none or auto")


def choose_batch_invariance(engine: EngineConfig, site: AttentionSite, quantization: str) -> bool:
    """Whether a request's numbers must not depend on its batch: what `model.batch_invariant` means.

    Args:
        site: where attention and products are computed.
        quantization: resolved.
    Raises:
        FeatureDisabled: they must not, but something that was asked for lets them.
    """
    requested = engine.model.batch_invariant
    obstacle = _batch_dependence(engine.worker.attention_backend, site, quantization)
    if requested == "auto":
        is_dear = site.device.startswith("cuda") and quantization in _WEIGHTS_ALONE
        return engine.model.quantization != "auto" and obstacle is None and not is_dear
    if requested == "true" and obstacle is not None:
        raise FeatureDisabled(
            "model.batch_invariant = true", f"{obstacle}, or model.batch_invariant to auto or false"
        )
    return requested == "true"


def _batch_dependence(attention: str, site: AttentionSite, quantization: str) -> str | None:
    """What makes sums follow the rows that share a step, and what to set."""
    if attention not in BATCH_INVARIANT_CHOICES:
        return f"worker.attention_backend = {attention} cuts its sums by the rows that share a step; set that to auto"
    if site.device.startswith("cuda") and (quantization == "none" or site.architecture.num_experts):
        what = (
            "the router of a mixture of experts"
            if quantization != "none"
            else "weights that are not quantized"
        )
        return (
            f"on CUDA devices products with {what} are cuBLAS's, which cuts its sums by the number of rows; set "
            "model.quantization to q4, q8, int8 or fp8 where there are no experts"
        )
    if site.device == "cpu" and not (site.native_kernels and site.dtype in NATIVE_DTYPES):
        return (
            "without the native kernels products are torch's, which cuts its sums by the number of rows; on Linux and "
            "x86-64 with AVX2 build them with `python -m triptych_kernels.cpu.build`, and set model.dtype to "
            f"{' or '.join(NATIVE_DTYPES)}"
        )
    return None


def _obstacle_on_cpu(quantization: str, dtype: str, *, native_kernels: bool) -> str | None:
    if quantization in ("int8", "fp8"):
        return "inputs in 8 bits are multiplied on CUDA devices alone; q8 holds weights in 8 bits here"
    if not native_kernels:
        return (
            "on CPUs quantized weights are multiplied by the native kernels alone, which are not in use here"
        )
    if dtype not in NATIVE_DTYPES:
        return f"the kernels take {' and '.join(NATIVE_DTYPES)}, not model.dtype = {dtype}"
    return None


def _obstacle_on_cuda(quantization: str, device: str, *, native_float8: bool) -> str | None:
    if not device.startswith("cuda"):
        return f"weights are quantized on CPUs and CUDA devices alone, and this is {device}"
    if quantization == "fp8" and not native_float8:
        return "8-bit floats are multiplied by devices of compute capability 8.9 and above, which this is not"
    return None


def _indivisible_inputs(architecture: ModelArchitecture, num_ranks: int) -> str | None:
    """Why groups would be cut, by the layers themselves or by the ranks that share out their inputs."""
    for name, size, num_shares in (
        ("hidden_size", architecture.hidden_size, 1),
        ("intermediate_size", architecture.intermediate_size, num_ranks),
        ("num_heads * head_dim", architecture.num_heads * architecture.head_dim, num_ranks),
    ):
        if size % (_GROUP_SIZE * num_shares):
            shares = (" / parallel.tensor_parallel_size", f" / {num_shares}") if num_shares > 1 else ("", "")
            what = f"{name}{shares[0]} = {size}{shares[1]}"
            return f"inputs are quantized in groups of {_GROUP_SIZE}, which do not divide {what}"
    return None
