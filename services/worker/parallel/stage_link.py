"""The connections between the stages of a model over torch.distributed: states forwards, results back.

States cross by NCCL between CUDA devices and by gloo between CPUs. Results are small and are needed on the host, so
they always cross by gloo.
"""

from __future__ import annotations

import logging
import pickle
import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from triptych.errors import RankUnavailable
from triptych.types.step import StepResult
from triptych_services.worker.context.resolved_config import RankFacts

log = logging.getLogger(__name__)

_MAX_UNTAKEN = 8  # messages; a stage waits for the other end when it is so far ahead
_FRAME_BYTES = (
    8192  # of the first message of a result: tokens of a thousand rows; log-probabilities take a second one
)
_LENGTH_BYTES = 8


@contextmanager
def naming_errors(what: str, who: str, timeout_s: float) -> Iterator[None]:
    """Turn errors of torch.distributed into ones that name the rank and the operation.

    Errors of memory pass unchanged: callers handle these themselves.

    Raises:
        RankUnavailable: The operation failed.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (
        RuntimeError,
        TimeoutError,
    ) as error:  # base class of torch.distributed's; of a shared memory's waits
        reason = str(error).partition("\n")[0]
        raise RankUnavailable(
            f"{who}: {what} failed: {reason}; where another rank is gone, or did not come within {timeout_s:g} s "
            "(parallel.timeout_s), restart all ranks"
        ) from error


class ProcessStageLink:
    """A `StageLink` of processes. Used on the runner's thread; a thread of its own receives results."""

    def __init__(self, rank: RankFacts, *, timeout_s: float) -> None:
        """Create the groups that messages cross by. Called by every rank, when the default group is there."""
        self._rank = rank
        self._timeout_s = timeout_s
        stride, last = rank.tensor_parallel_size, rank.num_ranks - rank.tensor_parallel_size
        self._previous, self._next = rank.rank - stride, rank.rank + stride
        self._first_stage, self._last_stage = rank.tensor_parallel_rank, last + rank.tensor_parallel_rank
        self._into = self._out_of = self._results = dist.group.WORLD
        if rank.device.startswith("cuda"):
            # operations of one NCCL group run one after the other, so each pair of neighbours has its own
            pairs = {first: dist.new_group([first, first + stride]) for first in range(last)}
            self._into, self._out_of = pairs.get(self._previous), pairs.get(rank.rank)
            self._results = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._untaken: deque[tuple[dist.Work, Tensor]] = deque()
        """Messages that the other end may not have taken, oldest first, with their memory."""
        self._expected: queue.SimpleQueue[_ExpectedResult | None] = queue.SimpleQueue()
        self._receiver: threading.Thread | None = None

    def send_states(self, states: Tensor) -> None:
        with self._naming("sending states"):
            self._send(states.clone(), self._next, self._out_of)

    def receive_states(self, states: Tensor) -> None:
        with self._naming("receiving states"):
            dist.recv(states, self._previous, group=self._into)

    def send_result(self, result: StepResult) -> None:
        content = pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
        message = bytearray(_FRAME_BYTES)
        message[:_LENGTH_BYTES] = len(content).to_bytes(_LENGTH_BYTES, "little")
        num_inside = min(len(content), _FRAME_BYTES - _LENGTH_BYTES)
        message[_LENGTH_BYTES : _LENGTH_BYTES + num_inside] = content[:num_inside]
        with self._naming("sending a result"):
            self._send(torch.frombuffer(message, dtype=torch.uint8), self._first_stage, self._results)
            if num_inside < len(content):
                rest = torch.frombuffer(bytearray(content[num_inside:]), dtype=torch.uint8)
                self._send(rest, self._first_stage, self._results)

    def expect_result(self) -> _ExpectedResult:
        if self._receiver is None:
            self._receiver = threading.Thread(target=self._receive_results, name="results", daemon=True)
            self._receiver.start()
        expected = _ExpectedResult()
        self._expected.put(expected)
        return expected

    def warm_up(self, device: torch.device) -> None:
        """Send one message each way, so that connections exist before memory is measured."""
        states = torch.ones(1, 1, device=device)
        if not self._rank.is_first_stage:
            self.receive_states(states)
        if self._rank.is_last_stage:
            self.send_result(StepResult(0, torch.zeros(0).numpy()))
        else:
            self.send_states(states)
        if self._rank.is_first_stage:
            self.expect_result().wait()

    def close(self) -> None:
        """End the thread. Results that are still expected never come."""
        self._expected.put(None)
        self._untaken.clear()

    def _send(self, message: Tensor, to: int, group: dist.ProcessGroup | None) -> None:
        work = dist.isend(message, to, group=group)
        assert work is not None, "this rank is in the group"
        self._untaken.append((work, message))
        if len(self._untaken) > _MAX_UNTAKEN:
            self._untaken.popleft()[0].wait()

    def _receive_results(self) -> None:
        """Receive what is expected, in order, until the link is closed or a result does not come."""
        failure: RankUnavailable | None = None
        while (expected := self._expected.get()) is not None:
            if failure is None:
                try:
                    with self._naming("receiving a result"):
                        expected.settle(self._receive_result())
                    continue
                except RankUnavailable as error:
                    failure = error
            expected.settle(failure)  # what comes after a result that is lost cannot be told apart

    def _receive_result(self) -> StepResult:
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        dist.recv(frame, self._last_stage, group=self._results)
        content = frame.numpy().tobytes()
        length = int.from_bytes(content[:_LENGTH_BYTES], "little")
        content = content[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if len(content) < length:
            rest = torch.empty(length - len(content), dtype=torch.uint8)
            dist.recv(rest, self._last_stage, group=self._results)
            content += rest.numpy().tobytes()
        result: StepResult = pickle.loads(content)
        return result

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        with naming_errors(what, f"rank {self._rank.rank} of {self._rank.num_ranks}", self._timeout_s):
            yield


class _ExpectedResult:
    """An `ExpectedResult`."""

    def __init__(self) -> None:
        self._arrived = threading.Event()
        self._outcome: StepResult | RankUnavailable | None = None

    def settle(self, outcome: StepResult | RankUnavailable) -> None:
        """Set the result, or why it does not come."""
        self._outcome = outcome
        self._arrived.set()

    def is_done(self) -> bool:
        return self._arrived.is_set()

    def wait(self) -> StepResult:
        self._arrived.wait()  # as long as the receiver waits for it, which has a deadline
        outcome = self._outcome
        if isinstance(outcome, RankUnavailable):
            raise outcome
        assert outcome is not None, "it has arrived"
        return outcome
