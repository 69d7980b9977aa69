"""Layers: each holds its rank's share, and checkpoint tensors land where they belong, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN, XIELUActivation

from tests.worker.tiny import dense, tiny_architecture, tiny_config
from triptych.checkpoint.architecture import NormSpec
from triptych.errors import ConfigError, FeatureDisabled, ModelError
from triptych_kernels.cpu.library import forced_isa, isa
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.resolved_config import RankFacts
from triptych_services.worker.layers.checkpoint_tensors import load_weights
from triptych_services.worker.layers.embedding import LogitsHead, VocabEmbedding
from triptych_services.worker.layers.linear import ColumnLinear, GatedLinear, QKVLinear, RowLinear
from triptych_services.worker.layers.mlp import XIelu
from triptych_services.worker.layers.norm import LayerNorm, RMSNorm, create_norm
from triptych_services.worker.layers.weights import find_weight_targets


@pytest.fixture(params=["packed", "plain"], autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Weights as the native products want them, and as plain parameters."""
    if request.param == "packed" and not isa():
        pytest.skip("no native kernels are built for this processor")
    with forced_isa(isa() if request.param == "packed" else ""):
        yield


def rank_context(rank: int = 0, size: int = 1, dtype: str = "float32") -> ModelContext:
    place = RankFacts(tensor_parallel_rank=rank, tensor_parallel_size=size)
    return ModelContext(replace(tiny_config(), rank=place, dtype=dtype))


def whole(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def fill(layer: nn.Module, tensors: dict[str, Tensor]) -> None:
    load_weights(layer, tensors.items(), tiny_architecture())


QKV = {
    "a.q_proj.weight": whole(12, 5),
    "a.k_proj.weight": whole(6, 5),
    "a.v_proj.weight": whole(6, 5) + 1,
    "a.q_proj.bias": whole(12),
    "a.k_proj.bias": whole(6),
    "a.v_proj.bias": whole(6) + 1,
}


def test_qkv_computes_its_three_pieces_in_one_product() -> None:
    layer = QKVLinear(5, 6, 3, 2, bias=True, context=rank_context(), prefix="a")
    fill(layer, QKV)
    x = whole(4, 5)
    for out, name in zip(layer.split_heads(layer(x)), ("q_proj", "k_proj", "v_proj"), strict=True):
        expected = x @ QKV[f"a.{name}.weight"].T + QKV[f"a.{name}.bias"]
        torch.testing.assert_close(out, expected.view(4, -1, 2))


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "kv_heads_of_rank"),
    [
        (3, 3, [[0], [1], [2]]),
        (3, 1, [[0, 1, 2]]),
        (1, 3, [[0], [0], [0]]),  # fewer key heads than ranks: neighbours hold the same one
        (3, 6, [[0], [0], [1], [1], [2], [2]]),
    ],
)
def test_qkv_ranks_hold_a_key_head_with_its_query_heads(
    num_kv_heads: int, size: int, kv_heads_of_rank: list[list[int]]
) -> None:
    tensors = {
        name: tensor[: num_kv_heads * 2] if ".q_" not in name else tensor for name, tensor in QKV.items()
    }
    for rank, kv_heads in enumerate(kv_heads_of_rank):
        layer = QKVLinear(5, 6, num_kv_heads, 2, bias=True, context=rank_context(rank, size), prefix="a")
        fill(layer, tensors)
        heads_per_rank = 6 // size
        query, key, value = layer.split_heads(dense(layer.weight).T.contiguous())
        assert (layer.num_heads, layer.num_kv_heads) == (heads_per_rank, len(kv_heads))
        held = torch.arange(6)[rank * heads_per_rank : (rank + 1) * heads_per_rank]
        assert torch.equal(query.permute(1, 2, 0), tensors["a.q_proj.weight"].view(6, 2, 5)[held])
        assert torch.equal(key.permute(1, 2, 0), tensors["a.k_proj.weight"].view(-1, 2, 5)[kv_heads])
        assert torch.equal(value.permute(1, 2, 0), tensors["a.v_proj.weight"].view(-1, 2, 5)[kv_heads])


def test_shares_of_gate_up_and_down_sum_to_the_whole_mlp_product() -> None:
    tensors = {"m.gate_proj.weight": whole(8, 5), "m.up_proj.weight": whole(8, 5) * 2}
    down = {"d.weight": whole(5, 8)}
    x, partial_sums = whole(3, 5), []  # nobody adds them up: the ranks are not connected
    for rank in range(4):
        gate_up = GatedLinear(5, 8, activation="silu", bias=False, context=rank_context(rank, 4), prefix="m")
        row = RowLinear(8, 5, bias=False, context=rank_context(rank, 4), prefix="d")
        fill(gate_up, tensors)
        fill(row, down)
        assert tuple(gate_up.weight.shape) == (4, 5)
        assert tuple(row.weight.shape) == (5, 2)
        partial_sums.append(row(gate_up(x)))
    gate, up = x @ tensors["m.gate_proj.weight"].T, x @ tensors["m.up_proj.weight"].T
    expected = (torch.nn.functional.silu(gate) * up) @ down["d.weight"].T
    torch.testing.assert_close(sum(partial_sums), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "relu2", None])
def test_shares_of_up_and_down_sum_to_the_mlp_without_a_gate(activation: str | None) -> None:
    tensors = {"m.up.weight": whole(8, 5), "m.up.bias": whole(8)}
    down = {"d.weight": whole(5, 8), "d.bias": whole(5)}
    x, partial_sums = whole(3, 5), []
    for rank in range(4):
        context = rank_context(rank, 4)
        column = ColumnLinear(5, 8, activation=activation, bias=True, context=context, prefix="m.up")
        row = RowLinear(8, 5, bias=True, context=context, prefix="d")
        fill(column, tensors)
        fill(row, down)
        assert tuple(column.weight.shape) == (2, 5)
        partial_sums.append(row(column(x)))
    hidden = x @ tensors["m.up.weight"].T + tensors["m.up.bias"]
    hidden = hidden if activation is None else ACT2FN[activation](hidden)
    expected = hidden @ down["d.weight"].T + down["d.bias"]
    torch.testing.assert_close(sum(partial_sums), expected, rtol=1e-4, atol=1e-4)


def test_the_first_rank_alone_adds_the_bias() -> None:
    tensors = {"d.weight": whole(5, 8), "d.bias": whole(5)}
    x, partial_sums = whole(3, 8), []
    for rank in range(2):
        row = RowLinear(8, 5, bias=True, context=rank_context(rank, 2), prefix="d")
        fill(row, tensors)
        partial_sums.append(row(x[:, rank * 4 : rank * 4 + 4]))
        with pytest.raises(ModelError, match=r"d.bias: the checkpoint holds \[4\], the model needs \[5\]"):
            fill(row, tensors | {"d.bias": whole(4)})
    torch.testing.assert_close(sum(partial_sums), x @ tensors["d.weight"].T + tensors["d.bias"])


def test_ranks_share_out_the_vocabulary() -> None:
    table = whole(6, 4)
    for rank in range(3):
        embedding = VocabEmbedding(6, 4, context=rank_context(rank, 3), prefix="e")
        fill(embedding, {"e.weight": table})
        assert torch.equal(dense(embedding.weight), table[rank * 2 : rank * 2 + 2])


def test_an_uneven_vocabulary_is_shared_in_aligned_pieces() -> None:
    table = whole(70, 4)
    shares = []
    for rank in range(4):
        head = LogitsHead(70, 4, tied_to=None, context=rank_context(rank, 4), prefix="h")
        fill(head, {"h.weight": table})
        shares.append(dense(head.weight))
    assert [len(share) for share in shares] == [16, 16, 16, 22]
    assert torch.equal(torch.cat(shares), table)


def test_a_tied_head_shares_the_weight_of_the_embedding() -> None:
    context = rank_context(dtype="bfloat16")
    embedding = VocabEmbedding(6, 4, context=context, prefix="e")
    head = LogitsHead(6, 4, tied_to=embedding, context=context, prefix="h")
    assert head.weight is embedding.weight
    assert head.weight_targets() == {}
    fill(embedding, {"e.weight": whole(6, 4)})
    assert head(whole(2, 4).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    "build",
    [
        lambda context: QKVLinear(4, 5, 5, 2, bias=False, context=context, prefix="a"),
        lambda context: QKVLinear(4, 6, 4, 2, bias=False, context=context, prefix="a"),
        lambda context: GatedLinear(4, 7, activation="silu", bias=False, context=context, prefix="a"),
        lambda context: ColumnLinear(4, 7, activation=None, bias=False, context=context, prefix="a"),
        lambda context: RowLinear(7, 4, bias=False, context=context, prefix="a"),
        lambda context: VocabEmbedding(32, 4, context=context, prefix="a"),
    ],
    ids=["query heads", "key heads", "gate", "column", "row", "vocabulary"],
)
def test_uneven_shares_are_refused(build: Callable[[ModelContext], nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"parallel.tensor_parallel_size: 3 does not divide \w+"):
        build(rank_context(0, 3))


def test_parameters_have_the_resolved_dtype_and_no_gradient() -> None:
    norm = RMSNorm(4, 1e-5, context=rank_context(dtype="bfloat16"), prefix="n")
    fill(norm, {"n.weight": whole(4)})  # float32 in the checkpoint: rounded on the way in
    assert norm.weight.dtype == torch.bfloat16
    assert not norm.weight.requires_grad
    assert torch.equal(norm.weight, whole(4).bfloat16())


def test_a_norm_with_an_offset_keeps_the_bits_of_the_sum() -> None:
    norm = RMSNorm(40, 1e-5, offset=1.0, context=rank_context(dtype="bfloat16"), prefix="n")
    stored = (whole(40) / 100).bfloat16()
    fill(norm, {"n.weight": stored})
    assert norm.weight is not None
    assert torch.equal(norm.weight, stored.float() + 1)
    x = whole(3, 40).bfloat16()
    for residual in (None, whole(3, 40)):
        summed = x.float() if residual is None else x + residual
        expected = torch.rms_norm(summed, (40,), stored.float() + 1, 1e-5)
        out = norm(x, residual)
        out = out if residual is None else out[0]
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_norm_is_that_of_torch(has_bias: bool, dtype: str) -> None:
    norm = LayerNorm(40, 1e-5, bias=has_bias, context=rank_context(dtype=dtype), prefix="n")
    tensors = {"n.weight": whole(40), "n.bias": whole(40) + 1}
    fill(norm, tensors if has_bias else {"n.weight": whole(40)})
    x, residual = whole(3, 40), whole(3, 40) * 2
    out, summed = norm(x, residual)
    bias = tensors["n.bias"] if has_bias else None
    expected = torch.nn.functional.layer_norm(x + residual, (40,), tensors["n.weight"], bias, 1e-5)
    tolerance = 1e-5 if dtype == "float32" else 2**-5
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(summed, x + residual)


def test_norms_are_created_as_the_architecture_says() -> None:
    context = rank_context(dtype="bfloat16")

    def create(**spec: object) -> RMSNorm | LayerNorm:
        return create_norm(40, NormSpec(**spec), context=context, prefix="n")  # type: ignore[arg-type]

    assert isinstance(create(), RMSNorm)
    assert list(create(kind="layer", bias=True).weight_targets()) == ["n.weight", "n.bias"]
    for kind in ("rms", "layer"):
        norm = create(kind=kind, weight=False)
        fill(norm, {})
        assert norm(whole(3, 40)).dtype == torch.bfloat16
    with pytest.raises(FeatureDisabled, match="norm batch: this worker knows rms and layer"):
        create(kind="batch")


def test_every_complaint_about_a_checkpoint_is_made_at_once() -> None:
    layer = RowLinear(3, 2, bias=True, context=rank_context(), prefix="r")
    with pytest.raises(
        ModelError, match=r"1 tensors are missing: r.bias; 2 tensors are unexpected: s.weight, t"
    ):
        fill(layer, {"r.weight": whole(2, 3), "s.weight": whole(1), "t": whole(1)})


def test_a_tensor_of_another_shape_is_named_with_both_shapes() -> None:
    layer = RowLinear(3, 2, bias=False, context=rank_context(), prefix="r")
    with pytest.raises(
        ModelError, match=r"r.weight: the checkpoint holds \[3, 2\], the model needs \[2, 3\]"
    ):
        fill(layer, {"r.weight": whole(3, 2)})
    sharded = RowLinear(4, 2, bias=False, context=rank_context(1, 2), prefix="r")
    with pytest.raises(ModelError, match=r"holds \[2, 2\], the model needs \[2, 4\]"):
        fill(sharded, {"r.weight": whole(2, 2)})


def test_a_tensor_given_twice_is_refused() -> None:
    layer = RowLinear(3, 2, bias=False, context=rank_context(), prefix="r")
    twice = [("r.weight", whole(2, 3)), ("r.weight", whole(2, 3))]
    with pytest.raises(ModelError, match=r"r.weight: the checkpoint holds this tensor twice"):
        load_weights(layer, twice, tiny_architecture())


def test_long_lists_of_names_are_cut_short() -> None:
    layer = RowLinear(3, 2, bias=False, context=rank_context(), prefix="r")
    extra = {f"x{number}": whole(1) for number in range(8)}
    with pytest.raises(ModelError, match="8 tensors are unexpected: x0, x1, x2, x3, x4 and 3 more"):
        fill(layer, {"r.weight": whole(2, 3), **extra})


def test_one_checkpoint_tensor_is_held_at_a_time() -> None:
    layer = QKVLinear(2, 1, 1, 1, bias=False, context=rank_context(), prefix="a")
    events: list[str] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for row, (name, target) in enumerate(find_weight_targets(layer).items()):
            yield name, torch.full(target.checkpoint_shape, 7.0)
            events.append(f"{name} {'copied' if bool((dense(layer.weight)[row] == 7.0).all()) else 'lost'}")

    load_weights(layer, stream(), tiny_architecture())
    assert events == ["a.q_proj.weight copied", "a.k_proj.weight copied", "a.v_proj.weight copied"]


def test_a_bias_stands_beside_its_outputs() -> None:
    gated = GatedLinear(4, 20, activation="silu", bias=True, context=rank_context(), prefix="m")
    tensors = {
        f"m.{half}_proj.{part}": whole(20, 4) if part == "weight" else whole(20) + len(half)
        for half in ("gate", "up")
        for part in ("weight", "bias")
    }
    fill(gated, tensors)
    x = whole(3, 4)
    gate, up = (x @ tensors[f"m.{h}_proj.weight"].T + tensors[f"m.{h}_proj.bias"] for h in ("gate", "up"))
    torch.testing.assert_close(gated(x), torch.nn.functional.silu(gate) * up)


def test_xielu_is_that_of_transformers() -> None:
    theirs = XIELUActivation(dtype=torch.float32)
    stored = {
        "alpha_p": whole(1),
        "alpha_n": whole(1) - 1,
        "beta": torch.tensor([0.4]),
        "eps": torch.tensor([-0.1]),
    }
    theirs.load_state_dict(
        {name: numbers.view_as(theirs.state_dict()[name]) for name, numbers in stored.items()}
    )
    layer = XIelu(context=rank_context(), prefix="m.act_fn")
    fill(layer, {f"m.act_fn.{name}": numbers for name, numbers in stored.items()})
    special = torch.tensor([0.0, -0.0, -0.05, -1e-7, 1e-7, -100.0, 300.0, -1e30, float("inf"), float("nan")])
    x = torch.cat((special, 3 * whole(7, 30).flatten()))
    torch.testing.assert_close(layer(x), theirs(x), equal_nan=True)
    narrow = x.bfloat16()
    torch.testing.assert_close(layer(narrow), theirs(narrow.float()).bfloat16(), equal_nan=True)
