"""`python -m triptych.hub MODEL`: fetch and convert a model ahead of time, and print its directory."""

from __future__ import annotations

import sys

from triptych.errors import TriptychError
from triptych.hub.resolve import EMBEDDED, resolve_model


def main(arguments: list[str]) -> int:
    """0: the directory is on stdout; 1: the model cannot be had, stderr says why; 2: wrong usage."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(f"usage: python -m triptych.hub PATH|HUB_ID|{EMBEDDED}", file=sys.stderr)
        return 2
    try:
        print(resolve_model(arguments[0]))
    except TriptychError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
