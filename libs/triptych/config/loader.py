"""Builds the one config object, and compares it with another process's.

Sources, each overriding the one before: defaults, yaml file, environment, flags. All are checked alike.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

from triptych.config.fields import EngineConfig
from triptych.config.option import ENV_PREFIX, WORKER, Option
from triptych.config.orchestrator import place_in_group
from triptych.config.step_size import size_for_device
from triptych.errors import ConfigError, HandshakeMismatch

CONFIG_FILE_ENV = "TRIPTYCH_CONFIG"
_BOOLEANS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True)
class ServiceArguments:
    """The parsed command line of a service."""

    config: EngineConfig
    ready_file: Path | None
    """File that receives the bound ports as JSON."""


def iter_options() -> Iterator[Option]:
    """Yield every option, in the order of declaration."""
    for leaf in fields(EngineConfig):
        leaf_class = _leaf_class(leaf)
        types = typing.get_type_hints(leaf_class)
        for item in fields(leaf_class):
            yield Option(leaf.name, item.name, types[item.name], item.default, item.metadata["limits"])


def load_config(
    *,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    is_worker: bool = False,
) -> EngineConfig:
    """Build the config from its four sources.

    Args:
        file: yaml; None: the file named by $TRIPTYCH_CONFIG, if it is set.
        env: the environment; None: this process's.
        flags: key (`scheduler.max_num_seqs`) to text, as given on the command line.
        is_worker: whether this process is a worker: Kubernetes may set its place among the ranks.

    Raises:
        ConfigError: an unknown key or a bad value; names key, value, allowed range and source.
    """
    env = os.environ if env is None else env
    values = given_values(file=file, env=env, flags=flags)
    if is_worker:
        values |= place_in_group(env, values)
    leaves = {
        leaf.name: _leaf_class(leaf)(
            **{key.split(".")[1]: value for key, value in values.items() if key.split(".")[0] == leaf.name}
        )
        for leaf in fields(EngineConfig)
    }
    return EngineConfig(**leaves)


def given_values(
    *, file: Path | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return key -> value of the options that file, environment or flags set; see `load_config`."""
    env = os.environ if env is None else env
    options = {option.key: option for option in iter_options()}
    if file is None and env.get(CONFIG_FILE_ENV):
        file = Path(env[CONFIG_FILE_ENV])
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_from_file(file, options))
    values.update(_from_env(env, options))
    for key, text in (flags or {}).items():
        option = _find(key, options, f"flag --{key}")
        values[key] = _parse(option, text, f"flag {option.flag}")
    return values


def section_from_env(leaf: str) -> Mapping[str, str]:
    """Return name -> text of the options of one section that the environment sets, for programs without a config."""
    options = [option for option in iter_options() if option.leaf == leaf]
    return {option.name: os.environ[option.env] for option in options if option.env in os.environ}


def add_config_flags(parser: argparse.ArgumentParser, leaves: Sequence[str] | None = None) -> None:
    """Add `--config` and one flag per option of `leaves` (None: all), with derived help."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="yaml file; see config/example.yaml")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in iter_options():
        if leaves is not None and option.leaf not in leaves:
            continue
        group = groups.setdefault(option.leaf, parser.add_argument_group(option.leaf))
        text = option.limits.help + (f" [{option.limits.describe()}]" if option.limits.describe() else "")
        group.add_argument(
            option.flag,
            dest=option.key,
            metavar=option.type.__name__.upper(),
            default=argparse.SUPPRESS,
            help=f"{text} Default: {_show(option.default)}. Env: {option.env}".replace("%", "%%"),
        )


def config_from_arguments(arguments: argparse.Namespace, *, is_worker: bool = False) -> EngineConfig:
    """The config that parsed flags of `add_config_flags` mean; `is_worker` as of `load_config`."""
    flags = {key: text for key, text in vars(arguments).items() if "." in key}
    return load_config(file=arguments.config, flags=flags, is_worker=is_worker)


def parse_service_arguments(service: str, description: str, argv: Sequence[str]) -> ServiceArguments:
    """Read a service's command line; prints what is wrong and exits with 2 if it cannot be used."""
    parser = argparse.ArgumentParser(prog=f"python -m triptych_services.{service}", description=description)
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help="write the bound ports here, as JSON")
    add_config_flags(parser)
    arguments = parser.parse_args(argv)
    try:
        config = config_from_arguments(arguments, is_worker=service == "worker")
        return ServiceArguments(config, arguments.ready_file)
    except ConfigError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def to_flags(config: EngineConfig) -> list[str]:
    """Return the flags that make another process build this same config."""
    return [
        f"{option.flag}={_show(actual)}"
        for option in iter_options()
        if (actual := _value(config, option)) != option.default
    ]


def shared_config(config: EngineConfig) -> dict[str, str]:
    """Return key -> value of the options that an engine and its worker must share; the hello carries them.

    Sizes that are left to the device are those of the smallest, which the version before had as its defaults.
    """
    config = replace(config, scheduler=size_for_device(config.scheduler, 0))
    return {option.key: _show(_value(config, option)) for option in iter_options() if option.limits.shared}


def rank_config(config: EngineConfig) -> dict[str, str]:
    """Return key -> value of the options that all ranks of a worker group must share."""
    return {
        option.key: _show(_value(config, option))
        for option in iter_options()
        if set(WORKER) <= set(option.limits.read_by) and not option.limits.per_rank
    }


def check_same_values(holder_to_values: Mapping[str, Mapping[str, str]], *, advice: str) -> None:
    """Compare the values of several processes with those of the first.

    Args:
        holder_to_values: Name of a process, for the error -> its key -> value.
        advice: What the operator should do about a difference.

    Raises:
        HandshakeMismatch: Some values differ; names every such key with both values.
    """
    (first, expected), *others = holder_to_values.items()
    differing = [
        f"{key}: {first} has {expected.get(key, 'nothing')!r}, {holder} has {values.get(key, 'nothing')!r}"
        for holder, values in others
        for key in sorted({*expected, *values})
        if expected.get(key) != values.get(key)
    ]
    if differing:
        raise HandshakeMismatch("; ".join(differing) + f"; {advice}")


def _value(config: EngineConfig, option: Option) -> Any:
    return getattr(getattr(config, option.leaf), option.name)


def _leaf_class(leaf: Field[Any]) -> Any:
    return leaf.default_factory


def _from_file(file: Path, options: Mapping[str, Option]) -> dict[str, Any]:
    import yaml  # a bare GPU machine, which compares options but reads no file, may lack it

    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {file}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {file} is not yaml: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"config file {file}: expected a mapping of sections, found {type(document).__name__}"
        )
    values: dict[str, Any] = {}
    sections = [leaf.name for leaf in fields(EngineConfig)]
    for leaf, section in document.items():
        if isinstance(section, dict):
            for name, raw in section.items():
                option = _find(f"{leaf}.{name}", options, str(file))
                values[option.key] = _parse(option, raw, str(file))
        elif leaf in sections and section is not None:
            raise ConfigError(f"{leaf}: expected a mapping of options, found {section!r} ({file})")
        if leaf not in sections:
            raise ConfigError(f"{leaf}: no such option ({file}){_suggest(str(leaf), sections)}")
    return values


def _from_env(env: Mapping[str, str], options: Mapping[str, Option]) -> dict[str, Any]:
    by_env = {option.env: option for option in options.values()}
    prefixes = tuple(f"{ENV_PREFIX}{leaf.name}_".upper() for leaf in fields(EngineConfig))
    values: dict[str, Any] = {}
    for name, text in env.items():
        if not name.startswith(prefixes):
            continue
        if name not in by_env:
            raise ConfigError(f"{name}: no such option (environment){_suggest(name, by_env)}")
        values[by_env[name].key] = _parse(by_env[name], text, f"environment {name}")
    return values


def _find(key: str, options: Mapping[str, Option], source: str) -> Option:
    if key not in options:
        raise ConfigError(f"{key}: no such option ({source}){_suggest(key, options)}")
    return options[key]


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "; see --help for all of them"


def _parse(option: Option, raw: Any, source: str) -> Any:
    """`raw` as the option's type and within its range, else ConfigError."""
    if isinstance(raw, bool) and _show(raw) in option.limits.choices:
        raw = _show(raw)  # yaml's own word for one of the option's
    try:
        value = _convert(option.type, raw)
    except ValueError:
        hint = ""
        if isinstance(raw, str) and raw.startswith("tcp://"):
            hint = "; Kubernetes service links set this: use enableServiceLinks: false"
        raise ConfigError(f"{option.key}: {raw!r} is no {option.type.__name__} ({source}){hint}") from None
    limits = option.limits
    is_inside = (
        (limits.ge is None or value >= limits.ge)
        and (limits.gt is None or value > limits.gt)
        and (limits.le is None or value <= limits.le)
        and (not limits.choices or value in limits.choices)
    )
    if not is_inside:
        raise ConfigError(f"{option.key}: {raw!r} is out of range, allowed is {limits.describe()} ({source})")
    return value


def _convert(kind: type, raw: Any) -> Any:
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, str) and raw.lower() in _BOOLEANS:
            return _BOOLEANS[raw.lower()]
        raise ValueError
    if isinstance(raw, bool) or raw is None or isinstance(raw, (list, dict)):
        raise ValueError
    if kind is int:
        if isinstance(raw, float):
            raise ValueError
        return int(raw)
    if kind is float:
        value = float(raw)
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError
        return value
    return str(raw)


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
