from __future__ import annotations

import pytest

from triptych.errors import ConfigError
from triptych.rpc.addresses import ServiceName, read_addresses, resolve


def test_addresses_are_read() -> None:
    assert read_addresses(" a:1, [::1]:2 ,dns:x.y:3,a:1,", option="x") == (
        ["a:1", "[::1]:2"],
        [ServiceName("x.y", 3)],
    )


@pytest.mark.parametrize(
    "text", ["", " , ", "host", "dns:host", "host:0", "host:65536", "dns::5", "host:http"]
)
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"frontend\.engine_addresses: "):
        read_addresses(text, option="frontend.engine_addresses")


async def test_names_are_looked_up_by_the_system() -> None:
    assert await resolve("localhost", 5) in (["127.0.0.1:5"], ["[::1]:5"])
    assert await resolve("127.0.0.2", 5) == ["127.0.0.2:5"]
