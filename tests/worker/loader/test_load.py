"""Weights come out of every kind of file under Hugging Face's names and in its layout."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import time
from dataclasses import make_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoint.gguf_files import byte_level_vocabulary, random_blocks, use_own_cache, write_gguf
from tests.worker.tiny import dense, tiny_architecture, tiny_config
from triptych.checkpoint.architecture import BlockSpec
from triptych.checkpoint.config_json import read_architecture
from triptych.config import EngineConfig, ModelConfig, WorkerConfig
from triptych.errors import ModelError
from triptych.hub import resolve_model
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.loader.base import Checkpoint, digest_weights, fingerprint
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.loader.random import RandomCheckpoint

VOCABULARY = byte_level_vocabulary(["a b", "ab c"])
CONFIG = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=len(VOCABULARY["tokens"]),
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    attention_bias=True,
)

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A tiny model whose every tensor is random, the ones that start as constants included."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for parameter in model.parameters():
        parameter.data.normal_()
    return model


def read_all(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: checkpoint.read(name, dtype) for name in checkpoint.tensors}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


class TestSafetensors:
    @pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_what_transformers_saves_is_read_back(
        self, tmp_path: Path, model: LlamaForCausalLM, dtype: torch.dtype, max_shard_size: str
    ) -> None:
        stored = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
        model.save_pretrained(tmp_path, state_dict=dict(stored), max_shard_size=max_shard_size)
        checkpoint = open_checkpoint(tmp_path)
        assert (len(checkpoint.file_name_to_size) > 1) == (max_shard_size == "100KB")
        assert_same(read_all(checkpoint, dtype), stored)
        assert_same(read_all(checkpoint), {name: tensor.float() for name, tensor in stored.items()})
        assert checkpoint.tensors["model.norm.weight"].shape == (96,)

    def test_reading_never_changes_the_file(self, tmp_path: Path, model: LlamaForCausalLM) -> None:
        model.save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
        path.chmod(0o444)
        before = path.read_bytes()
        open_checkpoint(tmp_path).read("model.norm.weight", torch.float32).zero_()
        assert path.read_bytes() == before

    def test_the_device_converts_what_is_stored_in_another_dtype(
        self, tmp_path: Path, model: LlamaForCausalLM
    ) -> None:
        stored = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
        model.save_pretrained(tmp_path, state_dict=stored)
        checkpoint = open_checkpoint(tmp_path, device=torch.device("meta"))
        name = "model.norm.weight"
        assert checkpoint.read(name, torch.float32).device.type == "meta"
        assert checkpoint.read(name, torch.bfloat16).device.type == "cpu", (
            "it is copied to its place as it is"
        )

    def test_a_file_that_is_cut_short_is_named_with_its_size(
        self, tmp_path: Path, model: LlamaForCausalLM
    ) -> None:
        model.save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
        for size in (path.stat().st_size - 1, 100, 0):
            os.truncate(path, size)
            with pytest.raises(
                ModelError, match=rf"model\.safetensors: weight file of {size} bytes cannot be read: .*header"
            ):
                open_checkpoint(tmp_path)

    def test_a_missing_shard_is_named(self, tmp_path: Path, model: LlamaForCausalLM) -> None:
        model.save_pretrained(tmp_path, max_shard_size="100KB")
        name = "model-00002-of-"
        (shard,) = tmp_path.glob(f"{name}*")
        shard.unlink()
        with pytest.raises(ModelError, match=rf"{name}.*: weight file cannot be read: No such file"):
            open_checkpoint(tmp_path)

    def test_a_tensor_that_the_index_names_and_no_shard_has_is_named(self, tmp_path: Path) -> None:
        save_file({"a": torch.zeros(3)}, tmp_path / "one.safetensors")
        weight_map = {"a": "one.safetensors", "b": "one.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=r"one\.safetensors: b: is missing"):
            open_checkpoint(tmp_path)

    def test_a_tensor_that_stands_in_two_shards_is_named(self, tmp_path: Path) -> None:
        for name, others in (("one", {}), ("two", {"b": torch.zeros(2)})):
            save_file({"a": torch.zeros(3), **others}, tmp_path / f"{name}.safetensors")
        weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=r"two\.safetensors: a: is in another file too"):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "a/../../one.safetensors"])
    def test_an_index_that_names_a_file_outside_is_refused(self, tmp_path: Path, name: str) -> None:
        save_file({"a": torch.zeros(3)}, tmp_path / "one.safetensors")
        directory = tmp_path / "model"
        directory.mkdir()
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(
            ModelError, match=r"index\.json: names '.*', which is outside of the model's directory"
        ):
            open_checkpoint(directory)

    @pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}'])
    def test_a_damaged_index_is_named(self, tmp_path: Path, index: str) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json: cannot be read: "):
            open_checkpoint(tmp_path)

    def test_a_type_that_no_one_reads_is_refused_with_the_tensor(self, tmp_path: Path) -> None:
        save_file({"a": torch.zeros(3, dtype=torch.int64)}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=r"model\.safetensors: a: type I64 is not supported"):
            open_checkpoint(tmp_path)

    def test_a_damaged_header_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes((1).to_bytes(8, "little") + b"{")
        with pytest.raises(ModelError, match=r"model\.safetensors: weight file of 9 bytes cannot be read: "):
            open_checkpoint(tmp_path)

    def test_tensors_come_in_the_order_of_the_file_with_their_sizes(self, tmp_path: Path) -> None:
        # The writer sorts by the width of the elements first.
        stored = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7), "c": torch.zeros(())}
        save_file(stored, tmp_path / "model.safetensors")
        tensors = open_checkpoint(tmp_path).tensors
        assert [(name, tensor.size) for name, tensor in tensors.items()] == [("b", 28), ("c", 4), ("a", 30)]
        with pytest.raises(KeyError):
            open_checkpoint(tmp_path).read("d", torch.float32)

    def test_a_directory_without_weights_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"no weights: neither model\.safetensors nor"):
            open_checkpoint(tmp_path)

    def test_pickled_weights_are_refused_with_what_to_do(self, tmp_path: Path) -> None:
        torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ModelError, match=r"pytorch_model\.bin, which may hold code .*save_pretrained\("):
            open_checkpoint(tmp_path)


class TestGguf:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        use_own_cache(monkeypatch, tmp_path / "cache")

    def write(self, path: Path, model: LlamaForCausalLM, kind: GGMLQuantizationType) -> Path:
        """Convert the model as llama.cpp does, and return our directory of the file."""
        weights = {
            gguf_name(name): permuted(name, tensor.numpy()) for name, tensor in model.state_dict().items()
        }
        write_gguf(
            path,
            vocabulary=VOCABULARY,
            num_layers=2,
            hidden_size=96,
            intermediate_size=160,
            num_heads=6,
            num_kv_heads=2,
            weights=weights,
            quantization=kind,
        )
        return resolve_model(str(path), progress=False)

    @pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
    def test_names_and_rows_are_those_of_the_original(
        self, tmp_path: Path, model: LlamaForCausalLM, kind: str
    ) -> None:
        type_ = GGMLQuantizationType[kind]
        checkpoint = open_checkpoint(self.write(tmp_path / "model.gguf", model, type_))
        expected = {name: through(tensor, type_) for name, tensor in model.state_dict().items()}
        assert_same(read_all(checkpoint), expected)

    @pytest.mark.parametrize("kind", ["F32", "Q4_1"])
    def test_other_weights_are_another_model(
        self, tmp_path: Path, model: LlamaForCausalLM, kind: str
    ) -> None:
        type_ = GGMLQuantizationType[kind]
        digests = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            directory = self.write(tmp_path / name / "model.gguf", model, type_)
            digests += [digest_weights(open_checkpoint(directory)) for _ in range(2)]
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
        assert digests[0] == digests[1] != digests[2] == digests[3]

    def test_a_file_that_is_cut_short_names_both_sizes(self, tmp_path: Path, model: LlamaForCausalLM) -> None:
        path = tmp_path / "model.gguf"
        directory = self.write(path, model, GGMLQuantizationType.Q8_0)
        size = path.stat().st_size
        os.truncate(path, size - 1)
        with pytest.raises(
            ModelError, match=rf"model\.gguf: weight file has {size - 1} bytes, expected {size}"
        ):
            open_checkpoint(directory)
        path.unlink()
        with pytest.raises(ModelError, match=r"model\.gguf: weight file cannot be read: No such file"):
            open_checkpoint(directory)

    def test_a_file_that_changed_since_its_conversion_is_refused(
        self, tmp_path: Path, model: LlamaForCausalLM
    ) -> None:
        directory = self.write(tmp_path / "model.gguf", model, GGMLQuantizationType.Q8_0)
        os.utime(tmp_path / "model.gguf", ns=(0, 0))
        with pytest.raises(ModelError, match="changed since it was converted"):
            open_checkpoint(directory)

    def test_a_type_that_no_one_reads_is_refused_with_the_tensor(
        self, tmp_path: Path, model: LlamaForCausalLM
    ) -> None:
        directory = self.write(tmp_path / "model.gguf", model, GGMLQuantizationType.F32)
        index = directory / "gguf_index.json"
        values = json.loads(index.read_text())
        values["tensors"][3]["type"] = "Q8_K"
        index.write_text(json.dumps(values))
        name = values["tensors"][3]["gguf_name"]
        with pytest.raises(ModelError, match=rf"{name}: type Q8_K is not supported"):
            open_checkpoint(directory)

    def test_a_tensor_outside_of_the_file_is_named(self, tmp_path: Path, model: LlamaForCausalLM) -> None:
        directory = self.write(tmp_path / "model.gguf", model, GGMLQuantizationType.F32)
        index = directory / "gguf_index.json"
        values = json.loads(index.read_text())
        values["tensors"][0]["offset"] += values["files"][0]["file_size"]
        index.write_text(json.dumps(values))
        with pytest.raises(ModelError, match=f"{values['tensors'][0]['gguf_name']}: .* bytes at"):
            open_checkpoint(directory)

    def test_a_damaged_index_says_what_to_delete(self, tmp_path: Path, model: LlamaForCausalLM) -> None:
        directory = self.write(tmp_path / "model.gguf", model, GGMLQuantizationType.F32)
        (directory / "gguf_index.json").write_text("{}")
        with pytest.raises(ModelError, match=r"gguf_index\.json: cannot be read: .*; delete "):
            open_checkpoint(directory)


class TestRandom:
    def test_names_and_shapes_are_those_of_transformers(self, tmp_path: Path) -> None:
        for tied, biased in ((False, True), (True, False)):
            config = LlamaConfig(
                **CONFIG.to_dict()
                | {"tie_word_embeddings": tied, "attention_bias": biased, "mlp_bias": biased}
            )
            config.save_pretrained(tmp_path)
            expected = {
                name: tuple(tensor.shape)
                for name, tensor in LlamaForCausalLM(config).state_dict().items()
                if not (tied and name == "lm_head.weight")
            }
            checkpoint = open_checkpoint(tmp_path, format="random")
            assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == expected
            assert {name: tuple(tensor.shape) for name, tensor in read_all(checkpoint).items()} == expected

    def test_a_seed_gives_the_same_weights_in_any_order(self, tmp_path: Path) -> None:
        CONFIG.save_pretrained(tmp_path)
        once, again = (open_checkpoint(tmp_path, format="random", seed=7) for _ in range(2))
        names = list(once.tensors)
        tensors = {name: again.read(name, torch.float32) for name in reversed(names)}
        assert_same(read_all(once), tensors)
        other = open_checkpoint(tmp_path, format="random", seed=8)
        assert not torch.equal(other.read(names[0], torch.float32), tensors[names[0]])
        first, second = (tensors[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1))
        assert not torch.equal(first, second)

    def test_a_format_that_the_directory_does_not_hold_is_refused(
        self, tmp_path: Path, model: LlamaForCausalLM
    ) -> None:
        model.save_pretrained(tmp_path)
        assert open_checkpoint(tmp_path, format="safetensors").tensors
        with pytest.raises(ModelError, match=r"load\.format: gguf, but .* holds no GGUF weights"):
            open_checkpoint(tmp_path, format="gguf")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_reports_progress_tensor_by_tensor(tmp_path: Path, dtype: str) -> None:
    config = replace(tiny_config(tiny_architecture()), dtype=dtype)
    checkpoint = RandomCheckpoint(config.architecture, seed=3)
    reports: list[tuple[int, int]] = []
    model = load_model(config, checkpoint, progress=lambda done, total: reports.append((done, total)))
    total = sum(tensor.size for tensor in checkpoint.tensors.values())
    assert len(reports) == len(checkpoint.tensors)
    assert reports == sorted(reports)
    assert reports[-1] == (total, total)
    torch_dtype = getattr(torch, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {torch_dtype}
    expected = checkpoint.read("model.embed_tokens.weight", torch_dtype)
    assert torch.equal(dense(model.model.embed_tokens.weight), expected)


def test_python_s_collector_rests_while_weights_are_loaded_and_no_longer() -> None:
    config = tiny_config(tiny_architecture())
    checkpoint = RandomCheckpoint(config.architecture, seed=3)
    seen: list[bool] = []

    def stop(done: int, total: int) -> None:
        seen.append(gc.isenabled())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_model(config, checkpoint, progress=stop)
    assert seen == [False]
    assert gc.isenabled()


def test_the_log_says_how_fast_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tiny_architecture())
    checkpoint = RandomCheckpoint(config.architecture, seed=3)
    checkpoint.tensors = {name: replace(stored, size=10**9) for name, stored in checkpoint.tensors.items()}
    clock = itertools.count(0, 2)  # seconds, one step for each tensor
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO, "triptych_services.worker.loader.load"):
        load_model(config, checkpoint)
    monkeypatch.undo()
    lines = [record.getMessage() for record in caplog.records if "GB/s" in record.getMessage()]
    num = len(checkpoint.tensors)
    assert lines == [
        *(f"weights: {n}.00 of {num}.00 GB in {2 * n}.0 s, 0.50 GB/s" for n in range(3, num + 1, 3)),
        f"weights are loaded: {num}.00 of {num}.00 GB in {2 * num + 2}.0 s, {num / (2 * num + 2):.2f} GB/s",
    ]


@pytest.mark.parametrize("quantization", ["none", "dequantized"])
@pytest.mark.parametrize("kind", ["IQ3_S", "Q4_K", "Q5_0"])  # without a kernel, in two levels, in one
def test_blocks_with_scales_that_are_no_numbers_are_named(
    kind: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_own_cache(monkeypatch, tmp_path / "cache")
    chosen = GGMLQuantizationType[kind]

    def pack(name: str, weights: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        blocks = random_blocks(chosen, *weights.shape)
        if kind == "IQ3_S":
            blocks[:, :2] = blocks[:, 110:112] = 0  # scales of usual weights
        if name == "blk.0.attn_v.weight":
            blocks[-1] = 255
        return blocks, chosen

    write_gguf(tmp_path / "a.gguf", hidden_size=256, intermediate_size=256, num_heads=4, pack=pack)
    directory = resolve_model(str(tmp_path / "a.gguf"), progress=False)
    engine = EngineConfig(model=ModelConfig(quantization=quantization), worker=WorkerConfig(device="cpu"))
    config = resolve_config(engine, read_architecture(directory))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.v_proj\.weight: .* is no number"):
        load_model(config, open_checkpoint(directory))


def test_the_fingerprint_tells_apart_what_workers_must_share(tmp_path: Path, model: LlamaForCausalLM) -> None:
    model.save_pretrained(tmp_path)
    checkpoint, architecture = open_checkpoint(tmp_path), read_architecture(tmp_path)
    plain = {
        "dtype": "float32",
        "weight_dtype": "float32",
        "quantization": "none",
        "activation_bits": 16,
        "kv_dtype": "float32",
    }
    base = fingerprint(checkpoint, architecture, **plain)
    assert len(base) == 64
    assert base == fingerprint(open_checkpoint(tmp_path), architecture, **plain)
    config = json.loads((tmp_path / "config.json").read_text())
    notes = {"transformers_version": "0.0", "_name_or_path": "elsewhere", "use_cache": False}
    (tmp_path / "config.json").write_text(json.dumps(config | notes))
    assert base == fingerprint(checkpoint, read_architecture(tmp_path), **plain), "notes change no token"
    others = {
        fingerprint(checkpoint, architecture, **plain | {"dtype": "bfloat16"}),
        fingerprint(checkpoint, architecture, **plain | {"weight_dtype": "bfloat16"}),
        fingerprint(checkpoint, architecture, **plain | {"quantization": "q4"}),
        fingerprint(checkpoint, architecture, **plain | {"activation_bits": 8}),
        fingerprint(checkpoint, architecture, **plain | {"kv_dtype": "bfloat16"}),
        fingerprint(checkpoint, replace(architecture, block=BlockSpec(qkv_bias=True)), **plain),
        fingerprint(open_checkpoint(tmp_path, format="random"), architecture, **plain),
        fingerprint(open_checkpoint(tmp_path, format="random", seed=1), architecture, **plain),
    }
    model.save_pretrained(tmp_path, state_dict={name: t.bfloat16() for name, t in model.state_dict().items()})
    others.add(fingerprint(open_checkpoint(tmp_path), architecture, **plain))
    assert len(others - {base}) == 9


def test_the_fingerprint_is_the_same_by_a_release_that_describes_more(
    tmp_path: Path, model: LlamaForCausalLM
) -> None:
    model.save_pretrained(tmp_path)
    checkpoint, architecture = open_checkpoint(tmp_path), read_architecture(tmp_path)
    later = make_dataclass("BlockSpec", [("scale", float, 1.0)], bases=(BlockSpec,), frozen=True)

    def of_block(block: BlockSpec) -> str:
        return fingerprint(
            checkpoint,
            replace(architecture, block=block),
            dtype="float32",
            weight_dtype="float32",
            quantization="none",
            activation_bits=16,
            kv_dtype="float32",
        )

    biased = BlockSpec(qkv_bias=True)
    assert of_block(later(qkv_bias=True)) == of_block(biased)
    assert len({of_block(later()), of_block(biased), of_block(later(scale=2.0))}) == 3


class TestWeightsAreSampled:
    """Two models of one architecture differ in nothing but the bytes of their weights."""

    def test_a_fine_tune_of_one_matrix_is_another_model(
        self, tmp_path: Path, model: LlamaForCausalLM
    ) -> None:
        model.save_pretrained(tmp_path)
        before = digest_weights(open_checkpoint(tmp_path))
        assert before == digest_weights(open_checkpoint(tmp_path))
        for name, tensor in model.state_dict().items():
            tuned = model.state_dict() | {name: tensor + 1e-3 * torch.randn_like(tensor)}
            model.save_pretrained(tmp_path, state_dict=tuned)
            assert digest_weights(open_checkpoint(tmp_path)) != before, name

    def test_shards_are_the_same_model(self, tmp_path: Path, model: LlamaForCausalLM) -> None:
        for name, options in (("whole", {}), ("shards", {"max_shard_size": "100KB"})):
            model.save_pretrained(tmp_path / name, **options)
        whole, shards = (digest_weights(open_checkpoint(tmp_path / name)) for name in ("whole", "shards"))
        assert whole == shards

    def test_few_tensors_are_read_at_many_places(self, tmp_path: Path, model: LlamaForCausalLM) -> None:
        (tmp_path / "config.json").write_text(model.config.to_json_string())
        tensor = torch.zeros(1 << 22, dtype=torch.bfloat16)
        save_file({"a": tensor}, tmp_path / "model.safetensors")
        before = digest_weights(open_checkpoint(tmp_path))
        tensor[1 << 21 :] = 1  # half of it
        save_file({"a": tensor}, tmp_path / "model.safetensors")
        assert digest_weights(open_checkpoint(tmp_path)) != before

    def test_random_weights_differ_by_their_seed(self, tmp_path: Path, model: LlamaForCausalLM) -> None:
        model.save_pretrained(tmp_path)
        digests = {
            digest_weights(open_checkpoint(tmp_path, format="random", seed=seed)) for seed in (0, 1, 1)
        }
        assert len(digests) == 2


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def permuted(name: str, weights: np.ndarray) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    heads = {"q_proj": 6, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None:
        return weights
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def through(tensor: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    """Return a tensor after storing it in this form; vectors are never quantized."""
    if tensor.ndim == 1:
        return tensor
    return torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind))
