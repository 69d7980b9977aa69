"""Weights that wait on the host: every form finds its numbers again, and no memory is kept or copied twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from triptych import host
from triptych.errors import MemoryShort
from triptych_kernels.triton.linear.quantized_weight import GroupQuantizedWeight
from triptych_kernels.triton.linear.w8a8_weight import ChannelQuantizedWeight
from triptych_kernels.triton.moe.quantized_experts import GroupQuantizedExperts
from triptych_kernels.weights.formats import QuantizedFormat
from triptych_services.worker.runner.sleepable_runner import HostCopy, weight_storages

CPU = torch.device("cpu")
AFFINE_4 = QuantizedFormat(4, "minimum")
ROWS, COLUMNS = 8, 64


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


class Layer(nn.Module):
    """A module with every kind of weight that a model may have, on a device whose memory torch allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(drawn(ROWS, COLUMNS), requires_grad=False)
        self.register_buffer("table", drawn(5), persistent=False)
        self.blocks = GroupQuantizedWeight(
            ROWS, COLUMNS, torch.float32, AFFINE_4, device=CPU, gated=True, bias=True
        )
        self.channels = ChannelQuantizedWeight(ROWS, COLUMNS, torch.float32, torch.int8, device=CPU)
        self.experts = GroupQuantizedExperts(3, ROWS, COLUMNS, torch.float32, AFFINE_4, device=CPU)
        self.listed = [drawn(7)]
        for weight in (self.blocks, *self.experts):
            weight.integers.random_(-9, 9)
            weight.scales.normal_()
        self.blocks.bias.normal_()
        self.channels.elements.random_(-9, 9)

    def tensors(self) -> dict[str, Tensor]:
        named = {"plain": self.plain, "table": self.table, "listed": self.listed[0]}
        weights = {"blocks": self.blocks, "channels": self.channels, **dict(enumerate(self.experts))}
        for name, weight in weights.items():
            named |= {f"{name}.{part}": t for part, t in vars(weight).items() if isinstance(t, Tensor)}
        return named


class Model(nn.Module):
    """Two layers, the head tied to the first one, and a view into a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = self.layers[0].plain
        self.held_head = self.layers[0].blocks
        self.view = self.layers[1].plain[2:4]

    def tensors(self) -> dict[str, Tensor]:
        return {
            "view": self.view,
            **{
                f"{i}.{name}": t for i, layer in enumerate(self.layers) for name, t in layer.tensors().items()
            },
        }


def test_weights_are_restored_after_every_vacate() -> None:
    model = Model()
    named = model.tensors()
    assert len(named) > 30
    before = {name: tensor.clone() for name, tensor in named.items()}
    host_copy = HostCopy(model)
    for _ in range(2):
        host_copy.vacate()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in named.values()), "some memory is kept"
        host_copy.restore()
        for name, tensor in model.tensors().items():
            assert tensor is named[name]
            assert torch.equal(tensor, before[name]), name
    host_copy.discard()
    assert model.head is model.layers[0].plain
    model.head[3, 3] = 77.0
    assert model.layers[0].plain[3, 3] == 77.0, "tied no more"
    model.layers[1].plain[2, 0] = 78.0
    assert model.view[0, 0] == 78.0, "a view no more"


def test_what_is_shared_is_copied_once() -> None:
    model = Model()
    storages = weight_storages(model)
    distinct = {tensor.untyped_storage().data_ptr() for tensor in model.tensors().values()}
    assert sorted(storage.data_ptr() for storage in storages) == sorted(distinct)
    expert = model.layers[0].experts
    assert sum(storage.data_ptr() == expert[0].integers.data_ptr() for storage in storages) == 1, (
        "the stack's"
    )


def test_without_room_on_the_host_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setattr(host, "free_memory", lambda: 1 << 10)
    with pytest.raises(
        MemoryShort, match=r"the weights take \d+ MiB, but 0 MiB of the host's memory are free"
    ):
        HostCopy(model)
    assert all(tensor.untyped_storage().nbytes() for tensor in model.tensors().values())
