"""What the operator's config means for a model on a device, and what of it is refused. Needs no torch."""

from __future__ import annotations

from triptych.config.architecture import ModelArchitecture
from triptych.config.fields import EngineConfig
from triptych.config.resolved import ResolvedConfig
from triptych.errors import ConfigError, FeatureDisabled
from triptych.types.facts import RankFacts


def resolve_for_device(
    engine: EngineConfig, architecture: ModelArchitecture, *, device: str, native_bfloat16: bool
) -> ResolvedConfig:
    """Join the operator's config, the checkpoint's architecture and what is known of the device.

    Args:
        device: `cpu`, `cuda:<local_rank>` or `simulated`.
        native_bfloat16: whether it multiplies bfloat16 itself.
    Raises:
        ConfigError: a max_model_len above the model's own.
        FeatureDisabled: a value that this build knows and does not serve.
    """
    refuse_unbuilt(engine)
    own_limit, asked = architecture.max_position_embeddings, engine.model.max_model_len
    if asked > own_limit:
        raise ConfigError(
            f"model.max_model_len: {asked} is above the model's own limit {own_limit}; set it to "
            f"at most {own_limit}, or to 0 for the model's limit"
        )
    dtype = choose_dtype(engine.model.dtype, architecture, native_bfloat16=native_bfloat16)
    return ResolvedConfig(
        engine=engine,
        architecture=architecture,
        rank=RankFacts(local_rank=engine.parallel.local_rank, device=device),
        dtype=dtype,
        kv_dtype=dtype if engine.cache.dtype == "auto" else engine.cache.dtype,
    )


def refuse_unbuilt(engine: EngineConfig) -> None:
    """Refuse, naming key and value, what the config can say and this worker does not do.

    Raises:
        FeatureDisabled: weight-only quantization or more than one worker per model.
    """
    for key, value, served in (
        ("model.quantization", engine.model.quantization, "none"),
        ("parallel.tensor_parallel_size", engine.parallel.tensor_parallel_size, 1),
        ("parallel.pipeline_parallel_size", engine.parallel.pipeline_parallel_size, 1),
        ("parallel.rank", engine.parallel.rank, 0),
    ):
        if value != served:
            raise FeatureDisabled(f"{key} = {value}", f"this worker serves {key} = {served} alone; set it so")


def choose_dtype(requested: str, architecture: ModelArchitecture, *, native_bfloat16: bool) -> str:
    """The precision that `model.dtype` means; `auto` is the checkpoint's, where the device can do it.

    GGUF files are quantized, so their own precision says nothing: they count as bfloat16, which becomes
    float32 on a device that would only emulate it.
    """
    if requested != "auto":
        return requested
    stored = "bfloat16" if architecture.is_gguf else architecture.dtype
    return "float32" if stored == "bfloat16" and not native_bfloat16 else stored
