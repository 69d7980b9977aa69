"""`python -m services.frontend`: the tokenizing gateway's process."""

from __future__ import annotations

import os
import sys

import uvloop

from services.frontend.app import run
from triptych.config.loader import parse_service_arguments
from triptych.errors import ConfigError
from triptych.types.exit_codes import ExitCode


def main() -> int:
    arguments = parse_service_arguments("frontend", __doc__ or "", sys.argv[1:])
    try:
        return uvloop.run(run(arguments))
    except ConfigError as error:
        print(f"services.frontend: {error}", file=sys.stderr)
        return ExitCode.MISCONFIGURED


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that still fetches a model must not keep a stopped process alive
