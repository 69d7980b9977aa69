"""`python -m services.enginecore`: scheduler and KV block manager of one model."""

from __future__ import annotations

import sys

import uvloop

from services.enginecore.app import run
from triptych.config.loader import parse_service_arguments
from triptych.errors import ConfigError
from triptych.types.exit_codes import ExitCode


def main() -> int:
    arguments = parse_service_arguments("enginecore", __doc__ or "", sys.argv[1:])
    try:
        return uvloop.run(run(arguments))
    except ConfigError as error:
        print(f"services.enginecore: {error}", file=sys.stderr)
        return ExitCode.MISCONFIGURED


if __name__ == "__main__":
    raise SystemExit(main())
