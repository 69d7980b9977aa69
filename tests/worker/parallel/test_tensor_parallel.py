"""Several ranks say what one says: real processes over gloo, each with its share of a checkpoint."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.processes import free_port
from tests.worker.models.families import FAMILIES
from tests.worker.ranks import (
    Answer,
    Case,
    Together,
    compute,
    plans,
    run_ranks,
    save_checkpoint,
    uneven_counts,
)
from tests.worker.tiny import dense, tiny_architecture, tiny_config
from triptych.config import ParallelConfig
from triptych.errors import ConfigError, FeatureDisabled, HandshakeMismatch, RankUnavailable
from triptych.types.identity import ModelIdentity
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.rank_group import OneRank
from triptych_services.worker.context.resolved_config import RankFacts
from triptych_services.worker.layers.checkpoint_tensors import load_weights
from triptych_services.worker.layers.linear import RowLinear
from triptych_services.worker.layers.quantization import StoredBlocks
from triptych_services.worker.models.registry import create_model
from triptych_services.worker.parallel.create import check_agreement
from triptych_services.worker.parallel.process_group import meet
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache

SIZES: dict[str, Any] = {
    "vocab_size": 97,  # which no number of ranks divides
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS = {
    "biases, odd vocabulary": {"architectures": ["LlamaForCausalLM"], **BIASES},
    "one key head, tied": {
        "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1, "tie_word_embeddings": True,
    },
    "norms of heads, even vocabulary": {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 96},
    "experts": {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2,
    },
}  # fmt: skip
NUM_RANKS_OF = {
    "four ranks, two key heads": ("biases, odd vocabulary", 4, "none"),
    **{name: (name, 2, "none") for name in MODELS},
    **({"8 bits": ("one key head, tied", 2, "q8")} if isa() else {}),
}
"""Case -> model, ranks, quantization."""
OTHER_FAMILIES = (
    "Apertus",
    "BLOOM",
    "Cohere",
    "DeepSeek V2 Lite",
    "DeepSeek V3",
    "DeepSeek V3.2",
    "GLM 5",
    "Falcon 40B",
    "Falcon, in turn",
    "Gemma 2",
    "GPT-2",
    "GPT-BigCode",
    "GPT-NeoX",
    "GPT-OSS",
    "MiniCPM 3",
    "Ministral 3",
    "Nemotron",
    "Phi",
    "Phi 3",
    "Youtu, halves",
)
"""Slopes and sinks of heads, latents, tensors that are fused, interleaved or transposed, biases of heads and of plain
MLPs."""
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek V3": ("DeepSeek V3", {}),
    "GLM 4.5": ("GLM 4.5", {}),
    "GPT-OSS": ("GPT-OSS", {"num_local_experts": 4}),
    "Llama 4": ("Llama 4", {"num_local_experts": 4}),
    "Mixtral": ("Mixtral", {}),
    "Qwen 2 MoE": ("Qwen 2 MoE", {"num_experts": 4}),
    "Qwen 3 MoE": ("Qwen 3 MoE", {"num_experts": 8}),
}
"""Case -> family, keys of its config. Routers by softmax and by sigmoids in groups, experts that are stacked, biased or
read scaled inputs, and shared ones."""
BFLOAT16 = "bfloat16"
GUESSES = "guesses"
LOSES_A_RANK = "norms of heads, even vocabulary"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    directories = {}
    for name, config in MODELS.items():
        directory = tmp_path_factory.mktemp("model")
        directories[name] = save_checkpoint(directory, SIZES | config)
    in_bfloat16 = Case(directories["biases, odd vocabulary"], 2, port=free_port(), dtype="bfloat16")
    (directories["biases, odd vocabulary"] / "tokenizer.json").write_text(byte_backend().to_str())
    guessing = Case(
        directories["biases, odd vocabulary"],
        2,
        port=free_port(),
        prompts=tuple((5, 6, 7 + number) * 5 for number in range(5)),
        num_new=30,
        num_blocks=30,  # three of five requests
        preempts=True,
        guesses=True,
        proposers="ngram,draft",
        guessing=directories["biases, odd vocabulary"],
    )
    return {
        name: Case(
            directories[model],
            num_ranks,
            port=free_port(),
            quantization=quantization,
        )
        for name, (model, num_ranks, quantization) in NUM_RANKS_OF.items()
    } | {BFLOAT16: in_bfloat16, GUESSES: guessing}


@pytest.fixture(scope="module")
def answers(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Those of all ranks, by case: `Answer`, or `Together`."""
    return run_ranks(cases, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NUM_RANKS_OF)
def test_ranks_say_what_one_says(name: str, cases: dict[str, Case], answers: dict[str, list[Answer]]) -> None:
    alone = compute(replace(cases[name], num_ranks=1), rank=0)
    first, *others = answers[name]
    assert first.token_ids == alone.token_ids
    assert len({token for step in first.token_ids for token in step}) > 10, "the models do say something"
    for ours, expected in zip(first.logprobs, alone.logprobs, strict=True):
        # float32, sums over ranks in another order; logits of size 10
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=2e-4)
    assert len(first.vectors) == 4
    for ours, expected in zip(first.vectors, alone.vectors, strict=True):  # of length 1
        np.testing.assert_allclose(ours, expected, atol=2e-5)
    for other in others:  # to the bit: nobody tells them the tokens
        assert other.token_ids == first.token_ids
        assert all(map(np.array_equal, other.logprobs, first.logprobs))
        assert all(map(np.array_equal, other.vectors, first.vectors))


def check_guesses(first: Together, second: Together) -> None:
    """Hold what two ranks say with guesses to what they say without any."""
    half = len(first.tokens) // 2
    assert first.tokens[half:] == first.tokens[:half], "as without guesses"
    assert any(first.logprobs)
    for found, expected in zip(first.logprobs[half:], first.logprobs[:half], strict=True):
        assert all(map(np.array_equal, found, expected))
    assert second.steps == first.steps, "each rank chooses its tokens by itself"


@pytest.mark.skipif(not isa(), reason="without native kernels numbers depend on the batch")
def test_guesses_of_one_rank_are_verified_by_all(answers: dict[str, list[Together]]) -> None:
    """Those of the text and those of a draft model. Requests are preempted meanwhile."""
    first, second = answers[GUESSES]
    check_guesses(first, second)
    for num_guesses, num_right in (first.guesses["ngram"], first.guesses["draft"]):
        assert 20 < num_right < num_guesses, "right ones and wrong ones"


@pytest.mark.thorough
@pytest.mark.parametrize("num_stages", [1, 2])
def test_ranks_share_what_other_families_have(num_stages: int, tmp_path: Path) -> None:
    cases = {}
    for name in OTHER_FAMILIES:
        directory = tmp_path / name
        config = FAMILIES[name].config()
        config.architectures = [type(FAMILIES[name].create()).__name__]
        config.save_pretrained(directory)
        save_checkpoint(directory, json.loads((directory / "config.json").read_text()))
        cases[name] = Case(directory, 2, num_stages, port=free_port())
    answers = run_ranks(cases, tmp_path)
    for name, (first, second) in answers.items():
        alone = compute(replace(cases[name], num_ranks=1, num_stages=1), rank=0)
        assert first.token_ids == second.token_ids == alone.token_ids, name
        for ours, expected in zip(first.logprobs, alone.logprobs, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=5e-4, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "is_placed"), [(2, 1, True), (4, 1, False), (4, 2, True)]
)
def test_ranks_of_whole_experts_say_what_transformers_does(
    num_ranks: int, num_stages: int, is_placed: bool, tmp_path: Path
) -> None:
    cases = {}
    for name, (family, keys) in EXPERTS.items():
        tiny = FAMILIES[family]
        config = replace(tiny, arguments={**tiny.arguments, **keys}).config()
        config.architectures = [type(tiny.create()).__name__]
        directory = tmp_path / name
        config.save_pretrained(directory)
        save_checkpoint(directory, json.loads((directory / "config.json").read_text()))
        counts = uneven_counts(directory) if is_placed else ""
        cases[name] = Case(
            directory, num_ranks, num_stages, free_port(), expert_parallel=True, expert_counts=counts
        )
    answers = run_ranks(cases, tmp_path)
    for name, (first, *others) in answers.items():
        alone = compute(replace(cases[name], num_ranks=1, num_stages=1, expert_counts=""), rank=0)
        assert first.token_ids == alone.token_ids, name
        assert all(other.token_ids == first.token_ids for other in others), name
        for ours, expected in zip(first.logprobs, alone.logprobs, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=5e-4, err_msg=name)
        # the request that is greedy, from its prompt of one token
        model = AutoModelForCausalLM.from_pretrained(cases[name].directory, dtype=torch.float32).eval()
        text = plans()[0].new_rows[0].content.prompt_token_ids.tolist()
        for step in first.token_ids:
            logits = model(torch.tensor([text]), use_cache=False).logits[0, -1]
            assert step[0] == logits.argmax(), name
            text = [*text, step[0]]


@pytest.mark.thorough
@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
def test_experts_in_groups_are_whole_on_each_rank(tmp_path: Path) -> None:
    """32 columns, which two ranks would cut."""
    config = SIZES | MODELS["experts"] | {"num_local_experts": 4, "intermediate_size": 32}
    case = Case(save_checkpoint(tmp_path, config), 2, port=free_port(), quantization="q8")
    with pytest.raises(FeatureDisabled, match=r"do not divide intermediate_size / .* = 32 / 2"):
        compute(case, rank=0)
    case = replace(case, expert_parallel=True)
    first, second = run_ranks({"q8": case}, tmp_path)["q8"]
    alone = compute(replace(case, num_ranks=1), rank=0)
    assert first.token_ids == second.token_ids == alone.token_ids
    assert first.kernels.endswith("recorded")
    assert first.weight_bytes < 0.75 * alone.weight_bytes  # of its two layers of mixtures, half of each


@pytest.mark.thorough
def test_ranks_add_up_in_the_precision_of_activations(
    cases: dict[str, Case], answers: dict[str, list[Answer]]
) -> None:
    alone = compute(replace(cases[BFLOAT16], num_ranks=1), rank=0)
    first, second = answers[BFLOAT16]
    assert second.token_ids == first.token_ids
    assert all(map(np.array_equal, second.logprobs, first.logprobs))
    # prompts, before any token can differ: each sum rounds its parts to 8 bits; logits of size 10
    np.testing.assert_allclose(first.logprobs[0], alone.logprobs[0], atol=0.2)


def test_each_rank_holds_its_share(cases: dict[str, Case], answers: dict[str, list[Answer]]) -> None:
    name = "four ranks, two key heads"
    alone = compute(replace(cases[name], num_ranks=1), rank=0)
    assert alone.num_kv_heads == 2
    assert not torch.distributed.is_initialized(), "one rank has nobody to connect to"
    for rank in answers[name]:
        assert rank.num_kv_heads == 1
        assert rank.weight_bytes < 0.4 * alone.weight_bytes  # norms, key heads and padding are in several
        assert rank.fingerprint == alone.fingerprint
        assert rank.num_blocks == alone.num_blocks
        assert rank.kernels.endswith("recorded") == bool(isa())


@pytest.mark.thorough  # what shares memory notices by time only; tests/worker/group has losses that are noticed at once
def test_a_lost_rank_is_named_and_ends_the_group(cases: dict[str, Case], tmp_path: Path) -> None:
    case = replace(cases[LOSES_A_RANK], port=free_port(), loses_a_rank=True)
    lost, after = run_ranks({LOSES_A_RANK: case}, tmp_path)[LOSES_A_RANK][0].after_the_loss
    # of a recorded program, or of a sum by messages
    assert re.match(r"rank 0 of 2: (a step|all_reduce) failed: ", lost)
    assert after.startswith("rank 0 of 2: a step failed (")
    assert after.endswith("restart all ranks")


def parallel(port: int, timeout_s: float = 0.3) -> ParallelConfig:
    return ParallelConfig(rendezvous_address=f"127.0.0.1:{port}", timeout_s=timeout_s)


def test_ranks_that_do_not_come_are_named() -> None:
    port = free_port()
    with pytest.raises(
        RankUnavailable,
        match=rf"parallel.rendezvous_address: 127.0.0.1:{port}: rank 0 of 3 waited 0.3 s .* for ranks \[1, 2\]",
    ):
        meet(parallel(port), 0, 3)
    with pytest.raises(RankUnavailable, match=r"rank 1 of 3 waited 0.3 s .* for rank 0 to listen there"):
        meet(parallel(free_port()), 1, 3)


def test_an_invalid_rendezvous_address_is_refused() -> None:
    for address in ("nowhere", ":29500", "host:0", "host:65536", "host:x"):
        with pytest.raises(ConfigError, match=rf"parallel.rendezvous_address: '{address}' is not host:port"):
            meet(ParallelConfig(rendezvous_address=address), 0, 2)


def test_a_rank_given_to_two_workers_is_an_error() -> None:
    port, errors = free_port(), []

    def come(rank: int) -> None:
        try:
            meet(parallel(port, 1.0), rank, 3)
        except (ConfigError, RankUnavailable) as error:
            errors.append(str(error))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any("worker.rank: 1 was given to two workers" in error for error in errors)
    assert any("for ranks [2]" in error for error in errors)


def test_ranks_that_differ_are_refused_before_they_load() -> None:
    config = tiny_config()

    class Two(OneRank):
        def exchange(self, text: str) -> list[str]:
            return [text, text.replace('"q8"', '"q4"').replace("abc", "abd")]

    config = replace(config, quantization="q8")
    with pytest.raises(HandshakeMismatch) as refusal:
        check_agreement(config, Two(0, 2), identity=ModelIdentity("abc"), processor="avx2")
    assert str(refusal.value).startswith(
        "checkpoint: rank 0 has 'abc', rank 1 has 'abd'; quantization: rank 0 has 'q8', rank 1 has 'q4'; give all"
    )
    check_agreement(tiny_config(), OneRank(), identity=ModelIdentity("abc"), processor="avx2")


def test_a_sharded_model_needs_connected_ranks() -> None:
    config = replace(tiny_config(), rank=RankFacts(tensor_parallel_size=2))
    with pytest.raises(AssertionError, match="are connected"):
        create_model(context=ModelContext(config))


def test_fewer_key_heads_make_smaller_blocks() -> None:
    config = tiny_config(tiny_architecture(num_kv_heads=2))
    whole = plan_kv_cache(config, 1 << 30)
    half = plan_kv_cache(replace(config, rank=RankFacts(tensor_parallel_size=2)), 1 << 30)
    assert (whole.shape.num_kv_heads, half.shape.num_kv_heads) == (2, 1)
    assert whole.shape.block_bytes == 2 * half.shape.block_bytes


@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
def test_blocks_of_a_file_are_shared_out_as_they_are() -> None:
    rows, columns, num_ranks = 5, 128, 2
    blocks = torch.randint(0, 256, (rows, columns // 32, 34), dtype=torch.uint8)  # Q8_0: d, 32 signed bytes
    scales = torch.rand(rows, columns // 32, 1).half()
    blocks[:, :, :2] = scales.view(torch.uint8)
    whole = (blocks[:, :, 2:].view(torch.int8) * scales.float()).flatten(1)
    stored = StoredBlocks("Q8_0", blocks.flatten(1), (rows, columns), lambda: pytest.fail("quantized again"))
    for rank in range(num_ranks):
        place = RankFacts(tensor_parallel_rank=rank, tensor_parallel_size=num_ranks)
        config = replace(tiny_config(), rank=place, quantization="q8")
        context = ModelContext(config, tensor_types={"d.weight": "Q8_0"})
        row = RowLinear(columns, rows, bias=False, context=context, prefix="d")
        load_weights(row, [("d.weight", stored)], config.architecture)
        assert torch.equal(dense(row.weight), whole[:, rank * 64 : rank * 64 + 64])


@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
def test_quantized_groups_that_ranks_would_cut_are_refused(cases: dict[str, Case]) -> None:
    case = replace(cases["one key head, tied"], num_ranks=4, quantization="q8")
    with pytest.raises(
        FeatureDisabled,
        match=r"groups of 32, which do not divide num_heads \* head_dim / parallel.tensor_parallel_size = 64 / 4",
    ):
        compute(case, rank=0)
