"""From LLM's arguments to a config."""

from __future__ import annotations

import pytest

from triptych.errors import ConfigError
from triptych.launcher.launch import config_from_overrides, request_model, stack_config


@pytest.fixture(autouse=True)
def _no_options_in_the_environment(monkeypatch):
    monkeypatch.delenv("TRIPTYCH_LOG_LEVEL", raising=False)


def test_options_go_by_bare_name_or_by_key():
    config = config_from_overrides(
        {"max_num_seqs": 16, "scheduler.steps_in_flight": 1, "enable_prefix_caching": False}
    )
    assert (config.scheduler.max_num_seqs, config.scheduler.steps_in_flight) == (16, 1)
    assert config.cache.enable_prefix_caching is False


def test_a_name_of_several_sections_means_the_model_or_is_refused():
    assert config_from_overrides({"dtype": "float32"}).model.dtype == "float32"
    assert config_from_overrides({"cache.dtype": "float32"}).model.dtype == "auto"
    with pytest.raises(ConfigError, match=r"'frontend\.host' or 'engine\.host' or 'worker\.host'"):
        config_from_overrides({"host": "0.0.0.0"})


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"max_num_seq": 16}, "max_num_seq: no such option; did you mean max_num_seqs"),
        ({"gpu_magic": 1}, "gpu_magic: no such option"),
        ({"max_num_seqs": 0}, "scheduler.max_num_seqs: 0 is out of range, allowed is >= 1"),
        ({"max_num_seqs": "many"}, "scheduler.max_num_seqs: 'many' is no int"),
    ],
)
def test_what_is_unknown_or_bad_is_named(overrides, told):
    with pytest.raises(ConfigError, match=told):
        config_from_overrides(overrides)


def test_a_programs_own_stack_takes_free_ports_and_is_quiet(monkeypatch):
    config = config_from_overrides({})
    ports = [config.frontend.port, config.frontend.admin_port, config.frontend.http_port]
    ports += [config.frontend.metrics_port]
    ports += [config.engine.port, config.engine.metrics_port, config.worker.port, config.worker.metrics_port]
    assert set(ports) == {0}
    assert config.log.level == "warning"
    assert config_from_overrides({"level": "info"}).log.level == "info"
    monkeypatch.setenv("TRIPTYCH_LOG_LEVEL", "debug")
    assert config_from_overrides({}).log.level == "debug"


def test_preferences_yield_to_whatever_was_said(monkeypatch):
    preferred = {"model.dtype": "float32"}
    assert config_from_overrides({}, preferred=preferred).model.dtype == "float32"
    assert config_from_overrides({"dtype": "auto"}, preferred=preferred).model.dtype == "auto"
    monkeypatch.setenv("TRIPTYCH_MODEL_DTYPE", "bfloat16")
    assert config_from_overrides({}, preferred=preferred).model.dtype == "bfloat16"


def test_the_model_is_what_to_serve_or_whom_to_ask():
    assert stack_config("here/it/is", None, {}).model.model == "here/it/is"
    assert stack_config(None, None, {}).model.model == "embedded"
    assert not stack_config(None, None, {}).frontend.serve_http
    assert stack_config(None, None, {"serve_http": True}).frontend.serve_http
    assert stack_config("name", "host:1", {}) is None
    assert (request_model("name", "host:1"), request_model("name", None), request_model(None, "host:1")) == (
        "name", "", "",
    )  # fmt: skip
