"""Adapters over the whole stack: tokens of merged models, side by side, loaded at the start and while it serves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.e2e.bystander import Bystander
from tests.e2e.test_fine_tunes import write_fine_tune
from tests.worker.adapters.trained import make_runner
from tests.worker.models.checkpoints import greedy_tokens
from triptych import LLM, AsyncLLM, SamplingParams
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.config.loader import load_config
from triptych.errors import InvalidRequest, ModelNotFound
from triptych.launcher.local_cluster import LocalCluster
from triptych.launcher.ports import with_free_ports
from triptych_services.worker.context.machine import machine_directory

READY_S = 120.0
NUM_NEW = 24
UNAVAILABLE = 503  # of HTTP
PROMPTS = [list(range(start, start + 40)) for start in (3, 50, 110, 180)]
"""Longer than two blocks, so that prefixes are cached."""


def write_adapter(base: Path, directory: Path, seed: int) -> list[list[int]]:
    """Write a random adapter, and return the tokens of the merged model for each of PROMPTS."""
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    tuned.save_pretrained(directory)
    return [greedy_tokens(tuned.merge_and_unload(), prompt, NUM_NEW) for prompt in PROMPTS]


def post(address: str, path: str, body: object) -> tuple[int, dict]:
    request = urllib.request.Request(
        f"http://{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text.startswith(b"{") else {}
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


class Stack:
    """A stack of one engine with the tokens that its models give."""

    def __init__(self, cluster: LocalCluster, models: Models, log_lines: list[str]) -> None:
        self.cluster, self.log_lines = cluster, log_lines
        self.expected, self.root = models.expected, models.root

    def await_log(self, words: str, since: int = 0) -> None:
        """Wait for a line of the log behind the first ones."""
        deadline = time.monotonic() + READY_S
        while not any(words in line for line in self.log_lines[since:]):
            assert time.monotonic() < deadline, f"{words!r} was not logged"
            time.sleep(0.05)

    def tokens_of(self, model: str, prompt: list[int]) -> list[int]:
        body = {
            "model": model, "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        status, answer = post(self.cluster.http_address, "/v1/completions", body)
        deadline = time.monotonic() + READY_S
        while status == UNAVAILABLE and time.monotonic() < deadline:  # a group of ranks starts anew
            time.sleep(0.2)
            status, answer = post(self.cluster.http_address, "/v1/completions", body)
        assert status == 200, answer
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def load(self, name: str, source: str) -> str:
        """Load an adapter while the stack serves, and return its digest."""
        with grpc.insecure_channel(self.cluster.admin_address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            request = admin_pb2.LoadAdapterRequest(name=name, source=source)
            digest: str = stub.LoadAdapter(request, timeout=60).adapter.digest
            return digest

    def resident(self) -> list[str]:
        """Return the names of the adapters in the worker's memory."""
        with grpc.insecure_channel(self.cluster.admin_address) as channel:
            listed = admin_pb2_grpc.AdminServiceStub(channel).ListAdapters(admin_pb2.ListAdaptersRequest())
            return [adapter.name for adapter in listed.adapters if adapter.resident_engine_ids]

    def check(self, *models: str) -> None:
        """Ask all models for all prompts at once."""
        asked = [(model, number) for number in range(len(PROMPTS)) for model in models]
        with ThreadPoolExecutor(len(asked)) as threads:
            given = threads.map(lambda each: self.tokens_of(each[0], PROMPTS[each[1]]), asked)
        for (model, number), tokens in zip(asked, given, strict=True):
            assert tokens == self.expected[model][number], (model, number)


class Models:
    """A base and two adapters in one directory, with the tokens of each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        base = write_fine_tune(root / "base", seed=1)
        self.expected = {
            name: write_adapter(base, root / name, seed) for name, seed in (("sql", 2), ("law", 3))
        }
        model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.expected["base"] = [greedy_tokens(model, prompt, NUM_NEW) for prompt in PROMPTS]
        assert len({tuple(tokens[0]) for tokens in self.expected.values()}) == 3, (
            "the adapters change nothing"
        )


@contextmanager
def serving(models: Models, **more: str) -> Iterator[Stack]:
    flags = {
        "model.model": str(models.root / "base"),
        "model.dtype": "float32",
        "model.adapters": f"sql={models.root / 'sql'}",
        "model.adapter_root": str(models.root),
        "worker.max_adapters": "2",
        "cache.num_blocks": "256",
        "log.level": "warning",
        **more,
    }
    lines: list[str] = []
    config = with_free_ports(load_config(env={}, flags=flags))
    with LocalCluster(config, on_log_line=lines.append) as cluster:
        try:
            cluster.wait_ready(READY_S)
            yield Stack(cluster, models, lines)
        finally:
            print("\n".join(lines[-40:]))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def stack(models: Models) -> Iterator[Stack]:
    with serving(models) as stack:
        yield stack


def test_adapters_beside_their_base_give_the_tokens_of_merged_models(stack):
    stack.check("base", "sql")
    stack.check("sql", "base")  # by the prefix cache, which keeps them apart


def test_an_adapter_is_loaded_beside_running_requests(stack):
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(stack.check, "base", "sql")
        assert stack.load("law", "law")
        running.result()
    stack.check("law", "sql", "base")
    with urllib.request.urlopen(f"http://{stack.cluster.http_address}/v1/models", timeout=60) as answer:
        parents = {model["id"]: model.get("parent") for model in json.load(answer)["data"]}
    assert parents == {"base": None, "sql": "base", "law": "base"}


@pytest.mark.parametrize(
    ("name", "source"),
    [("../sql", "sql"), ("other", "../.."), ("other", "/etc"), ("other", "missing"), ("base", "sql")],
)
def test_what_cannot_be_loaded_is_refused_and_disturbs_no_other(stack, name, source):
    with pytest.raises(grpc.RpcError) as refused:
        stack.load(name, source)
    assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    stack.check("sql")
    status, answer = post(stack.cluster.http_address, "/v1/completions", {"model": "other", "prompt": "x"})
    assert status == 404, answer


def write_poison(root: Path, sound: Path) -> dict[str, str]:
    """Write adapters that cannot be served below a root, and return words of the error of each."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors = load_file(sound / "adapter_model.safetensors")
    changed = {
        "nan": {name: tensors[name] * float("nan")},
        "shape": {name: torch.zeros(4, 7)},
        "target": {
            own.replace("q_proj", "x_proj"): tensors[own].clone()
            for own in (name, name.replace("_A.", "_B."))
        },
    }
    for kind, change in changed.items():
        shutil.copytree(sound, root / kind)
        save_file({**tensors, **change}, root / kind / "adapter_model.safetensors")
    shutil.copytree(sound, root / "large")
    with (root / "large" / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(10 << 30)  # without content
    return {
        "nan": "not finite", "shape": "the model has", "target": "is no projection", "large": f"{10 << 30} bytes",
    }  # fmt: skip


@pytest.mark.thorough
def test_poison_is_refused_beside_a_stream(models):
    root = models.root / "poison"
    root.mkdir()
    words_of = write_poison(root, models.root / "law")
    flags = {"frontend.serve_admin_http": "true", "model.adapter_root": str(root)}
    with serving(models, **flags) as stack, Bystander(stack.cluster.http_address, "sql", PROMPTS[0]):
        frontend = stack.cluster.config.frontend
        for kind, words in words_of.items():
            with pytest.raises(grpc.RpcError, match=words):
                stack.load("bad", kind)
            body = {"lora_name": "bad", "lora_path": kind}
            admin = f"{frontend.admin_host}:{frontend.admin_http_port}"
            status, answer = post(admin, "/v1/load_lora_adapter", body)
            assert status == 400, answer
            assert words in answer["error"]["message"]
        stack.check("sql", "base")
        status, _ = post(stack.cluster.http_address, "/v1/completions", {"model": "bad", "prompt": "x"})
        assert status == 404
    shutil.rmtree(root)


@pytest.mark.thorough
def test_a_worker_that_takes_the_place_of_another_has_all_adapters(stack):
    stack.load("law", "law")  # again, if it is loaded already
    os.kill(stack.cluster.pids["worker"], signal.SIGKILL)
    stack.check("sql", "law", "base")


@pytest.mark.thorough
def test_more_adapters_than_slots_take_turns(models):
    with serving(models, **{"worker.max_adapters": "1"}) as stack:
        stack.load("law", "law")
        for _ in range(3):
            stack.check("sql", "law", "base")


@pytest.fixture(scope="module")
def third(models: Models) -> Iterator[float]:
    """Write a third adapter, and return the GiB that two of the three take."""
    base, directory = models.root / "base", models.root / "poems"
    models.expected["poems"] = write_adapter(base, directory, 4)
    _, store = make_runner(base, dtype="float32")
    yield 2.5 * store.load("poems", "", directory).num_bytes / 2**30
    del models.expected["poems"]


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_more_adapters_than_memory_are_read_again_beside_a_stream(models, third, num_ranks):
    sizes = {
        "worker.adapter_gib": f"{third * (1 if num_ranks == 1 else 0.8):.9f}",  # each has about 0.8 of the bytes
        "parallel.tensor_parallel_size": str(num_ranks),
        "worker.num_threads": "1",
    }
    source = models.root / "poems"
    with serving(models, **sizes) as stack, Bystander(stack.cluster.http_address, "base", PROMPTS[0]):
        stack.load("law", "law")
        stack.load("poems", "poems")
        assert len(stack.resident()) == 2
        for _ in range(2):
            for model in ("sql", "law", "poems"):
                stack.check(model)
                assert model in stack.resident()
        stack.check("poems", "law", "sql")  # at once: they take turns
        stack.check("law")
        stack.check("sql")
        assert "poems" not in stack.resident()
        source.rename(models.root / "away")
        body = {"model": "poems", "prompt": PROMPTS[0], "max_tokens": 2}
        for _ in range(2):
            status, answer = post(stack.cluster.http_address, "/v1/completions", body)
            assert status == 500
            assert "'poems'" in answer["error"]["message"]
        (models.root / "away").rename(source)
        stack.load("poems", "poems")
        stack.check("poems", "law")
    with serving(models, **sizes) as stack:
        stack.load("law", "law")
        stack.load("poems", "poems")
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(stack.check, "sql", "poems", "law")
            time.sleep(0.1)
            os.kill(stack.cluster.pids["worker" if num_ranks == 1 else "worker/1"], signal.SIGKILL)
            running.result()
        stack.check("poems")


@pytest.mark.thorough
def test_a_worker_that_starts_from_a_stored_program_has_all_adapters(models, tmp_path, monkeypatch):
    machine = tmp_path / "machine"
    machine.mkdir()
    for file in machine_directory().glob("*.json"):  # else the worker measures the machine
        shutil.copy(file, machine)
    monkeypatch.setenv("TRIPTYCH_MACHINE_DIR", str(machine))
    with serving(models, **{"log.level": "info"}) as stack:
        stack.load("law", "law")
        stack.await_log("stored the recorded program")
        seen = len(stack.log_lines)
        os.kill(stack.cluster.pids["worker"], signal.SIGKILL)
        stack.check("sql", "law", "base")
        stack.await_log("started from a stored program", since=seen)
        body = {"model": "law", "prompt": PROMPTS[0], "max_tokens": 2, "logprobs": 1, "temperature": 0}
        with ThreadPoolExecutor(1) as threads:  # torch takes over while rows run
            running = threads.submit(stack.check, "law", "sql")
            assert post(stack.cluster.http_address, "/v1/completions", body)[0] == 200
            running.result()
        stack.await_log("torch serves from now on", since=seen)
        stack.check("law", "base")
        adapters = f"sql={models.root / 'sql'},law={models.root / 'law'}"
    with serving(models, **{"log.level": "info", "model.adapters": adapters}) as stack:
        stack.await_log("started from a stored program")  # other adapters are no other program
        stack.check("law", "sql", "base")


def options_of(models: Models) -> dict[str, object]:
    return {"dtype": "float32", "num_blocks": 256, "max_adapters": 2, "adapter_root": str(models.root)}


@pytest.mark.thorough
def test_a_plain_program_loads_and_names_adapters(models):
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    base, sql, law = (models.expected[name][0] for name in ("base", "sql", "law"))
    at_start = {"sql": models.root / "sql"}
    with LLM(str(models.root / "base"), adapters=at_start, **options_of(models)) as llm:
        assert [facts.name for facts in llm.list_adapters()] == ["sql"]
        with pytest.raises(ModelNotFound, match=r"adapter: .*'law'"):
            llm.generate(PROMPTS[0], params, use_tqdm=False, adapter="law")
        facts = llm.load_adapter("law", models.root / "law")
        assert llm.load_adapter("law", models.root / "law") == facts
        outputs = llm.generate([PROMPTS[0]] * 3, params, use_tqdm=False, adapter=["", "sql", "law"])
        assert [list(output.outputs[0].token_ids) for output in outputs] == [base, sql, law]
        with pytest.raises(InvalidRequest, match="source"):
            llm.load_adapter("other", "/etc")
        with LLM("law", address=llm.address) as named:  # an adapter is a model to clients
            [output] = named.generate(PROMPTS[0], params, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == law
        llm.unload_adapter("law")
        with pytest.raises(InvalidRequest, match="'law' is not loaded"):
            llm.unload_adapter("law")


@pytest.mark.thorough
async def test_an_asyncio_program_loads_and_names_adapters(models):
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    async with AsyncLLM(str(models.root / "base"), **options_of(models)) as llm:
        await llm.load_adapter("sql", "sql")
        assert [facts.source for facts in await llm.list_adapters()] == ["sql"]
        async for output in llm.generate(PROMPTS[0], params, adapter="sql"):
            tokens = list(output.outputs[0].token_ids)
        assert tokens == models.expected["sql"][0]
        await llm.unload_adapter("sql")
        assert await llm.list_adapters() == []


@pytest.mark.thorough
def test_a_program_for_vllm_brings_its_adapter(models):
    from triptych import vllm
    from triptych.vllm.lora.request import LoRARequest

    params = vllm.SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with vllm.LLM(str(models.root / "base"), dtype="float32", enable_lora=True, max_loras=2) as llm:
        request = LoRARequest("law", 1, str(models.root / "law"))
        [output] = llm.generate(
            {"prompt_token_ids": PROMPTS[0]}, params, use_tqdm=False, lora_request=request
        )
        assert list(output.outputs[0].token_ids) == models.expected["law"][0]


@pytest.mark.thorough
@pytest.mark.parametrize(("num_sharing", "num_stages"), [(2, 1), (1, 2), (2, 2)])
def test_all_ranks_of_a_worker_have_an_adapter_or_none(models, num_sharing, num_stages):
    sizes = {
        "parallel.tensor_parallel_size": str(num_sharing),
        "parallel.pipeline_parallel_size": str(num_stages),
        "worker.num_threads": "1",
    }
    with serving(models, **sizes) as stack:
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(stack.check, "base", "sql")
            assert stack.load("law", "law")
            running.result()
        stack.check("law", "sql", "base")
        with pytest.raises(grpc.RpcError, match="is no directory"):
            stack.load("missing", "missing")
        with grpc.insecure_channel(stack.cluster.admin_address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            stub.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="law"), timeout=60)
        status, _ = post(stack.cluster.http_address, "/v1/completions", {"model": "law", "prompt": "x"})
        assert status == 404
        stack.check("sql")
        assert stack.load("law", "law")
        stack.check("law", "base")
        os.kill(stack.cluster.pids["worker/1"], signal.SIGKILL)
        stack.check("law", "sql", "base")  # all ranks are others now, and have been given both
