"""Runners of several ranks, each a process of its own: `python -m tests.worker.ranks JOB` forks them and waits.

They are forked from one process that has imported torch and started no thread: importing takes longer than computing.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.helpers.in_process import InProcessEngine
from tests.worker.runner.drafting.guessing import guess_at_all_costs
from tests.worker.sampling_kinds import KINDS
from tests.worker.tiny import new_row, step_plan
from triptych.checkpoint.config_json import read_architecture
from triptych.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from triptych.errors import RankUnavailable
from triptych.types.facts import SleepLevel
from triptych.types.pooling import PoolingKind, PoolingParams, Task
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, StepPlan
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.expert_placement import describe_counts
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.runner.base import PendingStep
from triptych_services.worker.runner.drafting.base import Guesses
from triptych_services.worker.runner.drafting.ranks import SharedGuesses
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.create import create_runner
from triptych_services.worker.sampling.params import TokenHistory

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0  # of a whole job; it takes 5 s
TIMEOUT_S = 20.0  # of ranks for each other
MOST_GUESSES = 4
LOGPROBS = SamplingParams(temperature=0.0, logprobs=8)


@dataclass(frozen=True, slots=True)
class Case:
    """One model, computed by so many ranks."""

    directory: Path
    num_ranks: int
    num_stages: int = 1
    """Stages among which the ranks are divided."""
    port: int = 0
    """Port of the rendezvous; unused by one rank."""
    expert_parallel: bool = False
    expert_counts: str = ""
    """File of them, see `uneven_counts`."""
    quantization: str = "none"
    device: str = "cpu"
    dtype: str = "float32"
    enforce_eager: bool = False
    loses_a_rank: bool = False
    """In the end the last rank leaves, and the others go on."""
    adapters: tuple[Path, ...] = ()
    """Adapters of `adapted_prompts`."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """If there are any, each rank gives greedy tokens after these, by an engine of its own, and no `Answer`."""
    num_new: int = 0
    """Tokens after each of `prompts`."""
    num_blocks: int = 200
    """Blocks of the cache while `prompts` are computed."""
    preempts: bool = False
    """Whether these blocks are too few for all prompts at once."""
    guesses: bool = False
    """Whether rows with `prompts` have guesses at all costs. The engine of rank 0 plans for all ranks then, and each
    gives a `Together`."""
    knows_answers: bool = False
    """Whether these are guesses of what was said before, of which some are wrong."""
    proposers: str = "ngram"
    guessing: Path | None = None
    """A draft model or a head, which only rank 0 is told of."""
    sleeps: bool = False
    """Whether all ranks drop their weights before the requests with guesses, and wake."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The results of one rank."""

    token_ids: list[list[int]]
    """Tokens of each step."""
    logprobs: list[np.ndarray]
    """Log-probabilities of the steps that asked for them."""
    vectors: list[np.ndarray]
    """Vectors of pooled rows, by slot."""
    kernels: str
    fingerprint: str
    num_blocks: int
    num_kv_heads: int
    num_layers: int
    weight_bytes: int
    adapted: list[list[int]]
    """Greedy tokens after each of `adapted_prompts`."""
    after_the_loss: tuple[str, ...] = ()
    """Errors of the next two steps after a rank had left."""


@dataclass(frozen=True, slots=True)
class Together:
    """The answer of one rank to the plans of rank 0."""

    tokens: list[list[int]]
    """Tokens after each prompt; none at other ranks than 0."""
    logprobs: list[list[np.ndarray]]
    """By prompt, of its tokens and the likeliest ones; none at other ranks than 0."""
    steps: list[list[int]]
    """Tokens of each step."""
    guesses: dict[str, tuple[int, int]]
    """By proposer: the guesses that were verified, and those that were right."""


def save_checkpoint(directory: Path, config: dict[str, Any]) -> Path:
    """A model of these sizes whose logits differ, as safetensors."""
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(11)
    shapes = {name: t.shape for name, t in RandomCheckpoint(read_architecture(directory), 0).tensors.items()}
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def plans() -> list[StepPlan]:
    """Prompts in chunks beside decodes, all kinds of sampling, and a request that leaves."""
    rng = np.random.default_rng(5)
    kinds = [LOGPROBS, *KINDS.values()]
    prompts = [rng.integers(3, 90, length).tolist() for length in (1, 4, 5, 9, 17, 6, 11)]
    rows = [
        new_row(slot, prompt, range(1 + 8 * slot, 9 + 8 * slot), sampling=sampling, seed=slot)
        for slot, (prompt, sampling) in enumerate(zip(prompts, kinds, strict=True))
    ]
    first = step_plan(1, new=rows[:4], chunks={0: 1, 1: 4, 2: 5, 3: 5})
    second = step_plan(2, new=rows[4:], chunks={3: 4, 4: 17, 5: 6, 6: 11})
    return [
        first,
        second,
        *(step_plan(step_id, removed=[2] if step_id == 7 else []) for step_id in range(3, 11)),
    ]


def pooling_plan() -> StepPlan:
    """A session's first step, with rows that are pooled beside one that is not."""
    ways = [None, *(PoolingParams(kind=kind) for kind in PoolingKind), PoolingParams(Task.TOKEN_EMBED)]
    rows = [
        new_row(slot, range(5 + slot, 14 + slot), range(1 + 3 * slot, 4 + 3 * slot))
        for slot in range(len(ways))
    ]
    rows = [
        replace(row, content=replace(row.content, pooling=way)) for row, way in zip(rows, ways, strict=True)
    ]
    return step_plan(1, new=rows, chunks={row.slot: 9 for row in rows})


def adapted_prompts(num_adapters: int) -> list[list[int]]:
    """Ragged prompts, one for each adapter and the last for none."""
    rng = np.random.default_rng(6)
    return [rng.integers(3, 90, 3 + 4 * number).tolist() for number in range(num_adapters + 1)]


def say_adapted(runner: SleepableRunner, adapters: Sequence[Path], num_new: int = 12) -> list[list[int]]:
    """Let all prompts share each step."""
    digests = [runner.adapters.load(path.name, "", path).digest for path in adapters]
    prompts = adapted_prompts(len(adapters))
    rows = [
        new_row(slot, prompt, range(1 + 8 * slot, 9 + 8 * slot), adapter=digest)
        for slot, (prompt, digest) in enumerate(zip(prompts, [*digests, ""], strict=True))
    ]
    runner.reset()
    plan = step_plan(1, new=rows, chunks={slot: len(prompt) for slot, prompt in enumerate(prompts)})
    steps = []
    for step_id in range(2, num_new + 2):
        result = runner.execute(plan)
        assert not result.row_errors
        steps.append(result.token_ids.tolist())
        plan = step_plan(step_id)
    return [list(tokens) for tokens in zip(*steps, strict=True)]


def uneven_counts(directory: Path) -> str:
    """Write a file of counts beside a checkpoint by which ranks hold no neighbours, other ones in each layer."""
    counts = {}
    for index, layer in enumerate(read_architecture(directory).layers):
        if layer.experts is not None:
            own = [2**expert for expert in range(layer.experts.num_experts)]
            counts[index] = own if index % 2 else own[::-1]
    path = directory / "counts.json"
    path.write_bytes(describe_counts("tiny", "", counts))
    return str(path)


def create(case: Case, rank: int, cache: CacheConfig) -> SleepableRunner:
    """Create this rank's runner, of eight requests and 64 tokens a step."""
    engine = EngineConfig(
        model=ModelConfig(model="somewhere/tiny", quantization=case.quantization, dtype=case.dtype),
        cache=cache,
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        worker=WorkerConfig(
            device=case.device,
            rank=rank,
            local_rank=rank,
            num_threads=1,
            enforce_eager=case.enforce_eager,
            max_adapters=len(case.adapters),
        ),
        speculative=SpeculativeConfig(
            enabled="true" if case.guesses else "false",
            max_tokens=MOST_GUESSES,
            proposers=case.proposers,
            model="" if case.guessing is None else "some/model",
            cache_gib=0.01,
        ),
        parallel=ParallelConfig(
            tensor_parallel_size=case.num_ranks // case.num_stages,
            pipeline_parallel_size=case.num_stages,
            expert_parallel=case.expert_parallel,
            expert_counts=case.expert_counts,
            rendezvous_address=f"127.0.0.1:{case.port}",
            timeout_s=TIMEOUT_S / 2
            if case.loses_a_rank
            else TIMEOUT_S,  # what shares memory notices by time only
        ),
    )
    config = resolve_config(engine, read_architecture(case.directory))
    return create_runner(
        config,
        case.directory,
        boot_id="b",
        on_phase=lambda phase, progress: None,
        draft_directory=None if rank else case.guessing,
    )


def generate(case: Case, rank: int) -> list[list[int]]:
    """Return the tokens after a case's prompts, in the model's own groups, and again from what is cached then."""
    runner = create(case, rank, CacheConfig(block_size=4, num_blocks=case.num_blocks, state_interval=8))
    engine = InProcessEngine(runner, max_num_batched_tokens=16)
    sampling = SamplingParams(temperature=0.0, max_tokens=case.num_new, ignore_eos=True)
    tokens = engine.generate(case.prompts, sampling)
    tokens += engine.generate(case.prompts, sampling, first_number=len(case.prompts))
    assert engine.scheduler.counters.prefix_hits > 0
    assert case.preempts == (engine.scheduler.counters.num_preemptions > 0)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # what the last one has sent may still be on its way
        torch.distributed.destroy_process_group()
    return tokens


class _Leading:
    """The runner of rank 0, which has the other ranks do what it does."""

    def __init__(self, runner: SleepableRunner) -> None:
        self._runner = runner
        self.facts = runner.facts
        self.steps: list[list[int]] = []
        self.guesses: dict[str, tuple[int, int]] = {}

    def reset(self) -> None:
        self._tell("reset")
        self._runner.reset()

    def prepare(self, plan: StepPlan) -> None:
        """Do nothing: the ranks compute one step after the other."""

    def launch(self, plan: StepPlan) -> PendingStep:
        self._tell(plan)
        step = self._runner.launch(plan)
        result = step.wait()
        self.steps.append(result.token_ids.tolist())
        for verified in result.guesses:
            counted, right = self.guesses.get(verified.proposer, (0, 0))
            self.guesses[verified.proposer] = (
                counted + int(verified.verified.sum()),
                right + int(verified.accepted.sum()),
            )
        return step

    def guess(self, known: Sequence[list[int]]) -> None:
        """Let rows have guesses at all costs from now on, of these texts if there are any."""
        speculation = self._runner.runner._speculation
        own = speculation._own if isinstance(speculation, SharedGuesses) else speculation
        assert own is not None, "rank 0 guesses"
        guess_at_all_costs(own, MOST_GUESSES)
        if known:
            own._proposers = (_Knowing(own._rows.history, known),)

    def sleep(self) -> None:
        """Drop all weights, and load them again."""
        self._tell("sleep")
        _sleep(self._runner)

    def end(self) -> None:
        self._tell("end")

    def _tell(self, order: object) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list([order])


def _sleep(runner: SleepableRunner) -> None:
    runner.sleep(SleepLevel.WEIGHTS_DROPPED)
    runner.wake()


def _follow(runner: SleepableRunner) -> list[list[int]]:
    """Do what rank 0 does, and return the tokens of each step."""
    steps: list[list[int]] = []
    while True:
        orders: list[Any] = [None]
        torch.distributed.broadcast_object_list(orders)
        if orders[0] == "end":
            return steps
        if orders[0] == "reset":
            runner.reset()
        elif orders[0] == "sleep":
            _sleep(runner)
        else:
            result = runner.execute(orders[0])
            assert not result.guesses, "rank 0 counts them"
            steps.append(result.token_ids.tolist())


class _Knowing:
    """A `Proposer` that knows whole texts, and guesses one token in five wrong."""

    name = "knowing"

    def __init__(self, history: TokenHistory, texts: Sequence[list[int]]) -> None:
        self._history, self._texts = history, texts

    def enter(self, row: NewRow) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass

    def accept(self, slots: np.ndarray, counts: np.ndarray) -> None:
        pass

    def propose(self, slots: np.ndarray, limits: np.ndarray) -> Guesses:
        found = []
        for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True):
            known = self._history.token_ids[slot, : self._history.num_known[slot]].tolist()
            texts = [text for text in self._texts if text[: len(known)] == known]
            right = texts[0][len(known) : len(known) + limit] if texts else []
            found.append([token + (len(known) + place) % 5 // 4 for place, token in enumerate(right)])
        return Guesses.of(found)


def generate_together(case: Case, rank: int) -> Together:
    """Return the tokens after a case's prompts, greedy and drawn: without guesses, and with all that there are."""
    cache = CacheConfig(block_size=4, num_blocks=case.num_blocks, state_interval=28)
    runner = create(case, rank, cache)
    answer = Together([], [], [], {})
    if rank:
        answer = replace(answer, steps=_follow(runner))
    else:
        answer = _lead(case, _Leading(runner))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return answer


def _lead(case: Case, leading: _Leading) -> Together:
    greedy = SamplingParams(temperature=0.0, max_tokens=case.num_new, ignore_eos=True)
    drawn = replace(greedy, temperature=1.0, seed=5, presence_penalty=0.5, logprobs=2)
    tokens: list[list[int]] = []
    logprobs: list[list[np.ndarray]] = []
    for guesses in (False, True):
        engine = InProcessEngine(leading, max_num_batched_tokens=16)  # type: ignore[arg-type]
        for sampling in (greedy, drawn):
            asked = replace(sampling, speculation=guesses)
            first = len(tokens)
            tokens += engine.generate(case.prompts, asked, first_number=first)
            logprobs += [engine.logprobs[number] for number in range(first, len(tokens))]
        assert case.preempts == (engine.scheduler.counters.num_preemptions > 0)
        if not guesses:
            if case.sleeps:
                leading.sleep()
            known = [[*prompt, *said] for prompt, said in zip(2 * case.prompts, tokens, strict=True)]
            leading.guess(known if case.knows_answers else [])
    leading.end()
    return Together(tokens, logprobs, leading.steps, leading.guesses)


def compute(case: Case, rank: int) -> Answer:
    """Create this rank's runner and carry out the plans."""
    cache = CacheConfig(block_size=4, num_blocks=60, groups="one")  # the plans have one table
    runner = create(case, rank, cache)
    runner.reset()
    results = [runner.execute(plan) for plan in plans()]
    runner.reset()
    pooled = runner.execute(pooling_plan())
    adapted = say_adapted(runner, case.adapters) if case.adapters else []
    after_the_loss: list[str] = []
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # what the last one has sent may still be on its way
    if case.loses_a_rank:
        if rank == case.num_ranks - 1:
            torch.distributed.destroy_process_group()
        for _ in range(2 if rank < case.num_ranks - 1 else 0):
            runner.reset()
            try:
                runner.execute(step_plan(1, new=[new_row(0, [5, 6], [1])], chunks={0: 2}))
            except RankUnavailable as error:
                after_the_loss.append(str(error))
    facts = runner.facts
    del runner
    gc.collect()  # NCCL waits for graphs to be gone
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return Answer(
        token_ids=[result.token_ids.tolist() for result in results],
        logprobs=[result.logprobs.logprobs for result in results if result.logprobs is not None],
        vectors=[pooled.vectors[key] for key in sorted(pooled.vectors, key=lambda key: key.slot)],
        kernels=facts.kernels,
        fingerprint=facts.model.identity.fingerprint,
        num_blocks=facts.kv.num_blocks,
        num_kv_heads=facts.kv.num_kv_heads,
        num_layers=facts.kv.num_layers,
        weight_bytes=facts.weight_bytes,
        adapted=adapted,
        after_the_loss=tuple(after_the_loss),
    )


def asked_for(request: pytest.FixtureRequest, cases: Collection[str], *others: str) -> list[str]:
    """Return the cases that tests of this file ask for by `name`, of those that are run, and `others`."""
    items = [
        item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    names = {item.callspec.params.get("name") for item in items} | set(others)
    return [name for name in cases if name in names]


def run_ranks(cases: dict[str, Case], directory: Path) -> dict[str, list[Any]]:
    """Name -> what each of its ranks says, by `compute` or `generate`. No process outlives this call."""
    job = directory / "job.pickle"
    job.write_bytes(pickle.dumps(cases))
    command = [sys.executable, "-m", "tests.worker.ranks", str(job)]
    sources = os.pathsep.join(str(ROOT / source) for source in ("libs", "kernels", "."))
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": sources},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that all of them can be killed
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output
    finally:
        with suppress(ProcessLookupError):  # as it should be
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {
        name: [pickle.loads((directory / f"{name}.{rank}").read_bytes()) for rank in range(case.num_ranks)]
        for name, case in cases.items()
    }


def _run_rank(rank: int, job: Path) -> None:
    cases: dict[str, Case] = pickle.loads(job.read_bytes())
    for name, case in cases.items():
        if rank < case.num_ranks:
            said: object
            if case.guesses:
                said = generate_together(case, rank)
            else:
                said = generate(case, rank) if case.prompts else compute(case, rank)
            (job.parent / f"{name}.{rank}").write_bytes(pickle.dumps(said))


def main(job: Path) -> int:
    """1 as soon as a rank fails; the others are ended then."""
    cases: dict[str, Case] = pickle.loads(job.read_bytes())
    context = multiprocessing.get_context("fork")
    num_ranks = max(case.num_ranks for case in cases.values())
    ranks = [context.Process(target=_run_rank, args=(rank, job), daemon=True) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    running = list(ranks)
    while running:
        wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]
        if any(process.exitcode for process in ranks if process not in running):
            for process in running:
                process.terminate()
            return 1
    return 0


if __name__ == "__main__":
    # what is pickled must not say that it comes from __main__
    from tests.worker import ranks

    sys.exit(ranks.main(Path(sys.argv[1])))
