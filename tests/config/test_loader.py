"""The config loader: four sources in one order, each checked alike, every error naming key, value and source."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.config import EngineConfig
from triptych.config.loader import (
    Option,
    add_config_flags,
    config_from_arguments,
    iter_options,
    load_config,
    parse_service_arguments,
    to_flags,
)
from triptych.errors import ConfigError

OPTIONS = list(iter_options())


def load(
    yaml: str = "", env: dict[str, str] | None = None, flags: dict[str, str] | None = None, *, tmp: Path
):
    file = tmp / "triptych.yaml"
    file.write_text(yaml)
    return load_config(file=file, env=env or {}, flags=flags)


def valid_values(option: Option) -> st.SearchStrategy:
    """Every value that the option's declaration allows."""
    limits = option.limits
    if limits.choices:
        return st.sampled_from(limits.choices)
    if option.type is bool:
        return st.booleans()
    if option.type is str:
        return st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
    low = limits.ge if limits.ge is not None else limits.gt
    if option.type is int:
        assert limits.gt is None
        return st.integers(
            min_value=None if low is None else int(low),
            max_value=None if limits.le is None else int(limits.le),
        )
    return st.floats(low, limits.le, exclude_min=limits.gt is not None, allow_nan=False, allow_infinity=False)


configs = st.fixed_dictionaries({}, optional={option.key: valid_values(option) for option in OPTIONS}).map(
    lambda values: dataclasses.replace(
        EngineConfig(),
        **{
            leaf.name: dataclasses.replace(
                getattr(EngineConfig(), leaf.name),
                **{key.split(".")[1]: v for key, v in values.items() if key.split(".")[0] == leaf.name},
            )
            for leaf in dataclasses.fields(EngineConfig)
        },
    )
)


# Precedence


def test_no_source_gives_the_defaults():
    assert load_config(env={}) == EngineConfig()


def test_each_source_overrides_the_one_before(tmp_path):
    yaml = "scheduler: {max_num_seqs: 2, steps_in_flight: 3, max_num_waiting: 4}"
    env = {"TRIPTYCH_SCHEDULER_STEPS_IN_FLIGHT": "4", "TRIPTYCH_SCHEDULER_MAX_NUM_WAITING": "5"}
    scheduler = load(yaml, env, {"scheduler.max_num_waiting": "6"}, tmp=tmp_path).scheduler
    assert scheduler.max_num_batched_tokens == EngineConfig().scheduler.max_num_batched_tokens
    assert (scheduler.max_num_seqs, scheduler.steps_in_flight, scheduler.max_num_waiting) == (2, 4, 6)


def test_the_file_may_be_named_by_the_environment(tmp_path):
    file = tmp_path / "site.yaml"
    file.write_text("model: {served_name: from-file}")
    assert load_config(env={"TRIPTYCH_CONFIG": str(file)}).model.served_name == "from-file"


def test_a_file_given_outright_wins_over_the_one_in_the_environment(tmp_path):
    config = load("log: {level: debug}", {"TRIPTYCH_CONFIG": "/nonexistent"}, tmp=tmp_path)
    assert config.log.level == "debug"


@pytest.mark.parametrize("yaml", ["", "# nothing\n", "scheduler:\n", "scheduler: {}\n"])
def test_empty_files_and_sections_mean_the_defaults(yaml, tmp_path):
    assert load(yaml, tmp=tmp_path) == EngineConfig()


def test_variables_that_name_no_section_are_not_ours(tmp_path):
    assert load(env={"TRIPTYCH_HOME": "/x", "TRIPTYCHON": "y", "PATH": "z"}, tmp=tmp_path) == EngineConfig()


# Types


@pytest.mark.parametrize("word", ["true", "True", "1", "yes", "on"])
def test_words_for_true(word, tmp_path):
    env = {"TRIPTYCH_CACHE_ENABLE_PREFIX_CACHING": word}
    assert (
        load("cache: {enable_prefix_caching: false}", env, tmp=tmp_path).cache.enable_prefix_caching is True
    )


@pytest.mark.parametrize("word", ["false", "FALSE", "0", "no", "off"])
def test_words_for_false(word, tmp_path):
    config = load(env={"TRIPTYCH_CACHE_ENABLE_PREFIX_CACHING": word}, tmp=tmp_path)
    assert config.cache.enable_prefix_caching is False


@pytest.mark.parametrize(
    ("yaml", "key", "kind"),
    [
        ("scheduler: {max_num_seqs: many}", "scheduler.max_num_seqs", "int"),
        ("scheduler: {max_num_seqs: 2.0}", "scheduler.max_num_seqs", "int"),
        ("scheduler: {max_num_seqs: true}", "scheduler.max_num_seqs", "int"),
        ("scheduler: {max_num_seqs: }", "scheduler.max_num_seqs", "int"),
        ("scheduler: {max_num_seqs: [4]}", "scheduler.max_num_seqs", "int"),
        ("cache: {memory_fraction: half}", "cache.memory_fraction", "float"),
        ("cache: {memory_fraction: .nan}", "cache.memory_fraction", "float"),
        ("frontend: {drain_s: .inf}", "frontend.drain_s", "float"),
        ("cache: {enable_prefix_caching: 2}", "cache.enable_prefix_caching", "bool"),
        ("cache: {enable_prefix_caching: maybe}", "cache.enable_prefix_caching", "bool"),
        ("model: {model: {path: x}}", "model.model", "str"),
    ],
)
def test_a_value_of_the_wrong_type_names_key_type_and_file(yaml, key, kind, tmp_path):
    with pytest.raises(ConfigError, match=rf"^{key}: .* is no {kind} \(.*triptych\.yaml\)$"):
        load(yaml, tmp=tmp_path)


@pytest.mark.parametrize("word", ["true", "false", "auto", '"true"'])
def test_a_choice_that_yaml_takes_for_a_truth_value_is_a_choice(word, tmp_path):
    config = load(f"model: {{batch_invariant: {word}}}", tmp=tmp_path)
    assert config.model.batch_invariant == word.strip('"')


# Ranges


def out_of_range() -> list[tuple[Option, str]]:
    cases = []
    for option in OPTIONS:
        limits = option.limits
        if limits.choices:
            cases.append((option, "no-such-choice"))
        step = 1 if option.type is int else 0.125
        if limits.ge is not None:
            cases.append((option, str(option.type(limits.ge - step))))
        if limits.gt is not None:
            cases.append((option, str(option.type(limits.gt))))
        if limits.le is not None:
            cases.append((option, str(option.type(limits.le + step))))
    return cases


@pytest.mark.parametrize(
    ("option", "text"), out_of_range(), ids=[f"{option.key}={text}" for option, text in out_of_range()]
)
def test_a_value_outside_its_range_names_key_value_range_and_source(option, text):
    for source, sources in (
        (f"environment {option.env}", {"env": {option.env: text}}),
        (f"flag {option.flag}", {"env": {}, "flags": {option.key: text}}),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(**sources)
        expected = f"{option.key}: {text!r} is out of range, allowed is {option.limits.describe()} ({source})"
        assert caught.value.message == expected


def test_every_default_is_within_its_own_range():
    for option in OPTIONS:
        text = str(option.default).lower() if option.type is bool else str(option.default)
        config = load_config(env={}, flags={option.key: text})
        assert getattr(getattr(config, option.leaf), option.name) == option.default


# Unknown names


def test_an_unknown_key_is_named_with_the_closest_one_and_the_file(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load("scheduler: {max_num_seq: 4}", tmp=tmp_path)
    assert caught.value.message == (
        f"scheduler.max_num_seq: no such option ({tmp_path}/triptych.yaml); did you mean scheduler.max_num_seqs?"
    )


def test_an_unknown_section_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^schedule\.steps_in_flight: no such option .*scheduler\.steps_in_flight"
    ):
        load("schedule: {steps_in_flight: 2}", tmp=tmp_path)


def test_an_unknown_variable_of_a_known_section_is_named():
    with pytest.raises(ConfigError) as caught:
        load_config(env={"TRIPTYCH_WORKER_DEVISE": "cpu"})
    assert caught.value.message == (
        "TRIPTYCH_WORKER_DEVISE: no such option (environment); did you mean TRIPTYCH_WORKER_DEVICE?"
    )


def test_a_name_like_no_other_points_to_help(tmp_path):
    with pytest.raises(ConfigError, match="see --help for all of them"):
        load("zzz: {qqq: 1}", tmp=tmp_path)


def test_kubernetes_service_links_are_recognized():
    with pytest.raises(ConfigError) as caught:
        load_config(env={"TRIPTYCH_FRONTEND_PORT": "tcp://10.0.0.7:50051"})
    assert "enableServiceLinks: false" in caught.value.message
    assert "environment TRIPTYCH_FRONTEND_PORT" in caught.value.message


# Files


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: No such file"):
        load_config(file=tmp_path / "gone.yaml", env={})


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("scheduler: {", "is not yaml"),
        ("- scheduler", "expected a mapping of sections, found list"),
        ("just text", "expected a mapping of sections, found str"),
        ("scheduler: 4", "scheduler: expected a mapping of options, found 4"),
        ("nonsense: 4", "nonsense: no such option"),
        ("nonsense:", "nonsense: no such option"),
        ("schedule: {}", "schedule: no such option"),
        ("7: 8", "7: no such option"),
    ],
)
def test_a_file_of_another_shape_is_refused(yaml, words, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(yaml, tmp=tmp_path)
    assert words in caught.value.message
    assert "triptych.yaml" in caught.value.message


def test_an_empty_section_changes_nothing(tmp_path):
    assert load("scheduler:\nlog: {}", tmp=tmp_path) == EngineConfig()


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "triptych.yaml").write_bytes(b"log: {level: \xff\xfe}")
    with pytest.raises(ConfigError, match=r"triptych\.yaml is not yaml: "):
        load_config(file=tmp_path / "triptych.yaml", env={})


# Flags


@given(configs)
def test_flags_of_a_config_build_that_config_again(config):
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    with pytest.MonkeyPatch.context() as patch:
        for option in OPTIONS:
            patch.delenv(option.env, raising=False)
        assert config_from_arguments(parser.parse_args(to_flags(config))) == config


def test_flags_name_only_what_differs_from_the_defaults():
    config = dataclasses.replace(EngineConfig(), log=dataclasses.replace(EngineConfig().log, level="debug"))
    assert to_flags(EngineConfig()) == []
    assert to_flags(config) == ["--log.level=debug"]


def test_help_tells_meaning_range_default_and_variable():
    wide = functools.partial(argparse.HelpFormatter, width=10_000)
    parser = argparse.ArgumentParser(prog="x", formatter_class=wide)
    add_config_flags(parser)
    text = " ".join(parser.format_help().split())
    for option in OPTIONS:
        assert f"{option.flag} " in text
        assert option.limits.help in text
        assert f"Env: {option.env}" in text
    assert "Tokens per KV block. [>= 1 and <= 256] Default: 16." in text


def test_flags_can_be_limited_to_some_sections():
    parser = argparse.ArgumentParser(prog="x", exit_on_error=False)
    add_config_flags(parser, ["log"])
    assert config_from_arguments(parser.parse_args(["--log.level=error"])).log.level == "error"
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parser.parse_args(["--scheduler.steps-in-flight=1"])


def test_a_service_reads_its_command_line(tmp_path):
    arguments = parse_service_arguments(
        "worker",
        "x",
        ["--worker.port=0", f"--ready-file={tmp_path}/ready.json", "--scheduler.steps-in-flight", "1"],
    )
    assert (arguments.config.worker.port, arguments.config.scheduler.steps_in_flight) == (0, 1)
    assert arguments.ready_file == tmp_path / "ready.json"


@pytest.mark.parametrize("argv", [["--worker.port=70000"], ["--no-such-flag=1"]])
def test_a_service_whose_command_line_is_wrong_exits_with_2_and_says_why(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_service_arguments("worker", "x", argv)
    assert caught.value.code == 2
    assert argv[0].split("=")[0].strip("-") in capsys.readouterr().err


# The declaration itself


def test_names_in_the_environment_and_on_the_command_line_are_unique():
    assert len({option.env for option in OPTIONS}) == len({option.flag for option in OPTIONS}) == len(OPTIONS)


@pytest.mark.parametrize("leaf", [leaf.name for leaf in dataclasses.fields(EngineConfig)])
def test_a_config_is_never_written_to(leaf):
    section = getattr(EngineConfig(), leaf)
    name = dataclasses.fields(section)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(section, name, getattr(section, name))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(EngineConfig(), leaf, section)


def test_no_number_is_declared_without_a_lower_bound():
    """A negative count or time has no meaning anywhere."""
    for option in OPTIONS:
        if option.type in (int, float):
            low = option.limits.ge if option.limits.ge is not None else option.limits.gt
            assert low is not None, option.key
