"""Compiles the native kernels, unless they are up to date: `python -m triptych_kernels.cpu.build`.

It builds for the widest instruction set that this processor has and for the narrowest, or, with --all, for every one.
Without a suitable compiler or processor nothing is built, and plain torch computes. The last line printed says what
this machine gets.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Sequence

from triptych_kernels.cpu import compile, library


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m triptych_kernels.cpu.build",
        description="Compiles the native kernels for this processor, unless they are up to date.",
    )
    parser.add_argument(
        "--all", action="store_true", help="for every instruction set, to run on other machines"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="then see that the sources compile for every other instruction set",
    )
    options = parser.parse_args(arguments)
    if options.all:
        compile.build_all()
    elif platform.machine() not in compile.FLAGS_OF_MACHINE:
        print(compile.NOT_WRITTEN.format(platform.machine()))
    else:
        build_for_this_processor()
        if options.check:
            _check_others()


def build_for_this_processor() -> None:
    """Build the libraries that this processor can use, and print what this machine gets."""
    print(f"native kernels: {_build()}")


def _check_others() -> None:
    """See that the sources compile where this processor has a wider set or none, or end the process."""
    compiler = compile.find_compiler()
    if compiler is None:
        sys.exit(f"native kernels: not checked, since {compile.NO_COMPILER}")
    built = library.isas_to_build()
    others = [isa for isa in compile.FLAGS_OF_MACHINE[platform.machine()] if isa not in built]
    try:
        compile.check(compiler, others)
    except subprocess.CalledProcessError as error:
        sys.exit(f"native kernels: {' '.join(error.cmd)} failed:\n{error.stderr}")
    print(f"native kernels: {', '.join(others)} compile")


def _build() -> str:
    """Build, and return what this machine gets."""
    lacking = ", ".join(library.missing_flags())
    if not library.isas_of_processor():
        return f"none, since this processor has no {lacking}; {compile.PLAIN}"
    compiler = compile.find_compiler()
    if compiler is None and library.usable_isas():  # a wheel brought them
        return f"as installed, without a compiler; this machine uses {library.usable_isas()[0]}"
    if compiler is None:
        return f"none, since {compile.NO_COMPILER}; {compile.PLAIN}"
    if not compile.build_for(compiler, library.isas_to_build()):
        return f"none, since {compiler} does not compile them; {compile.PLAIN}"
    if library.usable_isas():
        return f"built; this machine uses {library.usable_isas()[0]}"
    return f"built, but this processor has no {lacking or 'use for them'}; {compile.PLAIN}"


if __name__ == "__main__":
    main()
