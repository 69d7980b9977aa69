"""Sizes of the pages in which lists are returned."""

from __future__ import annotations

from triptych.errors import InvalidRequest

_PAGE_SIZE = 100
_MAX_PAGE_SIZE = 1000


def read_page_size(page_size: int) -> int:
    """Return how many entries a page has at most.

    Args:
        page_size: As asked for; 0: 100.

    Raises:
        InvalidRequest: It is above the limit.
    """
    if page_size > _MAX_PAGE_SIZE:
        raise InvalidRequest("page_size", f"{page_size} is above the limit {_MAX_PAGE_SIZE}")
    return page_size or _PAGE_SIZE
