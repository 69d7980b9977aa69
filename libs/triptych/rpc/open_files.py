"""The operating system's limit of open files, and how many connections fit it."""

from __future__ import annotations

import logging
import resource
from collections.abc import Mapping

from triptych.errors import ConfigError

log = logging.getLogger(__name__)

_MOST = 1 << 20
"""A hard limit may be a thousand times as much, for which no machine has the memory."""
RESERVE = 512
"""Files that are none of clients' connections: libraries, engines, operators, pipes, and what is open for a moment."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it.

    The soft limit is 1,024 by default, for programs that use `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # macOS has a limit of its own beside the hard one
            log.warning("the limit of open files stays at %d: %s", soft, error)
            return soft
        return wanted
    return _MOST if soft == resource.RLIM_INFINITY else soft


def fit_connections(option_to_wanted: Mapping[str, int], num_files: int) -> Mapping[str, int]:
    """Return how many connections each option may have, all of them together within the limit of open files.

    Args:
        option_to_wanted: Option -> the connections that it asks for.
        num_files: The limit.

    Raises:
        ConfigError: Not even one connection of each fits.
    """
    num_left, num_wanted = num_files - RESERVE, sum(option_to_wanted.values())
    if num_wanted <= num_left:
        return option_to_wanted
    fitting = {option: wanted * num_left // num_wanted for option, wanted in option_to_wanted.items()}
    asked = ", ".join(f"{option} {wanted}" for option, wanted in option_to_wanted.items())
    if min(fitting.values()) < 1:
        raise ConfigError(
            f"{asked}: {num_files} files may be open (ulimit -Hn), of which {RESERVE} are kept back; raise that limit"
        )
    found = ", ".join(f"{option} {number}" for option, number in fitting.items())
    log.warning(
        "%s do not fit: %d files may be open (ulimit -Hn), of which %d are kept back; now %s",
        asked,
        num_files,
        RESERVE,
        found,
    )
    return fitting
