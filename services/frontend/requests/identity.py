"""Names and seeds that the frontend draws for requests."""

from __future__ import annotations

import secrets

_MASK_64 = (1 << 64) - 1
_MAX_LABEL_CHARS = 100  # of a request id's 128; the rest is for what is appended


def unique_request_id(label: str) -> str:
    """Return a request id that begins with a label which several requests may share, and ends with random digits."""
    return f"{label[:_MAX_LABEL_CHARS]}-{secrets.token_hex(4)}"


def draw_seed() -> int:
    """A seed for a request that brought none: any u64."""
    return secrets.randbits(64)


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of one choice: the first takes the request's own, the others are spread by splitmix64.

    So the first of several choices equals the only choice of a request with the same seed.
    """
    return seed if index == 0 else splitmix64((seed + index) & _MASK_64)


def splitmix64(state: int) -> int:
    """The output of Steele, Lea and Flood's generator for this state: a bijection of u64 that mixes well.

    Source: "Fast splittable pseudorandom number generators", OOPSLA 2014, doi:10.1145/2714064.2660195.
    """
    z = (state + 0x9E3779B97F4A7C15) & _MASK_64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK_64
    return z ^ (z >> 31)
