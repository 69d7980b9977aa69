"""Attention by other packages: what they are asked is what the step's rows mean."""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from inspect import Parameter, Signature
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.worker.attention.attention_packages import Call, Calls, attend_pages, install
from tests.worker.deferred import DeferredStream
from tests.worker.tiny import new_row, step_plan, tiny_architecture, tiny_config, tiny_facts
from triptych.errors import ConfigError
from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.cpu.library import isa
from triptych_services.worker.attention.base import AttentionBackend, AttentionBatch, KvCache
from triptych_services.worker.attention.create import create_attention, describe_kernels
from triptych_services.worker.attention.flash_attn import FlashAttention2, FlashAttention3
from triptych_services.worker.attention.flashinfer import FlashInferAttention
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.loader.load import load_model
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.runner.model_runner import ModelRunner
from triptych_services.worker.runner.startup.kv_cache import allocate_kv_cache
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = 0.3
OPTIONS = AttendOptions(SCALE)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return install(monkeypatch)


def make_flashinfer() -> FlashInferAttention:
    return FlashInferAttention(CPU, heads_per_kv_head=HEADS // KV_HEADS)


BACKENDS: dict[str, tuple[Callable[[], AttentionBackend], tuple[int, ...]]] = {
    "flash-attn": (FlashAttention2, (256,)),
    "flash-attn-3": (FlashAttention3, (1, 4, 16)),
    "flashinfer": (make_flashinfer, (1, 4, 16)),
}
"""And the sizes of blocks that they are tried with."""

STEPS: dict[str, tuple[tuple[int, int], ...]] = {
    "one decode": ((1, 1),),
    "decodes": ((1, 16), (1, 17), (1, 1), (1, 40)),
    "one prompt": ((5, 5),),
    "prompts and chunks": ((16, 16), (3, 20), (2, 33)),
    "mixed": ((1, 9), (4, 4), (1, 32), (7, 31), (1, 1)),
}
"""(queries, keys) of each row."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    query: Tensor
    cache: KvCache
    batch: AttentionBatch

    def expected(self, options: AttendOptions = OPTIONS) -> Tensor:
        keys, values = self.cache.blocks.transpose(2, 3).unbind(1)
        batch = self.batch
        return attend_pages(
            self.query, keys, values, batch.block_tables, batch.query_starts, batch.seq_lens, options
        )


def make_step(
    rows: Sequence[tuple[int, int]],
    block_size: int,
    backend: AttentionBackend,
    *,
    seed: int = 0,
    head_dim: int = HEAD_DIM,
) -> Step:
    """Rows whose blocks are scattered; what none of them owns, null block and rests of blocks included, is NaN."""
    generator = torch.Generator().manual_seed(seed)
    query_lens, seq_lens = zip(*rows, strict=True)
    num_pages = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(num_pages) + 4
    blocks = torch.full((num_blocks, 2, KV_HEADS, block_size, head_dim), torch.nan)
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = torch.zeros(len(rows), max(num_pages) + 1, dtype=torch.int32)  # wider than the longest row
    for row, seq_len in enumerate(seq_lens):
        for page in range(num_pages[row]):
            block = tables[row, page] = free.pop()
            used = min(seq_len - page * block_size, block_size)
            blocks[int(block), :, :, :used] = torch.randn(2, KV_HEADS, used, head_dim, generator=generator)
    num_tokens = sum(query_lens)
    wide = torch.randn(num_tokens, HEADS + 1, head_dim, generator=generator)
    batch = AttentionBatch(
        slot_mapping=torch.full((num_tokens,), -1),
        block_tables=tables,
        query_starts=torch.tensor([*accumulate(query_lens, initial=0)], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        backend=backend,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens_list=query_lens,
        seq_lens_list=seq_lens,
    )
    return Step(wide[:, :HEADS], KvCache(blocks), batch)  # a view of something larger, as projections give it


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_each_query_sees_its_rows_keys_and_no_others(calls: Calls, name: str, rows) -> None:
    make, block_sizes = BACKENDS[name]
    for block_size in block_sizes:
        backend = make()
        step = make_step(rows, block_size, backend)
        attended = backend.attend(step.query, step.cache, step.batch, OPTIONS)
        assert attended.shape == step.query.shape
        torch.testing.assert_close(attended, step.expected(), rtol=0, atol=0)
        assert not attended.isnan().any()


@pytest.mark.parametrize("name", [*BACKENDS, "torch"])
@pytest.mark.parametrize("window", [1, 6, 40])
def test_each_query_sees_the_last_keys_within_its_window(calls: Calls, name: str, window: int) -> None:
    make, block_sizes = BACKENDS.get(name, (lambda: PagedAttention("torch"), (4,)))
    backend = make()
    step = make_step(STEPS["mixed"], block_sizes[-1], backend)
    whole = backend.attend(step.query, step.cache, step.batch, OPTIONS)
    options = AttendOptions(SCALE, window=window)
    attended = backend.attend(step.query, step.cache, step.batch, options)
    torch.testing.assert_close(attended, step.expected(options))
    near = {"rtol": 1e-5, "atol": 1e-5}  # torch sums in another order under a mask
    is_same = torch.allclose(attended, whole, **near)
    assert is_same == (window == 40), "no row has so many keys"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_options_of_a_layer_reach_the_package(calls: Calls, name: str, rows) -> None:
    make, block_sizes = BACKENDS[name]
    backend = make()
    step = make_step(rows, block_sizes[-1], backend)
    every = {"window": 7, "soft_cap": 1.5, "alibi": torch.tensor([0.1, 0.0, 0.3, 0.7])}
    assert backend.supported <= every.keys()
    for chosen in (*({option} for option in backend.supported), backend.supported):
        options = AttendOptions(SCALE, **{option: every[option] for option in chosen})
        attended = backend.attend(step.query, step.cache, step.batch, options)
        torch.testing.assert_close(attended, step.expected(options), rtol=0, atol=0)


def test_flash_attn_reads_rows_of_several_of_its_long_blocks(calls: Calls) -> None:
    backend = FlashAttention2()
    for rows in (((1, 300), (1, 257)), ((2, 258), (1, 40))):
        step = make_step(rows, 256, backend)
        torch.testing.assert_close(
            backend.attend(step.query, step.cache, step.batch, OPTIONS), step.expected(), rtol=0, atol=0
        )


@pytest.mark.parametrize("name", BACKENDS)
def test_the_cache_is_not_copied(calls: Calls, name: str) -> None:
    make, (block_size, *_) = BACKENDS[name]
    backend = make()
    step = make_step(STEPS["mixed"], block_size, backend)
    backend.attend(step.query, step.cache, step.batch, OPTIONS)
    shown = [
        value
        for call in calls
        for name, value in call.bound.items()
        if name in ("k", "v", "k_cache", "v_cache", "paged_kv_cache")
    ]
    assert shown
    storage = step.cache.blocks.untyped_storage().data_ptr()
    assert {value.untyped_storage().data_ptr() for value in shown} == {storage}


def test_flash_attn_counts_keys_once_per_step(calls: Calls) -> None:
    backend = FlashAttention2()
    first, second = (make_step(STEPS["mixed"], 256, backend, seed=seed) for seed in (1, 2))
    for step in (first, first, second, first):
        torch.testing.assert_close(
            backend.attend(step.query, step.cache, step.batch, OPTIONS), step.expected(), rtol=0, atol=0
        )
    starts = [call.bound["cu_seqlens_k"] for call in calls.of("flash_attn_varlen_func")]
    assert starts[0] is starts[1]
    assert starts[0].tolist() == [0, 9, 13, 45, 76, 77]
    assert len({id(tensor) for tensor in starts}) == 3


@pytest.mark.parametrize("name", ["flash-attn", "flash-attn-3"])
def test_decodes_follow_what_a_graph_finds_on_the_device(calls: Calls, name: str) -> None:
    """A recorded call sees the same batch object again, with other contents of its tensors."""
    make, (block_size, *_) = BACKENDS[name]
    backend = make()
    assert backend.in_graphs
    step = make_step(((1, 40), (1, 40), (1, 40)), block_size, backend)  # bounds
    for seed, seq_lens in enumerate(((3, 8, 1), (20, 1, 39))):
        other = make_step([(1, seq_len) for seq_len in seq_lens], block_size, backend, seed=seed)
        step.batch.seq_lens.copy_(other.batch.seq_lens)
        step.batch.block_tables.zero_()
        step.batch.block_tables[:, : other.batch.block_tables.shape[1]] = other.batch.block_tables
        attended = backend.attend(other.query, other.cache, step.batch, OPTIONS)
        torch.testing.assert_close(attended, other.expected(), rtol=0, atol=0)


def test_flashinfer_plans_a_step_once_for_all_layers(calls: Calls) -> None:
    backend = make_flashinfer()
    assert not backend.in_graphs
    decodes, mixed = (make_step(STEPS[name], 4, backend) for name in ("decodes", "mixed"))
    plans = []
    for step, scale in ((decodes, SCALE), (mixed, SCALE), (decodes, SCALE), (decodes, 0.5), (mixed, SCALE)):
        options = AttendOptions(scale)
        for _layer in range(3):
            attended = backend.attend(step.query, step.cache, step.batch, options)
            torch.testing.assert_close(attended, step.expected(options), rtol=0, atol=0)
        plans.append(sum(call.name.endswith(".plan") for call in calls))
    assert plans == [1, 2, 2, 3, 3], "a step that the wrapper still knows, and one of another scale"
    later = make_step(STEPS["decodes"], 4, backend, seed=5)
    torch.testing.assert_close(
        backend.attend(later.query, later.cache, later.batch, OPTIONS), later.expected(), rtol=0, atol=0
    )


def test_flashinfer_waits_for_the_plan_before(calls: Calls) -> None:
    """A plan waits in pinned memory of the wrapper's own until the device copies it."""
    order: list[str] = []

    class Event:
        def record(self) -> None:
            order.append("record")

        def synchronize(self) -> None:
            order.append("wait")

    backend = make_flashinfer()
    backend._decodes._was_read = Event()
    plan = backend._decodes.wrapper.plan
    backend._decodes.wrapper.plan = lambda *args, **kwargs: (order.append("plan"), plan(*args, **kwargs))
    for seed in range(2):
        step = make_step(STEPS["decodes"], 4, backend, seed=seed)
        backend.attend(step.query, step.cache, step.batch, OPTIONS)
    assert order == ["wait", "plan", "record"] * 2


@pytest.mark.parametrize(
    ("heads_per_kv_head", "on_tensor_cores"), [(1, False), (3, False), (4, True), (7, True)]
)
def test_flashinfer_takes_its_workspace_at_once(calls: Calls, heads_per_kv_head, on_tensor_cores) -> None:
    FlashInferAttention(CPU, heads_per_kv_head=heads_per_kv_head)
    decodes, rows = calls
    assert decodes.bound["use_tensor_cores"] == on_tensor_cores
    assert decodes.bound["float_workspace_buffer"] is rows.bound["float_workspace_buffer"]


def run_steps(
    attention: AttentionBackend | None, stream: DeferredStream | None, *, block_size: int, eager: bool
):
    """Tokens of two requests through prompts, a mixed step and decodes; and the runner that said them."""
    architecture = tiny_architecture(num_heads=6, num_kv_heads=3)
    config = tiny_config(architecture, block_size=block_size, num_blocks=20)
    model = load_model(config, RandomCheckpoint(architecture, seed=3))
    assert isinstance(model, nn.Module)
    kv = plan_kv_cache(config, free_bytes=1 << 30)
    runner = ModelRunner(
        model=model,
        kv_caches=allocate_kv_cache(kv.shape, CPU, kv.places),
        facts=tiny_facts(config, kv.max_model_len, kv.shape),
        attention=attention,
        enforce_eager=eager,
        stream=stream,
    )
    num_blocks = -(-24 // block_size)
    first, second = np.arange(1, 1 + num_blocks), np.arange(1 + num_blocks, 1 + 2 * num_blocks)
    plans = [
        step_plan(1, new=[new_row(2, [5, 6, 7, 8, 9], first)], chunks={2: 5}),
        step_plan(2, new=[new_row(0, [*range(20, 33)], second)], chunks={0: 6}),
        step_plan(3, chunks={0: 7}),
        *(step_plan(number) for number in range(4, 9)),
    ]
    return [runner.execute(plan).token_ids.tolist() for plan in plans], runner


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("stream", [None, DeferredStream], ids=["waiting", "asynchronous"])
def test_a_model_says_what_it_says_with_our_own_attention(calls: Calls, name: str, stream) -> None:
    make, block_sizes = BACKENDS[name]
    backend = make()
    block_size = block_sizes[-1]
    backend.writer = "torch"  # packages read rows of keys, which kernels of CUDA devices write
    own, _ = run_steps(PagedAttention("torch"), stream and stream(), block_size=block_size, eager=True)
    tokens, runner = run_steps(backend, stream and stream(), block_size=block_size, eager=True)
    assert tokens == own
    assert len(tokens[-1]) == 2
    assert len({*np.ravel(tokens[3:])}) > 1
    assert calls
    assert runner.facts.kernels.endswith(f", attention by {name}")


@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor: nothing is recorded")
def test_plain_torch_is_no_part_of_a_recorded_program(caplog: pytest.LogCaptureFixture) -> None:
    recorded, of_native = run_steps(PagedAttention("cpu"), None, block_size=4, eager=False)
    assert of_native.facts.kernels == f"{isa()} recorded"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        tokens, of_torch = run_steps(PagedAttention("torch"), None, block_size=4, eager=False)
    assert "attention in plain torch loops over the rows of each step" in caplog.text
    assert of_torch.facts.kernels == f"{isa()} eager, attention by torch"
    assert tokens == recorded


@pytest.mark.parametrize(
    ("resolved", "kind", "name"),
    [
        ("native", PagedAttention, "native"),
        ("triton", PagedAttention, "triton"),
        ("torch", PagedAttention, "torch"),
        ("flash-attn", FlashAttention2, "flash-attn"),
        ("flash-attn-3", FlashAttention3, "flash-attn-3"),
        ("flashinfer", FlashInferAttention, "flashinfer"),
    ],
)
def test_the_resolved_name_decides(calls: Calls, resolved, kind, name) -> None:
    backend = create_attention(replace(tiny_config(), attention_backend=resolved))
    assert type(backend) is kind
    assert backend.name == name


@pytest.mark.parametrize(
    ("resolved", "module"),
    [
        ("flash-attn", "flash_attn"),
        ("flash-attn-3", "flash_attn_interface"),
        ("flashinfer", "flashinfer"),
    ],
)
def test_a_package_built_for_another_machine_is_named(monkeypatch, resolved, module) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # Python's own way to forbid an import
    with pytest.raises(ConfigError, match=f"worker.attention_backend: {resolved} is installed, but not"):
        create_attention(replace(tiny_config(), attention_backend=resolved))


def test_the_log_says_who_attends_on_a_device(monkeypatch, caplog) -> None:
    config = tiny_config()
    with caplog.at_level(logging.INFO, logger="triptych_services.worker.attention.create"):
        create_attention(config)
        for name in ("triton", "torch"):
            rank = replace(config.rank, device="cuda:0")
            create_attention(replace(config, attention_backend=name, rank=rank))
    assert [record.getMessage() for record in caplog.records] == [
        "attention by triton",
        "attention by torch, launched between CUDA graphs and never in one",
    ]


def test_only_foreign_attention_is_told_beside_the_kernels(calls: Calls) -> None:
    assert describe_kernels("triton graphs", PagedAttention("triton")) == "triton graphs"
    assert describe_kernels("avx2 recorded", PagedAttention()) == "avx2 recorded"
    assert describe_kernels("torch", PagedAttention("torch")) == "torch"
    assert describe_kernels("triton eager", make_flashinfer()) == "triton eager, attention by flashinfer"


# the packages themselves


def source_of(module: str, file: str) -> Path | None:
    """Return the source file of an installed package. It is not imported, which would need its device."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin) if not file else Path(spec.origin).parent / file


def signature_in(source: Path, name: str) -> Signature:
    """Return the signature of a function or method as written; the last one of overloads."""
    scope: list[ast.stmt] = ast.parse(source.read_text()).body
    *classes, function = name.split(".")
    for outer in classes:
        (scope,) = [node.body for node in scope if isinstance(node, ast.ClassDef) and node.name == outer]
    written = [node.args for node in scope if isinstance(node, ast.FunctionDef) and node.name == function][-1]
    positional = [*written.posonlyargs, *written.args]
    num_required = len(positional) - len(written.defaults)
    parameters = [
        Parameter(
            arg.arg,
            Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if index < num_required else None,
        )
        for index, arg in enumerate(positional)
    ]
    if written.vararg is not None:
        parameters.append(Parameter(written.vararg.arg, Parameter.VAR_POSITIONAL))
    parameters += [Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=None) for arg in written.kwonlyargs]
    if written.kwarg is not None:
        parameters.append(Parameter(written.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def assert_understood(call: Call, source: Path, name: str) -> None:
    understood = signature_in(source, name).bind(*call.args, **call.kwargs).arguments
    assert list(understood) == list(call.bound), f"{name} of {source}"


@pytest.mark.parametrize(
    ("name", "module", "file"),
    [
        ("flash-attn", "flash_attn", "flash_attn_interface.py"),
        ("flash-attn-3", "flash_attn_interface", ""),
        ("flashinfer", "flashinfer", "prefill.py"),
    ],
)
def test_the_installed_package_understands_what_it_is_asked(monkeypatch, name, module, file) -> None:
    source = source_of(module, file)  # before the stand-ins stand in
    if source is None:
        pytest.skip(f"{module} is not installed")
    calls = install(monkeypatch)
    make, block_sizes = BACKENDS[name]
    backend = make()
    for rows in ("decodes", "mixed"):
        step = make_step(STEPS[rows], block_sizes[-1], backend)
        backend.attend(step.query, step.cache, step.batch, OPTIONS)
    assert len(calls) == {"flash-attn": 2, "flash-attn-3": 2, "flashinfer": 6}[name]
    for call in calls:
        is_decode = call.name.startswith("BatchDecode")
        written = call.name
        if is_decode and call.name.endswith(".plan"):
            written = plan_of_decodes(source.parent / "decode.py")
        assert_understood(call, source.parent / "decode.py" if is_decode else source, written)


def plan_of_decodes(source: Path) -> str:
    """Newer versions hand the options of `plan` on to a method that names them."""
    name = "BatchDecodeWithPagedKVCacheWrapper"
    return f"{name}._plan_impl" if "def _plan_impl(" in source.read_text() else f"{name}.plan"
