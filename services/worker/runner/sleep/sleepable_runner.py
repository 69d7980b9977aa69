"""The runner of a real model, whose memory can be given back for a while: docs/adr/0009.

            the model's weights    KV cache, graphs, buffers
awake       on the device          of a `ModelRunner`
level 1     in the host's memory   gone                        on a CPU the weights stay where they are
level 2     in their files         gone
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from services.worker.context.device import free_memory, held_memory
from services.worker.models.base import CausalLM
from services.worker.runner.base import PendingStep
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.sleep.host_copy import HostCopy
from triptych.errors import MemoryShort, TriptychError
from triptych.types.facts import SleepLevel, WorkerFacts
from triptych.types.step import StepPlan, StepResult

log = logging.getLogger(__name__)

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a runner takes on its device, in bytes."""

    weights: int
    kv_cache: int
    activations: int
    """Of the longest step; 0 where that was not measured."""


class SleepableRunner:
    """A `Runner`. Owned by the worker's runner thread."""

    def __init__(
        self,
        model: CausalLM,
        *,
        device: torch.device,
        needs: MemoryNeeds,
        load: Callable[[], CausalLM],
        start: Callable[[CausalLM], ModelRunner],
    ) -> None:
        """Stand ready for step 1.

        Args:
            load: reads the same model from its checkpoint once more.
            start: allocates all that a runner of a loaded model needs, and warms it up.
        """
        self._device = device
        self._needs = needs
        self._load = load
        self._start = start
        self._model: CausalLM | None = model
        """None: dropped."""
        self._host_copy: HostCopy | None = None
        """While the device's memory of the model is given up."""
        self._runner: ModelRunner | None = start(model)
        """None: asleep."""
        self._facts = self._runner.facts

    @property
    def facts(self) -> WorkerFacts:
        return self._facts

    @property
    def model(self) -> CausalLM:
        assert self._model is not None, "it sleeps at level 2"
        return self._model

    def launch(self, plan: StepPlan) -> PendingStep:
        assert self._runner is not None, "the worker's gate lets nobody in who would wake us"
        return self._runner.launch(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).wait()

    def reset(self) -> None:
        assert self._runner is not None, "the worker's gate lets nobody in who would wake us"
        self._runner.reset()

    def sleep(self, level: SleepLevel) -> int:
        """Give memory back; see `Runner.sleep`."""
        assert self._runner is not None, "it is asleep"
        began, held = time.perf_counter(), held_memory(self._device)
        self._runner.reset()
        is_copied = level is SleepLevel.WEIGHTS_ON_HOST and self._device.type != "cpu"
        host_copy = HostCopy(_module(self.model)) if is_copied else None  # while nothing has changed yet
        self._runner, self._host_copy = None, host_copy
        if level is SleepLevel.WEIGHTS_DROPPED:
            self._model = None
        self._release()
        released = max(held - held_memory(self._device), 0)
        log.info(
            "asleep at level %d: %d MiB released in %.2f s",
            level.value,
            released // _MIB,
            time.perf_counter() - began,
        )
        return released

    def wake(self) -> None:
        """Take memory again and stand ready for step 1; see `Runner.wake`."""
        assert self._runner is None, "it is awake"
        began, is_dropped = time.perf_counter(), self._model is None
        if (failure := self._try_to_wake()) is not None:
            if is_dropped:
                self._model = None
            self._release()
            raise failure
        if self._host_copy is not None:
            self._host_copy.discard()
            self._host_copy = None
        log.info("awake after %.2f s", time.perf_counter() - began)

    def _try_to_wake(self) -> TriptychError | None:
        """Returns what went wrong, free of the frames that still hold some of the memory taken."""
        needed, free = self._needed_bytes(), free_memory(self._device)
        if needed > free:
            return self._memory_short(needed, free)
        try:
            if self._model is None:
                self._model = self._load()
            elif self._host_copy is not None:
                self._host_copy.restore()
            self._runner = self._start(self._model)
        except torch.OutOfMemoryError:  # somebody else was faster, or it is there in pieces
            pass
        except TriptychError as error:
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        return None if self._runner is not None else self._memory_short(needed, free)

    def _needed_bytes(self) -> int:
        has_weights = self._model is not None and self._host_copy is None
        return self._needs.kv_cache + self._needs.activations + (0 if has_weights else self._needs.weights)

    def _release(self) -> None:
        """Have nothing on the device that the sleep is for; what is gone may lie in cycles, and in torch's cache."""
        gc.collect()
        if self._host_copy is not None:
            self._host_copy.vacate()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):  # private, so another torch may not have it
                torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream that has multiplied, graphs' too
            torch.cuda.empty_cache()

    def _memory_short(self, needed: int, free: int) -> MemoryShort:
        needs = self._needs
        return MemoryShort(
            f"waking takes {needed // _MIB} MiB on {self._device}, but {free // _MIB} MiB are free (weights "
            f"{needs.weights // _MIB}, KV cache {needs.kv_cache // _MIB}, the longest step {needs.activations // _MIB} "
            "MiB); free some and wake the worker again"
        )


def _module(model: CausalLM) -> nn.Module:
    assert isinstance(model, nn.Module), "the contract of CausalLM"
    return model
