"""Loading of adapters beside the steps: its deadline, its queue, and who serves none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.adapter_stack import AdapterRunner, make_adapter, until
from tests.helpers.stack import DEADLINE_S, NaiveRunner, make_config
from triptych.config import EngineConfig
from triptych.config.adapters import read_adapters
from triptych.errors import ConfigError, EngineUnavailable, FeatureDisabled, InvalidRequest, QueueFull
from triptych.hub import resolve
from triptych.types.adapters import AdapterFacts
from triptych_services.worker.service.adapters import MAX_WAITING, AdapterControl, RankAdapters


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    make_adapter(tmp_path, "sql")
    config = make_config()
    return replace(config, model=replace(config.model, adapter_root=str(tmp_path)))


class HeldRunner(AdapterRunner):
    """Loads nothing until it may."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.may_load = threading.Event()
        load = self.adapters.load

        def load_held(name: str, source: str, directory: Path) -> AdapterFacts:
            assert self.may_load.wait(DEADLINE_S)
            return load(name, source, directory)

        self.adapters.load = load_held  # type: ignore[method-assign]


def control_of(config: EngineConfig, runner: NaiveRunner | None, **options: float) -> AdapterControl:
    """Adapters of one rank without a thread, which only an unload needs."""
    adapters = RankAdapters(config, lambda: runner, thread=None)  # type: ignore[arg-type]
    return AdapterControl(adapters, **options)


@pytest.fixture
def runner(config: EngineConfig) -> Iterator[HeldRunner]:
    runner = HeldRunner(config)
    yield runner
    runner.may_load.set()


async def test_load_that_takes_too_long_is_given_up_and_goes_on(
    config: EngineConfig, runner: HeldRunner
) -> None:
    control = control_of(config, runner, timeout_s=0.05)
    with pytest.raises(EngineUnavailable, match=r"takes longer than 0\.05 s"):
        await control.load("sql", "sql")
    runner.may_load.set()
    await until(control.list)
    assert [facts.name for facts in control.list()] == ["sql"]


async def test_loads_wait_for_their_turn_up_to_a_bound(config: EngineConfig, runner: HeldRunner) -> None:
    control = control_of(config, runner)
    loads = [asyncio.create_task(control.load("sql", "sql")) for _ in range(MAX_WAITING + 1)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match=f"{MAX_WAITING} loads of adapters wait"):
        await control.load("sql", "sql")
    runner.may_load.set()
    assert len(set(await asyncio.gather(*loads))) == 1
    assert (await control.load("sql", "sql")).name == "sql"


async def test_hub_ids_are_for_what_the_config_lists(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def fetch(hub_id: str, *, revision: str, progress: bool, option: str) -> Path:
        asked.append((hub_id, revision))
        return tmp_path / "sql"

    monkeypatch.setattr(resolve, "fetch_snapshot", fetch)
    config = replace(config, model=replace(config.model, adapters="law=some-org/law@v2"))
    control = control_of(config, AdapterRunner(config))
    facts = await control.load("law", "some-org/law@v2")
    assert (facts.name, facts.source) == ("law", "some-org/law@v2")
    with pytest.raises(InvalidRequest, match="'some-org/law@v2' is no directory"):
        await control.load("other", "some-org/law@v2")
    assert asked == [("some-org/law", "v2")]


async def test_worker_that_serves_no_adapters_says_so(config: EngineConfig) -> None:
    with pytest.raises(EngineUnavailable, match="on its way to readiness"):
        await control_of(config, None).load("sql", "sql")
    control = control_of(config, NaiveRunner(config))
    with pytest.raises(FeatureDisabled, match=r"worker\.max_adapters is 0"):
        await control.load("sql", "sql")
    assert control.list() == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sql", "'sql' is not of the form NAME=PATH"),
        ("sql=", "'sql=' is not of the form NAME=PATH"),
        ("a/b=/c", "'a/b' is a path"),
        ("a=/b,a=/c", "'a' is there twice"),
    ],
)
def test_list_of_adapters_that_is_not_understood_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.adapters: .*{words}"):
        read_adapters(text)


def test_list_of_adapters_is_read() -> None:
    assert read_adapters(" a=/x , b=/y=z,") == {"a": "/x", "b": "/y=z"}
