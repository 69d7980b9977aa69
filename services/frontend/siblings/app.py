"""One of several processes of a frontend: a complete frontend that shares its ports and asks the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import ClassVar

from triptych.config import EngineConfig
from triptych.errors import EngineUnavailable
from triptych_services.frontend.app import FrontendApp
from triptych_services.frontend.siblings.link import Place
from triptych_services.frontend.siblings.siblings import Siblings

_LATE_S = 30.0
"""A process that takes the place of another one binds its ports after so long, ready or not."""


class SiblingApp(FrontendApp):
    """A frontend among several. Its supervisor gives it its place before the app is made."""

    place: ClassVar[Place]

    def __init__(self, config: EngineConfig) -> None:
        siblings = Siblings(self.place)
        super().__init__(config, siblings)
        siblings.on_ready_changed = self._router.on_change
        self._join, self._say_ready = siblings.join, siblings.say_ready
        self.start_background("siblings", self._run(siblings))

    @staticmethod
    async def _run(siblings: Siblings) -> None:
        await siblings.run()
        raise EngineUnavailable("the supervisor of this frontend's processes is gone")

    @classmethod
    def log_name(cls, config: EngineConfig) -> str:
        return cls.place.name

    async def prepare(self) -> None:
        """Wait until this process could serve, while the others serve without it: nothing is refused for its start."""
        if not self.place.is_late:
            return
        self.dial_engines()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LATE_S):
                while not self._generator.is_ready_here:
                    self._router.changed.clear()
                    await self._router.changed.wait()
        self._say_ready(self._generator.is_ready_here)

    async def start(self) -> Mapping[str, int]:
        ports = await super().start()
        self._join()
        return ports
