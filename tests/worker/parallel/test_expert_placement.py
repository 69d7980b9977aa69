"""Ranks that hold experts by how often they are chosen: who holds which, and files of counts that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.checkpoint.gguf_families import CONVERSIONS
from tests.checkpoint.gguf_recordings import write_recorded
from tests.hub.conftest import cache  # noqa: F401 - a fixture
from tests.worker.models.checkpoints import SIZES, save_checkpoint
from tests.worker.quantized_files import save_experts
from tests.worker.tiny import dense, tiny_architecture, tiny_config
from triptych.checkpoint.architecture import ExpertsSpec, ModelArchitecture
from triptych.checkpoint.config_json import read_architecture
from triptych.config import EngineConfig, ParallelConfig
from triptych.errors import ConfigError, HandshakeMismatch
from triptych.hub import resolve_model
from triptych.types.identity import ModelIdentity
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.expert_placement import (
    ExpertPlacement,
    describe_counts,
    place_experts,
    read_placement,
)
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.rank_group import OneRank
from triptych_services.worker.context.resolved_config import RankFacts
from triptych_services.worker.layers.moe import SparseMoE, layer_of
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.parallel.create import check_agreement
from triptych_services.worker.runner.startup.draft import config_of
from triptych_services.worker.runner.startup.facts import numerics_of

NUM_EXPERTS = 4
SKEWED = [30, 10, 9, 1]
SIZES_OF_MIXTURE = {
    **{name: size for name, size in SIZES.items() if name != "attn_implementation"},
    "hidden_size": 64,
    "head_dim": 16,
}


def mixture() -> ModelArchitecture:
    """Three layers, of which the second is dense."""
    architecture = tiny_architecture(num_layers=3)
    layer = replace(architecture.layers[0], mlp="experts", experts=ExpertsSpec(NUM_EXPERTS, 2))
    return replace(architecture, layers=(layer, architecture.layers[1], layer))


def write(path: Path, counts: Any, **others: Any) -> str:
    path.write_text(json.dumps({"layers": counts, **others}))
    return str(path)


@pytest.mark.parametrize(
    ("counts", "num_ranks", "order"),
    [
        (SKEWED, 2, (0, 3, 1, 2)),
        ([1, 9, 10, 30], 2, (0, 3, 1, 2)),
        ([5, 5, 5, 5], 2, (0, 1, 2, 3)),  # no order is better than that of the numbers
        ([0, 0, 0, 0], 2, (0, 1, 2, 3)),
        ([7, 7, 1, 1], 2, (0, 2, 1, 3)),  # of equal experts and ranks the lower number
        ([9, 0, 0, 8, 7, 1], 3, (0, 1, 2, 3, 4, 5)),  # 9 alone decides, as it does among neighbours
        ([9, 8, 0, 0, 7, 1], 3, (0, 3, 1, 2, 4, 5)),
        (SKEWED, 1, (0, 1, 2, 3)),
    ],
)
def test_the_busiest_expert_goes_to_the_idlest_rank(
    counts: list[int], num_ranks: int, order: tuple[int, ...]
) -> None:
    assert place_experts(counts, num_ranks) == order


def test_no_rank_has_more_choices_than_among_neighbours() -> None:
    generator = torch.Generator().manual_seed(1)
    for num_experts, num_ranks in ((8, 2), (60, 4), (128, 8), (256, 64)):
        counts = (torch.rand(num_experts, generator=generator) ** 4 * 1e6).long().tolist()
        order = place_experts(counts, num_ranks)
        each = num_experts // num_ranks
        held = [order[first : first + each] for first in range(0, num_experts, each)]
        assert sorted(order) == list(range(num_experts))
        assert all(list(own) == sorted(own) for own in held)
        busiest = max(sum(counts[expert] for expert in own) for own in held)
        neighbours = max(sum(counts[first : first + each]) for first in range(0, num_experts, each))
        assert busiest <= neighbours
        assert busiest - sum(counts) / num_ranks <= max(counts)


def test_counts_of_a_worker_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_bytes(describe_counts("qwen", "abc", {0: SKEWED, 2: [1, 1, 1, 1]}))
    placement = read_placement(str(path), mixture(), num_ranks=2)
    assert placement.orders == {0: (0, 3, 1, 2), 2: (0, 1, 2, 3)}
    assert (placement.order_of(0), placement.order_of(2), placement.order_of(1)) == ((0, 3, 1, 2), None, None)
    placement.check_weights("abc")
    with pytest.raises(
        ConfigError, match=r"counts\.json: weights: found abc, of qwen, expected def, of this check"
    ):
        placement.check_weights("def")
    read_placement(write(path, {"0": SKEWED, "2": SKEWED}), mixture(), num_ranks=2).check_weights("def")


FULL = {"0": SKEWED, "2": SKEWED}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"found no JSON \(.*\), expected a file as /expert_counts"),
        ("[" * 100_000, "found no JSON"),
        ("[1]", "layers: found none, expected"),
        ({"layers": [SKEWED]}, "layers: found none, expected"),
        ({"layers": FULL, "weights": 3}, "weights: found 3, expected a string"),
        (
            {"layers": {"0": SKEWED}},
            "layers: found 1 layers, expected those of the 2 mixtures of LlamaFor.*; it lacks '2'",
        ),
        ({"layers": FULL | {"1": SKEWED}}, "layers: found 3 layers, expected .* it has '1'"),
        ({"layers": FULL | {"2": [1, 2, 3]}}, r"layers\.2: found 3 counts, expected those of 4 experts"),
        ({"layers": FULL | {"2": "many"}}, r"layers\.2: found 'many', expected those of 4 experts"),
        (
            {"layers": FULL | {"2": [1, 2, -3, 4]}},
            r"layers\.2: found -3 for expert 2, expected an integer from 0",
        ),
        ({"layers": FULL | {"2": [1, True, 3, 4]}}, r"layers\.2: found True for expert 1"),
        ({"layers": FULL | {"2": [1, 2, 3, 0.5]}}, r"layers\.2: found 0\.5 for expert 3"),
        ({"layers": FULL | {"2": [1, 2, float("nan"), 4]}}, r"layers\.2: found nan for expert 2"),
        ('{"layers": {"0": [' + "9" * 5000 + "]}}", r"found no JSON \(Exceeds the limit"),
        ({"layers": FULL | {"0": [1 << 63, 2, 3, 4]}}, r"layers\.0: found 9223372036854775808 for expert 0"),
        (" " * (16 << 20) + "{}", "found more than 16777216 bytes"),
    ],
)
def test_files_that_do_not_fit_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=rf"^parallel\.expert_counts: {path}: {message}"):
        read_placement(str(path), mixture(), num_ranks=2)


def resolve(num_ranks: int = 2, **options: Any) -> Any:
    engine = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=num_ranks, **options))
    return resolve_config(engine, replace(mixture(), name="MixtralForCausalLM"))


def test_counts_are_read_for_ranks_of_whole_experts_only(tmp_path: Path) -> None:
    path = write(tmp_path / "counts.json", FULL)
    with pytest.raises(
        ConfigError, match=r"expert_counts: .*counts\.json, but parallel\.expert_parallel is f"
    ):
        resolve(expert_counts=path)
    with pytest.raises(ConfigError, match=r"expert_counts: .*/none: cannot be read: No such file"):
        resolve(expert_counts=str(tmp_path / "none"), expert_parallel=True)
    with pytest.raises(ConfigError, match=r"expert_parallel: 3 ranks .* cannot share num_experts = 4 evenly"):
        resolve(3, expert_counts=path, expert_parallel=True)
    with pytest.raises(ConfigError, match=rf"expert_counts: {tmp_path}: found no regular file"):
        resolve(expert_counts=str(tmp_path), expert_parallel=True)
    with pytest.raises(ConfigError, match=r"expert_counts: ~no\.body/a: cannot be read: "):
        resolve(expert_counts="~no.body/a", expert_parallel=True)
    assert resolve(expert_parallel=True).expert_placement is None
    config = resolve(expert_parallel=True, expert_counts=path)
    assert config.expert_placement.order_of(2) == (0, 3, 1, 2)


def test_choices_of_what_guesses_are_not_counted(tmp_path: Path) -> None:
    config = resolve(1, expert_parallel=True, expert_counts=write(tmp_path / "counts.json", FULL))
    name = "model.layers.2.mlp"
    assert layer_of(name, ModelContext(config)) == 2
    assert layer_of("model.layers.3.mlp", ModelContext(config)) == -1, "behind the last: it guesses"
    draft = config_of(config, tiny_architecture())  # it has no experts that ranks could share
    assert (draft.expert_placement, layer_of(name, ModelContext(draft))) == (None, -1)


def test_ranks_agree_on_the_file_and_not_on_its_path(tmp_path: Path) -> None:
    config = resolve(expert_parallel=True, expert_counts=write(tmp_path / "counts.json", FULL))
    same, other = (
        resolve(expert_parallel=True, expert_counts=write(tmp_path / name, counts))
        for name, counts in (("same.json", FULL), ("other.json", {"0": SKEWED, "2": SKEWED[::-1]}))
    )

    said: list[str] = []

    class AfterOthers(OneRank):
        def exchange(self, text: str) -> list[str]:
            said.append(text)
            return list(said)

    for each in (config, same):
        check_agreement(each, AfterOthers(), identity=ModelIdentity("f", "w"), processor="avx2")
    with pytest.raises(HandshakeMismatch, match=r"^expert counts: rank 0 has '[0-9a-f]{64}', rank 2 has '"):
        check_agreement(other, AfterOthers(), identity=ModelIdentity("f", "w"), processor="avx2")
    numerics = [numerics_of(each, processor="avx2", block_size=16) for each in (config, same, other)]
    assert numerics[0] == numerics[1] != numerics[2], "sums over ranks are those of other experts"


def of_names(directory: Path) -> Path:
    config = Qwen3MoeConfig(
        **SIZES_OF_MIXTURE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
    )
    save_checkpoint(Qwen3MoeForCausalLM(config), directory)
    return directory


def stacked(directory: Path) -> Path:
    save_checkpoint(GptOssForCausalLM(gpt_oss()), directory)
    return directory


def of_codes(directory: Path) -> Path:
    save_experts(directory, None, GptOssForCausalLM(gpt_oss()))
    return directory


def gpt_oss() -> GptOssConfig:
    return GptOssConfig(
        **{**SIZES_OF_MIXTURE, "intermediate_size": 96},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )


def of_blocks(directory: Path) -> Path:
    CONVERSIONS["Mixtral"].save(directory / "checkpoint")
    write_recorded("Mixtral", directory / "checkpoint", directory / "model.gguf")
    return resolve_model(str(directory / "model.gguf"), progress=False)


@pytest.mark.usefixtures("cache")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("save", [stacked, of_names, of_codes, of_blocks])
def test_a_rank_loads_the_experts_that_it_is_given(save: Callable[[Path], Path], tmp_path: Path) -> None:
    directory = save(tmp_path)
    architecture = read_architecture(directory)
    form = "stored" if save is of_codes and isa() else "none"
    plain = replace(tiny_config(architecture), quantization=form)
    whole = mixtures_of(load_model(plain, open_checkpoint(directory)))
    orders = {layer: (3, 1, 0, 2) if layer % 2 else (0, 2, 1, 3) for layer in whole}
    placement = ExpertPlacement("", "", "", "", orders)
    for rank in range(2):
        config = replace(
            plain,
            engine=replace(plain.engine, parallel=ParallelConfig(expert_parallel=True)),
            rank=RankFacts(tensor_parallel_rank=rank, tensor_parallel_size=2),
            expert_placement=placement,
        )
        held = mixtures_of(load_model(config, open_checkpoint(directory), group=OneRank(rank, 2, 2)))
        for layer, moe in held.items():
            assert moe.router.choice.layer == layer
            index = moe.router.weight_index
            assert index is not None
            assert [int(index[expert]) for expert in orders[layer]] == [0, 1, 2, 3]
            own = orders[layer][2 * rank : 2 * rank + 2]
            for place, expert in enumerate(own):
                for name in ("w13", "w2"):
                    mine, expected = (getattr(each.experts, name) for each in (moe, whole[layer]))
                    assert torch.equal(dense(mine[place]), dense(expected[expert])), (layer, expert)


def mixtures_of(model: Any) -> dict[int, SparseMoE]:
    found = {
        layer: module
        for layer, of_layer in enumerate(model.model.layers)
        for module in of_layer.modules()
        if isinstance(module, SparseMoE)
    }
    assert found
    return found
