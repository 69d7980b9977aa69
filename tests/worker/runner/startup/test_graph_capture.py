"""When a runner is told to capture its CUDA graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.worker.context.test_threads import CHECKPOINT
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, LoadConfig, WorkerConfig
from triptych.types.facts import Phase, SleepLevel
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.model_runner import ModelRunner
from triptych_services.worker.runner.startup import create
from triptych_services.worker.runner.startup.create import create_runner


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the actions of a runner before it is ready, in order."""
    events: list[str] = []
    warm_up = create.warm_up

    def capture(runner: ModelRunner, on_progress: Callable[[float], None]) -> None:
        events.append("capture")
        on_progress(0.5)

    def warm(runner: ModelRunner) -> None:
        events.append("warm up")
        warm_up(runner)

    monkeypatch.setattr(ModelRunner, "capture_graphs", capture)
    monkeypatch.setattr(create, "warm_up", warm)
    return events


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("graph_capture", "expected"), [("startup", ["capture", "warm up"]), ("lazy", ["warm up"])]
)
def test_graphs_are_captured_at_start_and_at_each_wake(
    tmp_path: Path, events: list[str], graph_capture: str, expected: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CHECKPOINT))
    engine = EngineConfig(
        load=LoadConfig(format="random"),
        cache=CacheConfig(num_blocks=40),
        worker=WorkerConfig(device="cpu", num_threads=1, graph_capture=graph_capture),
    )
    phases: list[tuple[str, float]] = []
    config = resolve_config(engine, read_architecture(tmp_path))
    runner = create_runner(config, tmp_path, boot_id="b", on_phase=lambda *phase: phases.append(phase))
    assert events == expected
    assert ((Phase.WARMING, 0.5) in phases) == (graph_capture == "startup")
    runner.sleep(SleepLevel.WEIGHTS_ON_HOST)
    runner.wake()
    assert events == 2 * expected
