"""Makes a simulated runner from the operator's config; reads a model's small files and never its weights."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from services.worker.context.resolve import resolve_for_device
from services.worker.context.resolved_config import ResolvedConfig
from services.worker.runner.startup.facts import worker_facts
from services.worker.runner.startup.kv_plan import plan_kv_cache
from services.worker.simulation.device import SimulatedDevice, use_precise_sleep
from services.worker.simulation.runner import SimulatedRunner
from services.worker.simulation.vocabulary import I64, hash_word_ids, read_word_ids
from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.config_json import read_architecture
from triptych.config import EngineConfig, SimulationConfig
from triptych.config.step_times import StepTimeModel, read_step_time_profile
from triptych.errors import ConfigError
from triptych.types.facts import Phase

DEVICE = "simulated"

_GIB = 1 << 30


def create_simulated_runner(
    engine: EngineConfig, directory: Path, *, boot_id: str, on_phase: Callable[[str, float], None]
) -> SimulatedRunner:
    """Read config.json and tokenizer.json, and return a runner that is ready for step 1.

    Call it on the thread that will execute the steps.

    Args:
        directory: Directory of the model, from `triptych.hub`; weights may be missing.
        boot_id: UUID drawn at process start.
    Raises:
        ModelError: Files are missing or not understood.
        ConfigError: The profile cannot be used, or not even one KV block fits.
        FeatureDisabled: An option is set that no worker supports yet.
    """
    started = time.perf_counter()
    on_phase(Phase.LOADING, 0.0)
    simulation, architecture = engine.simulation, read_architecture(directory)
    # Like the accelerators that it simulates, and unlike many a CPU, it has native bfloat16.
    config = resolve_for_device(
        engine, architecture, device=DEVICE, native_bfloat16=True, native_kernels=False
    )
    _check_eos(simulation, architecture)
    word_ids = read_word_ids(directory, architecture.vocab_size, architecture.eos_token_ids)
    # The blocks have no memory, so any number that the operator sets is accepted.
    free_bytes = sys.maxsize if engine.cache.num_blocks else int(simulation.free_memory_gib * _GIB)
    facts = worker_facts(
        config,
        plan_kv_cache(config, free_bytes),
        boot_id=boot_id,
        fingerprint=_fingerprint(config, word_ids),
        device_name=DEVICE,
        kernels=DEVICE,
        max_samples_per_row=simulation.tokens_per_step,
        weight_bytes=0,
        load_s=time.perf_counter() - started,
    )
    use_precise_sleep()
    return SimulatedRunner(
        facts=facts,
        device=SimulatedDevice(_step_time(simulation)),
        word_ids=word_ids,
        eos_probability=simulation.eos_probability,
    )


def _step_time(simulation: SimulationConfig) -> StepTimeModel:
    if simulation.profile:
        return read_step_time_profile(Path(simulation.profile))
    return StepTimeModel(
        base_ms=simulation.base_ms,
        prefill_token_us=simulation.prefill_token_us,
        decode_row_us=simulation.decode_row_us,
        context_token_ns=simulation.context_token_ns,
    )


def _check_eos(simulation: SimulationConfig, architecture: ModelArchitecture) -> None:
    if simulation.eos_probability and not architecture.eos_token_ids:
        raise ConfigError(
            f"simulation.eos_probability: {simulation.eos_probability:g}, but the model names no EOS token; set it to 0"
        )


def _fingerprint(config: ResolvedConfig, word_ids: I64) -> str:
    """Return a hash of all that decides the tokens, with a prefix that no real worker's fingerprint has."""
    facts = {
        "architecture": asdict(config.architecture),
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "words": hash_word_ids(word_ids),
        "eos_probability": config.engine.simulation.eos_probability,
    }
    return "simulated-" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
