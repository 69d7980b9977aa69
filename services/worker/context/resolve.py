"""The meaning of the operator's config for a model on a device, and its unsupported values. Needs no torch."""

from __future__ import annotations

from dataclasses import replace

from triptych.checkpoint.architecture import TRANSFORMERS_ENCODER, TRANSFORMERS_MODEL, ModelArchitecture
from triptych.checkpoint.quantization.scheme import StoredQuantization
from triptych.config import EngineConfig, ModelConfig, ParallelConfig
from triptych.config.step_size import size_for_device
from triptych.errors import ConfigError, FeatureDisabled
from triptych.types.facts import least_state_page
from triptych_services.worker.context.attention_choice import (
    BATCH_INVARIANT_CHOICES,
    NATIVE_DTYPES,
    AttentionSite,
    choose_attention_backend,
)
from triptych_services.worker.context.expert_placement import read_placement
from triptych_services.worker.context.precision import (
    choose_dtype,
    choose_kv_dtype,
    choose_weight_dtype,
    stored_dtype,
)
from triptych_services.worker.context.resolved_config import (
    DeviceTraits,
    RankFacts,
    ResolvedConfig,
    max_steps_in_flight,
)

_GROUP_SIZE = 32  # of quantized weights
_ONE_RANK = ParallelConfig()
_EMBEDDED = ModelConfig().model
_WEIGHT_ONLY = ("q4", "q8")
"""Forms with inputs that stay in `model.dtype`. On CUDA devices their products of many rows are several times slower if
they must not depend on the batch."""


def resolve_for_device(
    engine: EngineConfig, architecture: ModelArchitecture, traits: DeviceTraits
) -> ResolvedConfig:
    """Join the operator's config, the checkpoint's architecture and the facts of the device.

    Raises:
        ConfigError: max_model_len is above the model's own, or the group has no such rank.
        FeatureDisabled: A value is not supported on this device.
    """
    device, native_kernels = traits.device, traits.native_kernels
    rank = find_rank(engine, device)
    if device != "cpu":  # no kernel chooses keys there
        architecture = architecture.without_indexers()
    _check_support(engine, architecture, rank)
    dtype = choose_dtype(
        engine.model.dtype, architecture, device=device, prefers_bfloat16=traits.prefers_bfloat16
    )
    quantization = choose_quantization(
        _requested_quantization(engine, architecture), architecture, dtype, traits, parallel=engine.parallel
    )
    kv_dtype = choose_kv_dtype(
        engine.cache.dtype,
        dtype,
        device=device,
        native_kernels=native_kernels,
        native_float8=traits.native_float8,
        stands_for_bfloat16=engine.model.dtype == "auto" and stored_dtype(architecture) == "bfloat16",
    )
    _check_kv_dtype(architecture, kv_dtype)
    site = AttentionSite(
        architecture,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=engine.cache.block_size,
        native_kernels=native_kernels,
        compute_capability=traits.compute_capability,
        packages=traits.attention_packages,
    )
    config = ResolvedConfig(
        engine=replace(engine, scheduler=size_for_device(engine.scheduler, traits.device_bytes)),
        architecture=architecture,
        rank=rank,
        dtype=dtype,
        weight_dtype=choose_weight_dtype(
            engine.model.dtype,
            architecture,
            dtype,
            device=device,
            quantization=quantization,
            native_kernels=native_kernels,
        ),
        kv_dtype=kv_dtype,
        quantization=quantization,
        activation_bits=choose_activation_bits(engine.model.activation_bits, quantization, kv_dtype, traits),
        attention_backend=choose_attention_backend(engine.worker.attention_backend, site),
        batch_invariant=choose_batch_invariance(engine, site, quantization),
        has_step_by_device=not engine.scheduler.max_num_batched_tokens,
    )
    return _with_speculation(_with_placement(config))


def _check_support(engine: EngineConfig, architecture: ModelArchitecture, rank: RankFacts) -> None:
    _check_stages(engine, architecture, rank)
    _check_encoder(architecture, rank)
    _check_experts(engine, architecture)
    _check_length(engine, architecture)


def _check_stages(engine: EngineConfig, architecture: ModelArchitecture, rank: RankFacts) -> None:
    num_reading = sum(layer.kv_from >= 0 for layer in architecture.layers)
    for what, is_there in (
        ("inputs of each layer by token", architecture.ends.layer_inputs is not None),
        (f"{num_reading} layers that read keys and values of others", num_reading > 0),
    ):
        if is_there and rank.num_stages > 1:
            raise FeatureDisabled(
                f"parallel.pipeline_parallel_size = {rank.num_stages}",
                f"{architecture.name} has {what}, which are not sent from stage to stage; set it to 1",
            )
    if rank.num_stages > 1 and rank.device.startswith("cuda") and not engine.worker.enforce_eager:
        raise FeatureDisabled(
            f"parallel.pipeline_parallel_size = {rank.num_stages}",
            "stages are not recorded as CUDA graphs yet; set worker.enforce_eager to true",
        )


def _check_encoder(architecture: ModelArchitecture, rank: RankFacts) -> None:
    if architecture.encoder is None:
        return
    for option, size in (
        ("tensor_parallel_size", rank.tensor_parallel_size),
        ("pipeline_parallel_size", rank.num_stages),
    ):
        if size > 1:
            raise FeatureDisabled(
                f"parallel.{option} = {size}",
                f"{architecture.name} is an encoder, which one rank computes; set it to 1",
            )


def _check_experts(engine: EngineConfig, architecture: ModelArchitecture) -> None:
    if engine.parallel.expert_parallel and not architecture.num_experts:
        raise FeatureDisabled(
            "parallel.expert_parallel = true",
            f"{architecture.name} has no mixture of experts that ranks can share; set it to false",
        )


def _with_placement(config: ResolvedConfig) -> ResolvedConfig:
    """Return the same with experts placed by `parallel.expert_counts`, if that is set.

    Raises:
        ConfigError: Ranks hold no whole experts, or the file does not fit the model.
    """
    parallel = config.engine.parallel
    if not parallel.expert_counts:
        return config
    if not parallel.expert_parallel:
        raise ConfigError(
            f"parallel.expert_counts: {parallel.expert_counts}, but parallel.expert_parallel is false, so that ranks "
            "have a part of each expert; set that to true, or leave this empty"
        )
    num_ranks = parallel.tensor_parallel_size
    placement = read_placement(parallel.expert_counts, config.architecture, num_ranks=num_ranks)
    return replace(config, expert_placement=placement)


def _check_kv_dtype(architecture: ModelArchitecture, kv_dtype: str) -> None:
    if kv_dtype not in ("int8", "float8_e4m3fn"):
        return
    sizes = {(layer.num_kv_heads, layer.head_dim) for layer in architecture.layers if layer.keeps_keys}
    if architecture.latent is None and not architecture.config and len(sizes) > 1:
        listed = " and ".join(f"{number} x {dim}" for number, dim in sorted(sizes))
        raise FeatureDisabled(
            f"cache.dtype = {kv_dtype}",
            f"{architecture.name} has layers with key heads of {listed} elements, of which blocks of one size do not "
            "have equally many scales; set it to auto",
        )
    if architecture.latent is not None:
        raise FeatureDisabled(
            f"cache.dtype = {kv_dtype}",
            f"{architecture.name} keeps one vector per token, which is key and value, in 16 bits or more; set it to "
            "auto",
        )


def _check_length(engine: EngineConfig, architecture: ModelArchitecture) -> None:
    own_limit, asked = architecture.max_context, engine.model.max_model_len
    if asked > own_limit and own_limit < architecture.max_position_embeddings:
        raise FeatureDisabled(
            f"model.max_model_len = {asked}",
            f"{architecture.name} attends to {own_limit} keys of a longer context, and chooses them on CPUs only; "
            f"set it to at most {own_limit}, or to 0 for that",
        )
    if asked > own_limit:
        raise ConfigError(
            f"model.max_model_len: {asked} is above the model's own limit {own_limit}; set it to "
            f"at most {own_limit}, or to 0 for the model's limit"
        )


def find_rank(engine: EngineConfig, device: str) -> RankFacts:
    """Return this process's place among the ranks: neighbouring ranks share layers.

    Raises:
        ConfigError: There is no such rank.
    """
    parallel, rank = engine.parallel, engine.worker.rank
    num_sharing, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if rank >= num_sharing * num_stages:
        raise ConfigError(
            f"worker.rank: {rank}, but parallel.tensor_parallel_size = {num_sharing} x "
            f"parallel.pipeline_parallel_size = {num_stages} ranks are numbered from 0"
        )
    return RankFacts(
        tensor_parallel_rank=rank % num_sharing,
        tensor_parallel_size=num_sharing,
        device=device,
        stage=rank // num_sharing,
        num_stages=num_stages,
    )


def _requested_quantization(engine: EngineConfig, architecture: ModelArchitecture) -> str:
    """Return `model.quantization`, in place of none dequantized for the embedded model.

    That is small, so that the bytes of its weights matter less than a prefill in bfloat16: docs/adr/0101.
    """
    requested = engine.model.quantization
    is_embedded = architecture.is_gguf and engine.model.model == _EMBEDDED
    return "dequantized" if requested == "none" and is_embedded else requested


def choose_quantization(
    requested: str,
    architecture: ModelArchitecture,
    dtype: str,
    traits: DeviceTraits,
    *,
    parallel: ParallelConfig = _ONE_RANK,
) -> str:
    """Return the form of linear weights that `model.quantization` means: none, q4, q8, int8, fp8 or stored.

    `none` is stored where kernels for CPUs read what a file holds, since nothing is quantized here then. `auto` is q4
    if the native kernels for CPUs compute it, else none: which form is the fastest on CUDA devices has not been
    measured yet.

    Args:
        dtype: Precision of activations.
        parallel: How ranks share the inputs of some layers.

    Raises:
        FeatureDisabled: No kernel multiplies this form there.
    """
    stored = architecture.quantization
    if stored is not None:
        _check_not_twice(requested, stored)
        return "none" if requested == "dequantized" else _keep_stored(traits, dtype)
    if requested in ("none", "dequantized"):
        return _keep_stored(traits, dtype) if requested == "none" and architecture.is_gguf else "none"
    wanted = "q4" if requested == "auto" else requested
    obstacle = (
        _obstacle_on_cpu(wanted, dtype, native_kernels=traits.native_kernels)
        if traits.device == "cpu"
        else _obstacle_on_cuda(wanted, traits.device, native_float8=traits.native_float8)
    ) or _indivisible_inputs(architecture, parallel)
    if requested == "auto":
        return "q4" if traits.device == "cpu" and obstacle is None else "none"
    if obstacle is None:
        return requested
    raise FeatureDisabled(f"model.quantization = {requested}", f"{obstacle}; set it to none or auto")


def _check_not_twice(requested: str, stored: StoredQuantization) -> None:
    """Refuse to quantize what another tool has quantized."""
    if requested not in ("none", "auto", "dequantized"):
        raise FeatureDisabled(
            f"model.quantization = {requested}",
            f"the weights are quantized already: {stored.source} says {stored.method}, and to quantize them again "
            "would add its errors; set it to none, which keeps them, or to dequantized",
        )


def _keep_stored(traits: DeviceTraits, dtype: str) -> str:
    """Return the form of linear weights that a file holds as codes: stored where kernels read it, else none."""
    if traits.device != "cpu":
        return "none"
    return "none" if _obstacle_on_cpu("stored", dtype, native_kernels=traits.native_kernels) else "stored"


def choose_activation_bits(requested: str, quantization: str, kv_dtype: str, traits: DeviceTraits) -> int:
    """Return the bits that `model.activation_bits` means.

    `auto` keeps 16 beside a cache of 8 bits: together the two are coarser than a model in bfloat16 (adr/0022).

    Args:
        quantization: Form of linear weights, resolved.
        kv_dtype: Precision of keys and values, resolved.

    Raises:
        FeatureDisabled: No product rounds its inputs so.
    """
    is_rounded = traits.device == "cpu" and quantization in ("q4", "q8", "int8", "stored")
    if requested == "auto":
        is_chosen = quantization == "int8" or (quantization in traits.byte_input_forms and kv_dtype != "int8")
        return 8 if is_rounded and is_chosen else 16
    if not is_rounded:
        raise FeatureDisabled(
            f"model.activation_bits = {requested}",
            "inputs are rounded to integers on CPUs with quantized weights only, and this is "
            f"{traits.device} with {quantization}; set it to auto",
        )
    if quantization == "int8" and requested != "8":
        raise FeatureDisabled(
            f"model.activation_bits = {requested}",
            "model.quantization = int8 has inputs of 8 bits; set it to auto, or model.quantization to q8",
        )
    return int(requested)


def choose_batch_invariance(engine: EngineConfig, site: AttentionSite, quantization: str) -> bool:
    """Return whether a request's numbers must not depend on its batch, which `model.batch_invariant` decides.

    Args:
        site: The model and the device.
        quantization: Form of linear weights, resolved.

    Raises:
        FeatureDisabled: They must not, and another option makes them depend on it.
    """
    requested = engine.model.batch_invariant
    obstacle = _batch_dependence(engine.worker.attention_backend, site, quantization)
    if requested == "auto":
        is_slow = site.device.startswith("cuda") and quantization in _WEIGHT_ONLY
        return engine.model.quantization != "auto" and obstacle is None and not is_slow
    if requested == "true" and obstacle is not None:
        raise FeatureDisabled(
            "model.batch_invariant = true", f"{obstacle}, or model.batch_invariant to auto or false"
        )
    return requested == "true"


def _with_speculation(config: ResolvedConfig) -> ResolvedConfig:
    """Return the same with `speculative.enabled` resolved.

    Raises:
        FeatureDisabled: It is true, or a model or a layer was asked to guess, and this worker cannot guess.
    """
    speculative = config.engine.speculative
    obstacle = _no_guesses(config)
    if speculative.enabled != "false" and (why := obstacle or _no_loaded_guesses(config)):
        if speculative.model:
            raise FeatureDisabled(f"speculative.model = {speculative.model}", f"{why}; leave it empty")
        if speculative.wants_mtp:
            raise FeatureDisabled(f"speculative.proposers = {speculative.proposers}", f"{why}; leave mtp out")
    if speculative.enabled == "true" and obstacle:
        raise FeatureDisabled("speculative.enabled = true", f"{obstacle}; set it to auto or false")
    if speculative.enabled != "auto":
        return config
    if not obstacle and config.rank.device != "cpu":
        obstacle = f"what guesses bring was not measured on {config.rank.device}; true lets it guess"
    if not (obstacle or config.batch_invariant or speculative.model or speculative.wants_mtp):
        obstacle = "near ties may fall otherwise, since model.batch_invariant is false"
    speculative = replace(speculative, enabled="false" if obstacle else "true")
    return replace(config, engine=replace(config.engine, speculative=speculative), no_guesses=obstacle)


def _no_guesses(config: ResolvedConfig) -> str:
    """Return why a worker cannot guess; empty if it can."""
    rank, architecture = config.rank, config.architecture
    is_cuda = rank.device.startswith("cuda")
    if rank.device != "cpu" and not is_cuda:
        return f"several tokens of a request are not verified on {rank.device}"
    if is_cuda and rank.num_ranks > 1:
        return f"{rank.num_ranks} ranks on {rank.device} do not guess yet"
    if rank.num_stages > 1:
        return f"{rank.num_stages} pipeline stages do not guess yet"
    if architecture.keeps_states:
        if is_cuda or config.attention_backend != "native":
            return (
                f"{architecture.name} keeps recurrent states, which only the native kernels of CPUs take back behind a "
                "wrong guess"
            )
        least = least_state_page(max_steps_in_flight(1), 1 + config.engine.speculative.max_tokens)
        if (interval := config.engine.cache.state_interval) < least:
            return (
                f"{architecture.name} keeps recurrent states every cache.state_interval = {interval} tokens, and "
                f"speculative.max_tokens = {config.engine.speculative.max_tokens} needs {least} or more"
            )
    if architecture.head != "logits":
        return f"{architecture.name} generates nothing"
    return ""


def _no_loaded_guesses(config: ResolvedConfig) -> str:
    """Return why no model and no layer guesses for a worker that can guess otherwise; empty if one can."""
    device = config.rank.device
    return "" if device == "cpu" else f"a model or a layer does not guess on {device} yet"


def _batch_dependence(attention: str, site: AttentionSite, quantization: str) -> str | None:
    """Return what makes sums depend on the rows that share a step, and the remedy; None if they do not."""
    if attention not in BATCH_INVARIANT_CHOICES:
        return f"worker.attention_backend = {attention} cuts its sums by the rows that share a step; set that to auto"
    if site.architecture.name in (TRANSFORMERS_MODEL, TRANSFORMERS_ENCODER):
        return (
            "transformers' modules compute this model, and products of theirs in plain torch cut their sums by the "
            "number of rows; set model.backend to native where a native model serves it"
        )
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
            "without the native kernels products are torch's, which cuts its sums by the number of rows; build "
            "them with `python -m triptych_kernels.cpu.build`, and set model.dtype to "
            f"{' or '.join(NATIVE_DTYPES)}"
        )
    return None


def _obstacle_on_cpu(quantization: str, dtype: str, *, native_kernels: bool) -> str | None:
    if quantization == "fp8":
        return "8-bit floats are multiplied on CUDA devices only; int8 and q8 hold weights in 8 bits here"
    if not native_kernels:
        return (
            "on CPUs quantized weights are multiplied by the native kernels only, which are not in use here"
        )
    if dtype not in NATIVE_DTYPES:
        return f"the kernels take {' and '.join(NATIVE_DTYPES)}, not model.dtype = {dtype}"
    return None


def _obstacle_on_cuda(quantization: str, device: str, *, native_float8: bool) -> str | None:
    if not device.startswith("cuda"):
        return f"weights are quantized on CPUs and CUDA devices only, and this is {device}"
    if quantization == "fp8" and not native_float8:
        return "8-bit floats are multiplied by devices of compute capability 8.9 and above, which this is not"
    return None


def _indivisible_inputs(architecture: ModelArchitecture, parallel: ParallelConfig) -> str | None:
    """Return why quantized groups would be split, by a layer or by the ranks that share its inputs; None if not."""
    latent, first, num_ranks = architecture.latent, architecture.layers[0], parallel.tensor_parallel_size
    layer_inputs = architecture.ends.layer_inputs
    num_expert_shares = 1 if parallel.expert_parallel else num_ranks
    inputs = [
        ("hidden_size", architecture.hidden_size, 1),
        *(("intermediate_size", width, num_ranks) for width in architecture.mlp_widths),
        *(("intermediate_size", width, num_expert_shares) for width in architecture.expert_widths),
        *(("moe_latent_size", size, 1) for size in architecture.expert_latents),
    ]
    if latent is None:
        sizes = sorted({layer.num_heads * layer.head_dim for layer in architecture.layers})
        inputs += [("num_heads * head_dim", size, num_ranks) for size in sizes]
    else:
        inputs.append(("num_heads * value_dim", first.num_heads * first.value_dim, num_ranks))
        inputs.append(("q_rank", latent.q_rank, 1))
    if layer_inputs is not None:
        inputs.append(("hidden_size_per_layer_input", layer_inputs.size, num_ranks))
    for name, size, num_shares in inputs:
        if size % (_GROUP_SIZE * num_shares):
            shares = (" / parallel.tensor_parallel_size", f" / {num_shares}") if num_shares > 1 else ("", "")
            what = f"{name}{shares[0]} = {size}{shares[1]}"
            return f"inputs are quantized in groups of {_GROUP_SIZE}, which do not divide {what}"
    return None
