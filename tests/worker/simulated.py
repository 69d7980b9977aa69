"""Builders for tests of the simulated worker: facts, a clock that sleeps at once, a model's small files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from triptych.checkpoint.pooling import PoolingSpec
from triptych.config.step_times import StepTimeModel
from triptych.types.facts import KvLayout, ModelFacts, WorkerFacts
from triptych.types.identity import ModelIdentity
from triptych.types.pooling import PoolingKind
from triptych_services.worker.sampling.grammars import GrammarCompiler
from triptych_services.worker.simulation.device import SimulatedDevice
from triptych_services.worker.simulation.runner import SimulatedRunner
from triptych_services.worker.simulation.stages import SimulatedStages

VOCAB_SIZE = 300
EOS = 2
WORD_IDS = np.arange(10, 260)
AT_ONCE = StepTimeModel(base_ms=0, prefill_token_us=0, decode_row_us=0, context_token_ns=0)


class SleepingClock:
    """Time in ns; passes while somebody sleeps, and by `add`."""

    def __init__(self, late_ns: Sequence[int] = ()) -> None:
        """`late_ns`: how much too long the first sleeps last."""
        self.now_ns = 1_000_000
        self.slept_ns: list[int] = []
        self._late_ns = list(late_ns)

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.slept_ns.append(round(seconds * 1e9))
        self.now_ns += self.slept_ns[-1] + (self._late_ns.pop(0) if self._late_ns else 0)


def simulated_device(
    step_time: StepTimeModel = AT_ONCE, clock: SleepingClock | None = None
) -> SimulatedDevice:
    clock = clock or SleepingClock()
    return SimulatedDevice(step_time, clock=clock, sleep=clock.sleep)


def simulated_runner(
    *,
    num_blocks: int = 200,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_model_len: int = 128,
    budget: int = 2048,
    eos_probability: float = 0.0,
    word_ids: np.ndarray = WORD_IDS,
    device: SimulatedDevice | None = None,
    tokens_per_step: int = 1,
    has_blocks: bool = False,
    stages: SimulatedStages | None = None,
    num_stages: int = 1,
    numerics: str = "simulated",
    weights: str = "simulated",
    closing_ids: np.ndarray | None = None,
    compiler: GrammarCompiler | None = None,
    vocab_size: int = VOCAB_SIZE,
    eos: int = EOS,
    makes_vectors: bool = False,
    max_adapters: int = 0,
    kv: KvLayout | None = None,
) -> SimulatedRunner:
    """`num_stages`: what the facts say."""
    facts = WorkerFacts(
        boot_id="boot",
        model=ModelFacts(
            name="m",
            identity=ModelIdentity(
                "simulated-f", weights=weights, numerics=numerics, is_batch_invariant=True
            ),
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=(eos,),
            dtype="bfloat16",
            kv_dtype="bfloat16",
            quantization="none",
            tasks=("generate", "embed", "token_embed") if makes_vectors else ("generate",),
            embedding_size=8 if makes_vectors else 0,
        ),
        kv=kv or KvLayout(num_blocks, block_size, 1, 1, 8, "bfloat16"),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_steps_in_flight=4,
        max_samples_per_row=tokens_per_step,
        num_stages=num_stages,
        max_adapters=max_adapters,
    )
    return SimulatedRunner(
        facts=facts,
        device=device or simulated_device(),
        word_ids=word_ids,
        closing_ids=closing_ids,
        compiler=compiler,
        eos_probability=eos_probability,
        stages=stages,
        has_blocks=has_blocks,
        max_adapter_bytes=1 << 20,
        pooling=PoolingSpec(PoolingKind.LAST) if makes_vectors else None,
    )


def write_model(directory: Path, vocab: object, *, added: Sequence[int] = (), **config: object) -> Path:
    """The files that a simulated worker reads: 2 layers, 1 KV head of 8, 64 tokens of context."""
    architecture = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
        **config,
    }
    (directory / "config.json").write_text(json.dumps(architecture))
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"id": token_id} for token_id in added]}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory
