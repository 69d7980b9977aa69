"""Which way a model is run on an asynchronous device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.worker.attention.base import KvCache
from services.worker.models.base import CausalLM
from services.worker.runner.backend import ForwardBackend
from services.worker.runner.cuda.decode_graph import CudaGraphBackend
from services.worker.runner.cuda.forward import DeviceEagerBackend, DeviceForward
from services.worker.runner.cuda.graph_recorder import CudaGraphRecorder, GraphRecorder
from services.worker.runner.cuda.inputs import DeviceInputs
from services.worker.runner.cuda.last_tokens import LastTokens
from services.worker.runner.cuda.piecewise_graph import PiecewiseGraphBackend
from services.worker.runner.cuda.streams import DeviceStream
from services.worker.runner.input_batch import InputBuffers


def create_device_backend(
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
) -> ForwardBackend:
    """The backend for an asynchronous device.

    Args:
        inputs: where every step that it will compute is gathered on the host.
        recorder: of CUDA graphs; None: operations are launched one by one.
        max_graph_tokens: tokens of the longest step with prompts that is recorded.
    """
    device_inputs = DeviceInputs(inputs, stream)
    forward = DeviceForward(model, kv_caches, last_tokens)
    eager = DeviceEagerBackend(forward, device_inputs)
    if recorder is None:
        return eager
    pieces = PiecewiseGraphBackend(
        forward,
        device_inputs,
        host=inputs,
        others=eager,
        recorder=recorder,
        device=stream.device,
        max_graph_tokens=max_graph_tokens,
    )
    if not inputs.attention.in_graphs:
        return pieces
    return CudaGraphBackend(
        forward,
        device_inputs,
        host=inputs,
        others=pieces,
        recorder=recorder,
        device=stream.device,
        max_seq_len=max_model_len,
        vocab_size=vocab_size,
    )


def create_graph_recorder(device: torch.device, *, enforce_eager: bool) -> GraphRecorder | None:
    """None: nothing is to be recorded there."""
    return CudaGraphRecorder(device) if device.type == "cuda" and not enforce_eager else None
