"""Print a script that lets a shell complete the command's options.

triptych completion bash > ~/.local/share/bash-completion/completions/triptych
triptych completion zsh > ~/.zfunc/_triptych          # with fpath+=~/.zfunc before compinit
triptych completion tcsh > ~/.triptych.complete.csh   # sourced by ~/.tcshrc
"""

from __future__ import annotations

import argparse

from triptych.errors import FeatureDisabled

_SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS)


def run(arguments: argparse.Namespace) -> int:
    """Raises FeatureDisabled: shtab is not installed."""
    from triptych.cli import build_parser

    try:
        import shtab
    except ModuleNotFoundError:
        raise FeatureDisabled("completion", "needs shtab; pip install 'triptych[cli]'") from None
    print(shtab.complete(build_parser(None), arguments.shell))
    return 0
