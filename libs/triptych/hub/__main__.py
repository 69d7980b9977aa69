"""`python -m triptych.hub MODEL [REVISION]`: fetch and convert a model ahead of time, and print its directory."""

from __future__ import annotations

import sys

from triptych.errors import TriptychError
from triptych.hub.resolve import EMBEDDED, resolve_model


def main(arguments: list[str]) -> int:
    """0: the directory is on stdout; 1: the model is not available, stderr says why; 2: wrong usage."""
    if len(arguments) not in (1, 2) or any(each.startswith("-") for each in arguments):
        print(f"usage: python -m triptych.hub PATH|HUB_ID|{EMBEDDED} [REVISION]", file=sys.stderr)
        return 2
    try:
        print(resolve_model(arguments[0], revision="".join(arguments[1:])))
    except TriptychError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
