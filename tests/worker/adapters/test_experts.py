"""Rows with adapters of experts and routers, against what peft computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.adapters.mixtures import MIXTURES, save_adapters, save_mixture, split_by_expert
from tests.worker.adapters.trained import change_config, create, make_runner, merged, save_adapter, save_base
from tests.worker.models.checkpoints import greedy_tokens, save_checkpoint
from tests.worker.models.recurrent_families import RECURRENT_FAMILIES
from tests.worker.tiny import new_row, step_plan
from triptych.checkpoint.adapter import WEIGHTS_FILE
from triptych.checkpoint.config_json import read_architecture
from triptych.errors import ModelError
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_services.worker.adapters.store import AdapterStore
from triptych_services.worker.runner.base import Runner

pytestmark = pytest.mark.skipif(not isa(), reason="experts are adapted by native kernels")

PROMPTS = [[5, 9, 31, 44, 7], [60, 61, 62, 63, 64, 65, 66, 8], [8, 90, 17], [3], [12, 30, 41], [77, 76, 5, 6]]
ASKED = SamplingParams(temperature=0.0, logprobs=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Path]]]:
    """Base and adapters of a mixture."""
    made: dict[str, tuple[Path, list[Path]]] = {}

    def get(name: str) -> tuple[Path, list[Path]]:
        if name not in made:
            base = save_mixture(tmp_path_factory.mktemp("base"), name)
            made[name] = base, save_adapters(base, tmp_path_factory.mktemp("adapters"), name)
        return made[name]

    return get


def say(runner: Runner, digests: list[str], num_new: int, slots: range | None = None) -> tuple[Any, Any]:
    """Greedy tokens and log-probabilities of rows with these adapters, by slot."""
    runner.reset()
    slots = slots or range(len(digests))
    rows = [
        new_row(slot, PROMPTS[slot], range(1 + 8 * slot, 9 + 8 * slot), sampling=ASKED, adapter=digests[slot])
        for slot in slots
    ]
    plan = step_plan(1, new=rows, chunks={slot: len(PROMPTS[slot]) for slot in slots})
    tokens: dict[int, list[int]] = {slot: [] for slot in slots}
    logprobs: dict[int, list[np.ndarray]] = {slot: [] for slot in slots}
    for step_id in range(2, num_new + 2):
        result = runner.execute(plan)
        assert not result.row_errors
        for number, slot in enumerate(slots):
            tokens[slot].append(int(result.token_ids[number]))
            begin, end = result.logprobs.offsets[number : number + 2]
            logprobs[slot].append(result.logprobs.logprobs[begin:end].copy())
        plan = step_plan(step_id)
    return tokens, {slot: np.concatenate(parts) for slot, parts in logprobs.items()}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["recorded", "eager"])
@pytest.mark.parametrize("name", MIXTURES)
def test_batches_say_what_merged_models_say(saved, name: str, enforce_eager: bool) -> None:
    base, paths = saved(name)
    runner, store = make_runner(base, max_adapters=6, enforce_eager=enforce_eager, dtype="float32")
    digests = [*(store.load(path.name, "", path).digest for path in paths), ""]
    tokens, _ = say(runner, digests, 10)
    expected = [
        greedy_tokens(merged(base, path), PROMPTS[slot], 10) for slot, path in enumerate([*paths, None])
    ]
    assert list(tokens.values()) == expected
    assert len({tuple(greedy_tokens(merged(base, path), PROMPTS[0], 10)) for path in [*paths, None]}) == len(
        digests
    )


def test_experts_without_a_gate_serve_beside_slots(tmp_path: Path) -> None:
    tiny = RECURRENT_FAMILIES["Nemotron-H, experts"]  # here without states, so that rows have no pages
    arguments = tiny.arguments | {"layers_block_type": ["full_attention", "moe"] * 2}
    oracle = save_checkpoint(replace(tiny, arguments=arguments).create(), tmp_path)
    runner, _ = make_runner(tmp_path, max_adapters=2, dtype="float32")
    tokens, _ = say(runner, ["", ""], 10)
    assert list(tokens.values()) == [greedy_tokens(oracle, prompt, 10) for prompt in PROMPTS[:2]]


@pytest.mark.thorough
def test_projections_around_latent_experts_are_adapted(tmp_path: Path) -> None:
    tiny = RECURRENT_FAMILIES["Nemotron-H, latent experts"]
    arguments = tiny.arguments | {"layers_block_type": ["full_attention", "moe"] * 2}
    base, of_peft = tmp_path / "base", tmp_path / "of peft"
    oracle = save_checkpoint(replace(tiny, arguments=arguments).create(), base)
    targets = ["q_proj", "fc1_latent_proj", "fc2_latent_proj"]
    save_adapter(base, of_peft, seed=3, target_modules=targets)
    adapter = shutil.copytree(of_peft, tmp_path / "adapter")
    factors = load_file(of_peft / WEIGHTS_FILE)
    renamed = {name.replace(".model.model.", ".model.backbone."): factor for name, factor in factors.items()}
    save_file(renamed, adapter / WEIGHTS_FILE)
    runner, store = make_runner(base, max_adapters=2, dtype="float32")
    tokens, _ = say(runner, [store.load("a", "", adapter).digest, ""], 10)
    models = (merged(base, of_peft), oracle)
    expected = [greedy_tokens(model, prompt, 10) for model, prompt in zip(models, PROMPTS, strict=False)]
    assert list(tokens.values()) == expected
    assert expected[0] != greedy_tokens(oracle, PROMPTS[0], 10)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "projections", "infix"), [
    ("Mixtral", ("w1", "w3", "w2"), "block_sparse_moe"),
    ("Qwen3", ("gate_proj", "up_proj", "down_proj"), "mlp"),
])  # fmt: skip
def test_a_module_for_each_expert_is_the_same_adapter(saved, tmp_path, name, projections, infix) -> None:
    base, paths = saved(name)
    num_experts = 4 if name == "Mixtral" else 6
    split = split_by_expert(paths[0], tmp_path / "split", projections, infix, num_experts)
    runner, store = make_runner(base)
    both = [store.load(path.name, "", path).digest for path in (paths[0], split)]
    assert len(set(both)) == 2
    _, of_stacked = say(runner, both[:1], 4)
    _, of_modules = say(runner, both[1:], 4)
    np.testing.assert_array_equal(of_modules[0], of_stacked[0])


@pytest.mark.thorough
def test_bits_do_not_depend_on_the_batch(saved) -> None:
    base, paths = saved("Qwen2")
    runner, store = make_runner(base, max_adapters=6)
    digests = [*(store.load(path.name, "", path).digest for path in paths), ""]
    _, together = say(runner, digests, 4)
    for slot in range(len(digests)):
        _, alone = say(runner, digests, 4, range(slot, slot + 1))
        np.testing.assert_array_equal(alone[slot], together[slot])


@pytest.mark.thorough
def test_a_worker_that_serves_adapters_makes_the_same_calls(saved) -> None:
    base, _ = saved("Qwen2")

    def kernels(max_adapters: int) -> list[tuple[str, ...]]:
        recorded = create(base, max_adapters=max_adapters).runner.recorded()
        assert recorded is not None
        return [(*(stage.kernel for stage in call.stages), call.kernel) for call in recorded[0].calls]

    assert [call for call in kernels(4) if call != ("adapt_embedding",)] == kernels(0)


def test_memory_is_refused_with_numbers_before_factors_are_read(saved, tmp_path, monkeypatch) -> None:
    base, paths = saved("Qwen3")
    small = tmp_path / "small"
    shutil.copytree(paths[0], small)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(paths[0] / WEIGHTS_FILE).items()}
    save_file(tensors, small / WEIGHTS_FILE)  # half of the bytes that it takes in memory
    # 2 layers of 6 experts of rank 8, gate and up, then down; and queries
    num_bytes = 4 * 2 * 8 * (6 * (32 + 2 * 24 + 24 + 32) + 32 + 32)
    _, store = make_runner(base, max_bytes=num_bytes - 1, dtype="float32")
    monkeypatch.setattr("triptych_services.worker.adapters.store._read_tensors", None)
    with pytest.raises(ModelError, match=rf"needs {num_bytes} bytes; all adapters together have at most"):
        store.load("large", "", small)


MIXTURE = "base_model.model.model.layers.1.mlp.experts"
UP_A, UP_B = (f"{MIXTURE}.base_layer.lora_{part}.weight" for part in "AB")
DOWN_A, DOWN_B = (f"{MIXTURE}.lora_{part}.weight" for part in "AB")
NO_PROJECTION = "is no projection of this model"


def with_shapes(**shapes: tuple[int, int]) -> Callable[[Path], None]:
    """Put tensors of zeros into the file: name of a tensor above -> its shape."""
    names = {"up_a": UP_A, "up_b": UP_B, "down_a": DOWN_A, "down_b": DOWN_B}
    return with_tensors({names[short]: torch.zeros(shape) for short, shape in shapes.items()})


def with_module(name: str, rows: int, columns: int) -> Callable[[Path], None]:
    """Put a module of rank 8 into the file."""
    shapes = {"A": (8, columns), "B": (rows, 8)}
    return with_tensors({f"{name}.lora_{part}.weight": torch.zeros(shape) for part, shape in shapes.items()})


def with_tensors(more: dict[str, torch.Tensor]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        save_file(load_file(directory / WEIGHTS_FILE) | more, directory / WEIGHTS_FILE)

    return change


@pytest.fixture(scope="module")
def store(saved) -> AdapterStore:
    return make_runner(saved("Qwen3")[0], max_rank=8)[1]


@pytest.mark.parametrize(
    ("poison", "named"),
    [
        (with_tensors({UP_A: torch.full((48, 32), torch.nan)}), f"{UP_A}: holds numbers that are not finite"),
        (with_shapes(up_a=(48, 31)), r"gate_up_proj: is for \[48, 31\], the model has \[48, 32\]"),
        (with_shapes(down_b=(33, 48)), r"down_proj: is for \[33, 24\], the model has \[32, 24\]"),
        (with_shapes(down_a=(47, 24)), "cannot be multiplied"),
        (with_shapes(up_a=(47, 32), up_b=(48, 47)), "has 47 rows of A for the base's 6 experts"),
        (with_shapes(up_a=(54, 32), up_b=(48, 54)), "has rank 9; the config says 8"),
        (
            with_module(f"{MIXTURE}.2.up_proj", 24, 32),
            r"adapts .*\.2\.up_proj, as .*experts\.2\.up_proj does",
        ),
        (with_module(f"{MIXTURE}.6.gate_proj", 24, 32), rf"experts\.6\.gate_proj: {NO_PROJECTION}"),
        (with_module(f"{MIXTURE}.-1.gate_proj", 24, 32), rf"experts\.-1\.gate_proj: {NO_PROJECTION}"),
        (with_module(f"{MIXTURE}.0.gate_up_proj", 48, 32), rf"experts\.0\.gate_up_proj: {NO_PROJECTION}"),
        (with_module(f"{MIXTURE}.5.down_proj", 32, 25), r"experts\.5\.down_proj: is for \[32, 25\]"),
        (with_module(f"{MIXTURE}.gate_up_proj", 48, 32), "has factors of 0 experts, the module has 6"),
        (with_module(MIXTURE.replace("mlp", "moe"), 32, 24), "has factors for 1 parameters of these experts"),
        (change_config(target_parameters=None), "names none of gate_up_proj and down_proj"),
        (change_config(target_parameters=["experts.down_proj"]), "has factors for 2 parameters"),
        (change_config(target_parameters="all"), "target_parameters = 'all' is no list of names"),
        (change_config(r=9), "rank 9 of r is not within 1 to 8"),
        (change_config(rank_pattern={".*gate_up_proj": 4}), "gate_up_proj: has rank 8; the config says 4"),
    ],
)
def test_poison_is_refused_by_name(saved, store, tmp_path, poison, named) -> None:
    before = store.list()
    directory = tmp_path / "poison"
    shutil.copytree(saved("Qwen3")[1][0], directory)
    poison(directory)
    with pytest.raises(ModelError, match=named):
        store.load("poison", "", directory)
    assert store.list() == before


def test_a_dense_base_has_no_experts(saved, tmp_path) -> None:
    _, store = make_runner(save_base(tmp_path / "base"))
    with pytest.raises(ModelError, match="holds factors of experts, and the base has none"):
        store.load("poison", "", saved("Qwen3")[1][1])


def test_experts_in_plain_tensors_are_not_adapted(saved, tmp_path) -> None:
    """As on GPUs, and where sizes are odd."""
    _, paths = saved("Qwen3")
    odd = save_mixture(tmp_path / "odd", "Qwen3", moe_intermediate_size=23)
    _, store = make_runner(odd, dtype="bfloat16")
    with pytest.raises(ModelError, match="adapted by the native kernels of CPUs only, not in plain tensors"):
        store.load("poison", "", paths[1])


def test_a_stored_program_has_the_places_of_experts(saved) -> None:
    base, paths = saved("GPT-OSS")
    runner, store = make_runner(base, dtype="float32")
    facts = store.load("both", "", paths[0])
    record = json.loads(json.dumps(store.sites.record()))
    addresses = [np.zeros(len(own), np.int64) for own in store.sites.addresses]
    stored = AdapterStore(read_architecture(base), store.limits)
    stored.attach_stored(record, addresses)
    assert stored.load("both", "", paths[0]) == facts
    assert stored.sites.modules.keys() == store.sites.modules.keys()
    assert stored.slot_of(facts.digest) == 0
    assert sum(bool(own[0]) for own in addresses) == 2 * 3, (
        "queries, and both products of experts, in two layers"
    )
    del runner
