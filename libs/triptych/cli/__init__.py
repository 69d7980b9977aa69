"""The `triptych` command. One module per subcommand, loaded only when it is the one asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from triptych.errors import ConfigError, EngineUnavailable, TriptychError

_COMMAND_TO_HELP = {
    "serve": "serve a model on this machine: all three services, gRPC and OpenAI-compatible HTTP",
    "chat": "talk to a served model in the terminal",
    "complete": "answer prompts and leave",
    "demo": "start a stack, answer one prompt token by token, stop",
    "run-batch": "answer a file of requests in OpenAI's batch form",
    "bench": "measure throughput and latency of a stack",
    "admin": "look into an engine and steer it: status, pause, drain, sleep",
    "keys": "make API keys for a frontend that asks for them",
    "env": "print what this machine and installation have, for bug reports",
    "health": "ask a service whether it is alive or ready; for probes",
    "completion": "print a script that lets a shell complete all this",
}
"""A subcommand's module has `add_arguments(parser)`, `run(arguments) -> exit code` and, as its docstring,
the description."""

_EPILOG = """\
first steps:
  triptych serve                      serve the embedded model (SmolLM2-135M-Instruct)
  triptych serve PATH_OR_HUB_ID       serve another one
  triptych chat                       talk to it, from a second terminal
  triptych demo --prompt "Why is the sky blue?"

Run `triptych COMMAND --help` for its options. Exit codes: 0 done, 1 failed, 2 wrong usage or config.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; errors that are not bugs become one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser(words[0] if words else "").parse_args(words)
    try:
        exit_code: int = arguments.run(arguments)
        sys.stdout.flush()
        return exit_code
    except TriptychError as error:
        print(f"triptych {arguments.command}: {error}{_advice(error, arguments)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130  # as a shell reports death by SIGINT
    except BrokenPipeError:  # `triptych … | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _advice(error: TriptychError, arguments: argparse.Namespace) -> str:
    if isinstance(error, EngineUnavailable) and getattr(arguments, "address", None):
        return "; start one with `triptych serve`, or name another with --address"
    return ""


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser with only `command`'s own arguments filled in; None: those of all commands."""
    parser = _Parser(
        prog="triptych",
        description="Serve large language models as three gRPC services: frontend, engine core, worker.",
        epilog=_EPILOG,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and leave")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in _COMMAND_TO_HELP.items():
        subparser = commands.add_parser(
            name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if command in (name, None):
            module = importlib.import_module(f"triptych.cli.{name.replace('-', '_')}")
            subparser.description = module.__doc__
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


class _Parser(argparse.ArgumentParser):
    """Refuses unknown arguments itself, so that a command shows its own usage, and suggests what was meant.

    Its subparsers are of the same class.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            known = [option for action in self._actions for option in action.option_strings]
            hint = "".join(filter(None, (_hint(option, known) for option in options)))
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = _hint(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None


def _hint(word: str, known: Iterable[str]) -> str:
    """Return the most similar of the known words as a question, empty if none is similar."""
    import difflib  # only where something is wrong

    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves room for the longest command beside its help; argparse forgets how far commands are indented."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = max(map(len, _COMMAND_TO_HELP)) + 4


class _PrintVersion(argparse.Action):
    """Looks the version up when asked: that takes longer than all the rest of `--help`."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        import triptych

        print(f"triptych {triptych.__version__}")
        parser.exit()
