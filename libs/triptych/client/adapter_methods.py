"""The methods of `LLM` and `AsyncLLM` that load and unload LoRA adapters while the stack serves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from triptych.client.admin_client import AdminClient
from triptych.client.connection import Connection
from triptych.errors import EngineUnavailable, ModelNotFound
from triptych.types.adapters import AdapterFacts

_T = TypeVar("_T")
_KNOWN_S = 10.0
"""Seconds between the engines' answer and the frontend that requests go to knowing the name; it is milliseconds."""
_POLL_S = 0.01


class AdapterMethods:
    """The methods of `LLM`. Those of `AsyncLLM` are the same and awaited."""

    _connection: Connection

    def _steer(self, call: Callable[[AdminClient], Coroutine[Any, Any, _T]]) -> _T:
        raise NotImplementedError

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterFacts:
        """Load a LoRA adapter into all engines, and return when requests may name it. What runs goes on.

        The stack needs `max_adapters` above 0. To load the same name and path again does nothing.

        Args:
            name: for `generate(adapter=name)`.
            path: PEFT's directory on the workers' machines, within the stack's `adapter_root`.

        Raises:
            InvalidRequest: the name cannot be one, or the path is not one that adapters are read from.
            FeatureDisabled: the stack serves no adapters.
            ModelError: the files are none of an adapter that the model can have; says why.
            WrongState: the name is that of another adapter.
        """
        return self._steer(lambda admin: _load(admin, self._connection, name, path))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Requests that run with it go on.

        Raises:
            InvalidRequest: no adapter has this name.
        """
        self._steer(lambda admin: admin.unload_adapter(name))

    def list_adapters(self) -> list[AdapterFacts]:
        """Return the adapters that requests may name."""
        return self._steer(AdminClient.list_adapters)


class AsyncAdapterMethods:
    """The methods of `AsyncLLM`."""

    _connection: Connection

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterFacts:
        """Load a LoRA adapter into all engines; see `LLM.load_adapter`."""
        return await _load(await self._connection.admin(), self._connection, name, path)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; see `LLM.unload_adapter`."""
        await (await self._connection.admin()).unload_adapter(name)

    async def list_adapters(self) -> list[AdapterFacts]:
        """Return the adapters that requests may name."""
        return await (await self._connection.admin()).list_adapters()


async def _load(
    admin: AdminClient, connection: Connection, name: str, path: str | os.PathLike[str]
) -> AdapterFacts:
    """Load an adapter, and wait until the frontend has heard of it from its engines."""
    facts, client = await admin.load_adapter(name, os.fspath(path)), await connection.start()
    try:
        async with asyncio.timeout(_KNOWN_S):
            while True:
                try:
                    await client.get_model(name)
                except ModelNotFound:
                    await asyncio.sleep(_POLL_S)
                else:
                    return facts
    except TimeoutError:
        raise EngineUnavailable(
            f"adapter {name!r} is loaded, but the frontend has not heard of it within {_KNOWN_S:g} s"
        ) from None
