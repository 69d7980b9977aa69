"""The choice of the path by which a step runs on an asynchronous device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from triptych_services.worker.attention.base import KvCache
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.runner.backend import StepOutput
from triptych_services.worker.runner.cuda.decode_graph import DecodeGraphPath
from triptych_services.worker.runner.cuda.forward import DeviceForward, EagerPath, LastTokens
from triptych_services.worker.runner.cuda.graph_recorder import CudaGraphRecorder, GraphRecorder
from triptych_services.worker.runner.cuda.inputs import DeviceInputs
from triptych_services.worker.runner.cuda.piecewise_graph import PiecewiseGraphPath
from triptych_services.worker.runner.cuda.streams import DeviceStream
from triptych_services.worker.runner.input_batch import InputBuffers
from triptych_services.worker.runner.step_inputs import StepSizes


class StepPath(Protocol):
    """One way to run a step on an asynchronous device."""

    description: str
    """Name for people."""

    def serves(self, sizes: StepSizes) -> bool:
        """Return whether `forward` can compute a step of these sizes."""
        ...

    def forward(self, sizes: StepSizes) -> StepOutput:
        """Compute the step that was gathered last; see `ForwardBackend.forward`."""
        ...

    def graph_captures(self) -> Sequence[Callable[[], None]]:
        """Return the captures to be made before step 1; see `ForwardBackend.graph_captures`."""
        ...


class CudaBackend:
    """A `ForwardBackend` that runs each step by the first path that serves it.

    | path             | steps that it serves                                | what is launched                       |
    |------------------|-----------------------------------------------------|----------------------------------------|
    | decode graph     | every row computes one token and samples            | one graph                              |
    | piecewise graphs | at most `max_graph_tokens` tokens                   | graphs around the attention of a layer |
    | eager            | all                                                 | each operation                         |
    """

    computes_with_torch = False

    def __init__(self, paths: Sequence[StepPath]) -> None:
        """
        Args:
            paths: In order of preference; the last serves every step.
        """
        self._paths = paths
        self.description = paths[0].description

    def forward(self, sizes: StepSizes) -> StepOutput:
        path = next(path for path in self._paths if path.serves(sizes))
        return path.forward(sizes)

    def graph_captures(self) -> Sequence[Callable[[], None]]:
        return [capture for path in self._paths for capture in path.graph_captures()]


def create_cuda_backend(
    model: CausalLM,
    kv_caches: Sequence[KvCache],
    inputs: InputBuffers,
    *,
    stream: DeviceStream,
    last_tokens: LastTokens,
    max_model_len: int,
    vocab_size: int,
    recorder: GraphRecorder | None,
    max_graph_tokens: int,
    samples: bool = True,
) -> CudaBackend:
    """Create the backend for an asynchronous device.

    Args:
        inputs: Buffers in which every step is gathered on the host.
        recorder: Recorder of CUDA graphs; None: every step runs eagerly.
        max_graph_tokens: Number of tokens of the longest step with prompts that is recorded.
        samples: Whether the model has a head; if not, no row samples.
    """
    device_inputs = DeviceInputs(inputs, stream)
    forward = DeviceForward(model, kv_caches, last_tokens, samples=samples)
    paths: list[StepPath] = []
    if recorder is not None and inputs.attention.in_graphs and samples:
        paths.append(
            DecodeGraphPath(
                forward, device_inputs, recorder=recorder, max_seq_len=max_model_len, vocab_size=vocab_size
            )
        )
    if recorder is not None and inputs.state is None:  # scans depend on the rows as attention does
        paths.append(
            PiecewiseGraphPath(forward, device_inputs, recorder=recorder, max_graph_tokens=max_graph_tokens)
        )
    paths.append(EagerPath(forward, device_inputs))
    return CudaBackend(paths)


def create_graph_recorder(device: torch.device, *, enforce_eager: bool) -> GraphRecorder | None:
    """Create the recorder of CUDA graphs; None if nothing is to be recorded on the device."""
    return CudaGraphRecorder(device) if device.type == "cuda" and not enforce_eager else None
