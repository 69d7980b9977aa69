"""An H200 that only the compiler believes in."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)
NUM_SMS = 132


class _Driver:
    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return _fail

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
        load_binary=lambda name, kernel, shared, device: (object(), object(), 0, 0, 1024),
    )


def _fail(*_: object) -> None:
    raise AssertionError("there is no device to launch on")


def believe_in_hopper() -> None:
    """Make Triton compile kernels for an H200 from now on; launches fail."""
    triton.runtime.driver.set_active(_Driver())
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=NUM_SMS)
