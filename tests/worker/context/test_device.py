"""Resolution of the worker's config on this machine, and its refusals."""

from __future__ import annotations

import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.worker.tiny import tiny_architecture
from triptych.checkpoint.architecture import EndsSpec, ExpertsSpec, LayerInputsSpec, StateSpec
from triptych.checkpoint.tensor_names import TensorNames
from triptych.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from triptych.errors import ConfigError, FeatureDisabled
from triptych_kernels.cpu.library import forced_isa
from triptych_services.worker.context.attention_choice import AttentionSite
from triptych_services.worker.context.device import (
    choose_device,
    leave_cores_to_kernels,
    missing_kernels,
    resolve_config,
    use_device,
    use_threads,
)
from triptych_services.worker.context.precision import choose_dtype, choose_kv_dtype, choose_weight_dtype
from triptych_services.worker.context.resolve import (
    choose_activation_bits,
    choose_batch_invariance,
    choose_quantization,
    resolve_for_device,
)
from triptych_services.worker.context.resolved_config import DeviceTraits

CPU = WorkerConfig(device="cpu")
LAYER = tiny_architecture().layers[0]


@pytest.mark.parametrize(
    ("requested", "stored", "is_gguf", "native", "chosen"),
    [
        ("auto", "float32", False, True, "float32"),
        ("auto", "float16", False, False, "float32"),
        ("auto", "float16", False, True, "bfloat16"),
        ("float16", "float32", False, True, "float16"),
        ("auto", "bfloat16", False, True, "bfloat16"),
        ("auto", "bfloat16", False, False, "float32"),
        ("auto", "float32", True, True, "bfloat16"),
        ("auto", "float32", True, False, "float32"),
        ("bfloat16", "float32", False, False, "bfloat16"),
        ("float32", "bfloat16", True, True, "float32"),
    ],
)
def test_auto_precision_is_the_checkpoints_where_the_device_can(requested, stored, is_gguf, native, chosen):
    architecture = tiny_architecture(dtype=stored, gguf_names=TensorNames() if is_gguf else None)
    assert choose_dtype(requested, architecture, device="cpu", prefers_bfloat16=native) == chosen


@pytest.mark.parametrize(
    ("requested", "stored", "changes", "chosen"),
    [
        ("auto", {"dtype": "bfloat16"}, {}, "bfloat16"),
        ("auto", {"dtype": "float16"}, {}, "float16"),
        ("auto", {"dtype": "float32"}, {}, "float32"),
        ("auto", {"dtype": "float32", "gguf_names": TensorNames()}, {}, "bfloat16"),
        ("float32", {"dtype": "bfloat16"}, {}, "float32"),
        ("auto", {"dtype": "bfloat16"}, {"native_kernels": False}, "float32"),
        ("auto", {"dtype": "bfloat16"}, {"quantization": "q8"}, "float32"),
        ("auto", {"dtype": "bfloat16"}, {"device": "cuda:0"}, "float32"),
        ("auto", {"dtype": "float16"}, {"dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_auto_rounds_weights_as_the_checkpoint_says(requested, stored, changes, chosen):
    options = {"dtype": "float32", "device": "cpu", "quantization": "none", "native_kernels": True} | changes
    assert choose_weight_dtype(requested, tiny_architecture(**stored), **options) == chosen


@pytest.mark.parametrize("device", ["cuda:0", "simulated"])
def test_a_checkpoint_in_float16_stays_so_on_an_accelerator(device):
    architecture = tiny_architecture(dtype="float16")
    assert choose_dtype("auto", architecture, device=device, prefers_bfloat16=True) == "float16"


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags : fpu avx2 avx512f", "float32"),
        ("flags : avx512f avx512_bf16", "bfloat16"),
        ("vendor_id : AuthenticAMD\nflags : avx512f avx512_bf16", "bfloat16"),
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16", "float32"),
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16 amx_bf16", "bfloat16"),
        ("flags : amx_bf16", "bfloat16"),
        ("Features : fp asimd i8mm bf16", "bfloat16"),
        ("Features : fp asimd", "float32"),
        ("", "float32"),
    ],
)
def test_a_cpu_prefers_bfloat16_by_its_flags(tmp_path: Path, flags, dtype):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor : 0\n{flags}\n")
    config = resolve_config(EngineConfig(worker=CPU), tiny_architecture(dtype="bfloat16"), root=tmp_path)
    assert config.dtype == dtype
    assert config.rank.device == "cpu"


def test_the_caches_precision_can_be_set_apart():
    engine = EngineConfig(cache=CacheConfig(dtype="float16"), worker=CPU)
    config = resolve_config(engine, tiny_architecture())
    assert (config.dtype, config.kv_dtype) == ("float32", "float16")


def test_ranks_beyond_the_group_are_refused():
    parallel = ParallelConfig(tensor_parallel_size=2)
    with pytest.raises(
        ConfigError, match=r"worker.rank: 2, but parallel.tensor_parallel_size = 2 x .* ranks"
    ):
        resolve_config(EngineConfig(parallel=parallel, worker=replace(CPU, rank=2)), tiny_architecture())


def test_the_rank_comes_from_the_options_of_the_process():
    engine = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=4), worker=replace(CPU, rank=3))
    rank = resolve_config(engine, tiny_architecture()).rank
    assert (rank.tensor_parallel_rank, rank.tensor_parallel_size, rank.device) == (3, 4, "cpu")
    assert (rank.stage, rank.num_stages) == (0, 1)


def test_neighbouring_ranks_share_a_stage():
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    engine = EngineConfig(parallel=parallel, worker=replace(CPU, rank=3))
    rank = resolve_config(engine, tiny_architecture(num_layers=3)).rank
    assert (rank.stage, rank.tensor_parallel_rank, rank.rank, rank.num_ranks) == (1, 1, 3, 6)
    assert (rank.is_first_stage, rank.is_last_stage) == (False, False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": (LAYER, replace(LAYER, kv_from=0))}, "1 layers that read keys and values of others"),
        ({"ends": EndsSpec(layer_inputs=LayerInputsSpec(8, 97))}, "inputs of each layer by token"),
    ],
)
def test_what_stages_do_not_send_is_refused(changes, says):
    engine = EngineConfig(parallel=ParallelConfig(pipeline_parallel_size=2), worker=replace(CPU, rank=1))
    architecture = replace(tiny_architecture(num_layers=2), **changes)
    with pytest.raises(FeatureDisabled, match=rf"parallel\.pipeline_parallel_size = 2: .* has {says}"):
        resolve_config(engine, architecture)


def test_8_bits_are_refused_where_layers_keep_different_amounts():
    wider = replace(LAYER, head_dim=2 * LAYER.head_dim)
    architecture = replace(tiny_architecture(), layers=(LAYER, wider))
    traits = DeviceTraits(device="cpu", prefers_bfloat16=True, native_kernels=True)
    engine = EngineConfig(cache=CacheConfig(dtype="int8"))
    with pytest.raises(
        FeatureDisabled, match=r"cache\.dtype = int8: .* key heads of 1 x 8 and 1 x 16 elements"
    ):
        resolve_for_device(engine, architecture, traits)


@pytest.mark.parametrize(
    ("dtype", "native_kernels", "says"),
    [
        ("bfloat16", False, r"native kernels only.*builds them; or set it to auto, which is bfloat16 here"),
        ("float16", True, r"take float32 and bfloat16, not model\.dtype = float16"),
    ],
)
def test_an_int8_cache_needs_native_kernels_on_a_cpu(dtype, native_kernels, says):
    with pytest.raises(FeatureDisabled, match=rf"cache\.dtype = int8.*{says}"):
        choose_kv_dtype("int8", dtype, device="cpu", native_kernels=native_kernels)
    assert choose_kv_dtype("auto", dtype, device="cpu", native_kernels=native_kernels) == dtype


@pytest.mark.parametrize(
    ("model", "stored", "prefers_bfloat16", "native_kernels", "chosen"),
    [
        ("auto", {"dtype": "bfloat16"}, False, True, "bfloat16"),
        ("auto", {"dtype": "float32", "gguf_names": TensorNames()}, False, True, "bfloat16"),
        ("auto", {"dtype": "bfloat16"}, True, True, "bfloat16"),
        ("auto", {"dtype": "bfloat16"}, False, False, "float32"),
        ("auto", {"dtype": "float16"}, False, True, "float32"),
        ("auto", {"dtype": "float32"}, False, True, "float32"),
        ("float32", {"dtype": "bfloat16"}, False, True, "float32"),
    ],
)
def test_a_cache_keeps_bfloat16_where_float32_stands_for_it(
    model, stored, prefers_bfloat16, native_kernels, chosen
):
    engine = EngineConfig(model=ModelConfig(dtype=model))
    resolved = resolve_for_device(
        engine,
        tiny_architecture(**stored),
        DeviceTraits(device="cpu", prefers_bfloat16=prefers_bfloat16, native_kernels=native_kernels),
    )
    assert resolved.kv_dtype == chosen


@pytest.mark.parametrize(
    ("device", "native_kernels"), [("cpu", True), ("cuda:0", False), ("simulated", False)]
)
def test_a_cache_of_8_bits_is_served_elsewhere(device, native_kernels):
    assert choose_kv_dtype("int8", "bfloat16", device=device, native_kernels=native_kernels) == "int8"


@pytest.mark.parametrize(
    ("device", "says"),
    [("cpu", "read on CUDA devices only; set it to int8"), ("cuda:0", r"compute capability 8\.9 and above")],
)
def test_a_float8_cache_needs_a_device_that_converts_it(device, says):
    with pytest.raises(
        FeatureDisabled, match=rf"cache\.dtype = float8_e4m3fn: .*{says}.* auto, which is float16"
    ):
        choose_kv_dtype("float8_e4m3fn", "float16", device=device, native_kernels=True)


def test_a_cache_of_8_bit_floats_is_served_on_cuda():
    engine = EngineConfig(cache=CacheConfig(dtype="float8_e4m3fn"))
    device = {"device": "cuda:0", "prefers_bfloat16": True, "native_kernels": False}
    assert resolve_for_device(
        engine, tiny_architecture(), DeviceTraits(native_float8=True, **device)
    ).kv_dtype == ("float8_e4m3fn")


QUANTIZABLE_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "head_dim": 16}
QUANTIZABLE = tiny_architecture(**QUANTIZABLE_SIZES)


@pytest.mark.parametrize("requested", ["none", "q4", "q8", "auto"])
def test_quantization_is_served_by_native_kernels(requested):
    chosen = choose_quantization(
        requested, QUANTIZABLE, "bfloat16", DeviceTraits(device="cpu", native_kernels=True)
    )
    assert chosen == ("q4" if requested == "auto" else requested)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("requested", ["none", "q4", "q8", "int8", "fp8", "auto"])
def test_cuda_quantizes_only_when_asked(requested, dtype):
    chosen = choose_quantization(
        requested, QUANTIZABLE, dtype, DeviceTraits(device="cuda:0", native_kernels=False, native_float8=True)
    )
    assert chosen == ("none" if requested == "auto" else requested)


@pytest.mark.parametrize(
    ("requested", "device", "changes", "dtype", "native_kernels", "says"),
    [
        ("q4", "cpu", {}, "float32", False, "native kernels"),
        ("q8", "cpu", {}, "float16", True, "not model.dtype = float16"),
        ("q8", "cpu", {"hidden_size": 72}, "float32", True, "do not divide hidden_size = 72"),
        (
            "q4",
            "cuda:0",
            {"intermediate_size": 100},
            "float32",
            True,
            "do not divide intermediate_size = 100",
        ),
        ("int8", "cuda:0", {"head_dim": 12}, "float32", True, r"do not divide num_heads \* head_dim = 48"),
        ("int8", "cpu", {}, "float32", False, "by the native kernels only"),
        ("fp8", "cpu", {}, "float32", True, "on CUDA devices only; int8 and q8 hold"),
        ("fp8", "cuda:0", {}, "bfloat16", True, r"compute capability 8\.9 and above"),
        ("q4", "simulated", {}, "bfloat16", False, "this is simulated"),
    ],
)
def test_quantization_without_a_kernel_is_refused_by_name(
    requested, device, changes, dtype, native_kernels, says
):
    architecture = tiny_architecture(**(QUANTIZABLE_SIZES | changes))
    place = {"device": device, "native_kernels": native_kernels}
    with pytest.raises(FeatureDisabled, match=rf"model\.quantization = {requested}.*{says}"):
        choose_quantization(requested, architecture, dtype, DeviceTraits(**place))
    assert choose_quantization("none", architecture, dtype, DeviceTraits(**place)) == "none"


def test_what_latent_experts_read_is_quantized_in_whole_groups() -> None:
    architecture = tiny_architecture(**QUANTIZABLE_SIZES)
    for size in (48, 64):
        experts = ExpertsSpec(4, 2, latent_size=size)
        layers = tuple(replace(layer, mlp="experts", experts=experts) for layer in architecture.layers)
        mixture = replace(architecture, layers=layers)
        traits = DeviceTraits(device="cpu", native_kernels=True)
        if size == 64:
            assert choose_quantization("q8", mixture, "float32", traits) == "q8"
            continue
        with pytest.raises(FeatureDisabled, match="do not divide moe_latent_size = 48"):
            choose_quantization("q8", mixture, "float32", traits)


@pytest.mark.parametrize(
    ("model", "requested", "device", "dtype", "native_kernels", "chosen"),
    [
        ("a.gguf", "none", "cpu", "bfloat16", True, "stored"),
        ("a.gguf", "none", "cpu", "float32", True, "stored"),
        ("a.gguf", "none", "cpu", "float32", False, "none"),
        ("a.gguf", "none", "cpu", "float16", True, "none"),
        ("a.gguf", "none", "cuda:0", "bfloat16", True, "none"),
        ("a.gguf", "dequantized", "cpu", "float32", True, "none"),
        ("a.gguf", "q8", "cpu", "float32", True, "q8"),
        ("embedded", "none", "cpu", "float32", True, "none"),
        ("embedded", "q4", "cpu", "float32", True, "q4"),
    ],
)
def test_codes_of_a_gguf_file_are_kept_where_kernels_read_them(
    model, requested, device, dtype, native_kernels, chosen
):
    engine = EngineConfig(model=ModelConfig(model=model, quantization=requested, dtype=dtype))
    architecture = tiny_architecture(**QUANTIZABLE_SIZES, gguf_names=TensorNames())
    traits = DeviceTraits(device=device, native_kernels=native_kernels)
    assert resolve_for_device(engine, architecture, traits).quantization == chosen


@pytest.mark.parametrize(
    ("device", "changes", "dtype", "native_kernels"),
    [
        ("cpu", {}, "float32", False),
        ("cpu", {}, "float16", True),
        ("cpu", {"hidden_size": 72}, "float32", True),
        ("simulated", {}, "bfloat16", False),
    ],
)
def test_auto_quantization_is_none_without_native_kernels(device, changes, dtype, native_kernels):
    architecture = tiny_architecture(**(QUANTIZABLE_SIZES | changes))
    chosen = choose_quantization(
        "auto", architecture, dtype, DeviceTraits(device=device, native_kernels=native_kernels)
    )
    assert chosen == "none"


@pytest.mark.parametrize(
    ("requested", "quantization", "kv_dtype", "device", "forms", "chosen"),
    [
        ("auto", "q4", "bfloat16", "cpu", ("q4", "q8"), 8),
        ("auto", "q4", "int8", "cpu", ("q4", "q8"), 16),
        ("auto", "q8", "float32", "cpu", ("q4",), 16),
        ("auto", "int8", "int8", "cpu", (), 8),
        ("auto", "none", "float32", "cpu", ("q4", "q8"), 16),
        ("auto", "q4", "float32", "cuda:0", ("q4", "q8"), 16),
        ("16", "q4", "float32", "cpu", ("q4", "q8"), 16),
        ("8", "q8", "int8", "cpu", (), 8),
    ],
)
def test_auto_rounds_inputs_to_8_bits_where_that_is_faster(
    requested, quantization, kv_dtype, device, forms, chosen
):
    bits = choose_activation_bits(
        requested, quantization, kv_dtype, DeviceTraits(device=device, byte_input_forms=forms)
    )
    assert bits == chosen


@pytest.mark.parametrize(
    ("requested", "quantization", "device", "says"),
    [
        ("8", "none", "cpu", "this is cpu with none; set it to auto"),
        ("16", "q4", "cuda:0", "this is cuda:0 with q4"),
        ("16", "int8", "cpu", "or model.quantization to q8"),
    ],
)
def test_inputs_that_are_not_rounded_so_are_refused(requested, quantization, device, says):
    with pytest.raises(FeatureDisabled, match=rf"model\.activation_bits = {requested}.*{says}"):
        choose_activation_bits(
            requested, quantization, "float32", DeviceTraits(device=device, byte_input_forms=("q4", "q8"))
        )


@pytest.mark.parametrize("native_float8", [True, False])
def test_fp8_is_served_where_the_device_multiplies_it(native_float8):
    engine = EngineConfig(model=ModelConfig(quantization="fp8"))
    device = {
        "device": "cuda:0",
        "prefers_bfloat16": True,
        "native_kernels": True,
        "native_float8": native_float8,
    }
    if native_float8:
        assert resolve_for_device(engine, QUANTIZABLE, DeviceTraits(**device)).quantization == "fp8"
    else:
        with pytest.raises(FeatureDisabled, match=r"model\.quantization = fp8"):
            resolve_for_device(engine, QUANTIZABLE, DeviceTraits(**device))


def site(device: str, *, native_kernels: bool = True, **facts: object) -> AttentionSite:
    architecture = tiny_architecture(**facts)
    return AttentionSite(architecture, device, "float32", "float32", 16, native_kernels)


@pytest.mark.parametrize(
    ("quantization", "requested", "is_invariant"),
    [
        ("none", "auto", True),
        ("q4", "auto", True),
        ("auto", "auto", False),
        ("auto", "true", True),
        ("q8", "false", False),
    ],
)
def test_only_auto_quantization_drops_batch_invariance_unasked(quantization, requested, is_invariant):
    engine = EngineConfig(model=ModelConfig(quantization=quantization, batch_invariant=requested))
    resolved = "q4" if quantization == "auto" else quantization
    assert choose_batch_invariance(engine, site("cpu"), resolved) == is_invariant


@pytest.mark.parametrize(
    ("where", "quantization", "why"),
    [
        (site("cuda:0"), "none", "weights that are not quantized are cuBLAS's"),
        (site("cuda:0", mlp="experts", experts=ExpertsSpec(4, 2)), "q4", "the router of a mixture"),
        (site("cpu", native_kernels=False), "none", "products are torch's.* to float32 or bfloat16"),
    ],
)
def test_batch_invariance_needs_products_that_are_invariant(where, quantization, why):
    auto = EngineConfig(model=ModelConfig(quantization=quantization))
    assert not choose_batch_invariance(auto, where, quantization)
    wanted = replace(auto, model=replace(auto.model, batch_invariant="true"))
    with pytest.raises(FeatureDisabled, match=rf"model\.batch_invariant = true: .*{why}"):
        choose_batch_invariance(wanted, where, quantization)
    assert choose_batch_invariance(wanted, site("cuda:0"), "int8")


def test_max_model_len_above_the_models_names_both_numbers():
    with pytest.raises(ConfigError, match=r"model\.max_model_len: 65 .* 64"):
        resolve_config(EngineConfig(model=ModelConfig(max_model_len=65), worker=CPU), tiny_architecture())


@pytest.mark.parametrize(
    ("requested", "num_devices", "chosen"), [("auto", 0, "cpu"), ("cpu", 2, "cpu"), ("auto", 2, "cuda:1")]
)
def test_auto_takes_an_accelerator_if_there_is_one(monkeypatch, requested, num_devices, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    assert str(choose_device(requested, local_rank=1)) == chosen


@pytest.mark.parametrize(("num_devices", "says"), [(0, "worker.device: cuda"), (1, "worker.local_rank: 1")])
def test_an_accelerator_that_is_not_there_stops_the_boot(monkeypatch, num_devices, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    with pytest.raises(ConfigError, match=says):
        choose_device("cuda", local_rank=1)


@pytest.mark.parametrize(
    ("system", "machine", "flags", "why"),
    [
        ("Windows", "AMD64", None, "none for Windows on AMD64"),
        ("Linux", "riscv64", None, "none for Linux on riscv64"),
        ("Linux", "aarch64", "Features : fp bf16", "this processor has no asimd, which they need"),
        ("Linux", "aarch64", "Features : fp asimd", "not built; `python -m triptych_kernels.cpu.build`"),
        ("Linux", "x86_64", "flags : sse4_2 avx f16c", "this processor has no avx2, fma, which they need"),
        ("Linux", "x86_64", "flags : avx2 fma f16c", "not built; `python -m triptych_kernels.cpu.build`"),
    ],
)
def test_a_machine_without_native_kernels_has_a_reason(monkeypatch, tmp_path, system, machine, flags, why):
    if flags is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_text(f"processor : 0\n{flags}\n")
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with forced_isa(""):
        assert why in missing_kernels(tmp_path)
    with forced_isa("avx2"):
        assert missing_kernels(tmp_path) == ""


def test_threads_are_given_to_torch():
    before = torch.get_num_threads()
    try:
        assert use_threads(3) == 3
        assert torch.get_num_threads() == 3
        leave_cores_to_kernels()
        assert torch.get_num_threads() == 1
        assert use_threads(0) >= 1
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def products():
    """Switches of cuBLAS's products, put back after the test."""
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(torch.backends.cuda.matmul, name) for name in names]
    yield torch.backends.cuda.matmul
    for name, value in zip(names, before, strict=True):
        setattr(torch.backends.cuda.matmul, name, value)


@pytest.fixture
def cuda(monkeypatch, products):
    """The devices that are chosen; torch's allocator has not been set by the operator."""
    chosen = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(
    ("variables", "settings"), [({}, ["expandable_segments:True"]), ({"PYTORCH_ALLOC_CONF": ""}, [])]
)
def test_cuda_segments_grow_unless_the_allocator_is_configured(monkeypatch, cuda, variables, settings):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", seen.append)
    use_device(torch.device("cuda", 1))
    assert (seen, cuda) == (settings, [torch.device("cuda", 1)])


def test_an_older_torch_is_set_by_its_older_function(monkeypatch, cuda):
    seen = []
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", seen.append)
    use_device(torch.device("cuda", 0))
    assert (seen, len(cuda)) == (["expandable_segments:True"], 1)


@pytest.mark.parametrize("is_missing", [True, False])
def test_an_allocator_that_cannot_be_set_is_logged(monkeypatch, cuda, caplog, is_missing):
    def refuse(settings):
        raise RuntimeError("Unrecognized CachingAllocator option")

    if is_missing:
        monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
        monkeypatch.delattr(torch.cuda.memory, "_set_allocator_settings")
    else:
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse)
    use_device(torch.device("cuda", 0))
    assert len(cuda) == 1
    assert "expandable_segments" in caplog.text


def test_products_on_a_cuda_device_are_added_up_in_float32(monkeypatch, cuda, products):
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)
    use_device(torch.device("cuda", 0))
    assert not products.allow_bf16_reduced_precision_reduction
    assert not products.allow_fp16_reduced_precision_reduction


def test_a_cpu_needs_no_choosing(monkeypatch):
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", None)
    use_device(torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "num_stages", "changes", "why"),
    [
        ("simulated", 1, {}, "several tokens of a request are not verified on simulated"),
        ("cuda:0", 2, {}, "2 ranks on cuda:0 do not guess"),
        (
            "cuda:0",
            1,
            {"state": StateSpec("mamba", taps=3, num_heads=1, value_dim=8, key_dim=2)},
            "only the native kernels of CPUs take back",
        ),
        ("cpu", 2, {}, "2 pipeline stages do not guess"),
        ("cpu", 1, {"head": "score", "num_labels": 2}, "generates nothing"),
    ],
)
def test_what_cannot_guess_refuses_to(device, num_stages, changes, why):
    architecture = tiny_architecture(**changes)
    engine = EngineConfig(
        parallel=ParallelConfig(pipeline_parallel_size=num_stages),
        speculative=SpeculativeConfig(enabled="true"),
        worker=WorkerConfig(enforce_eager=True),
    )
    traits = DeviceTraits(device=device, prefers_bfloat16=True, native_kernels=True)
    with pytest.raises(
        FeatureDisabled, match=rf"speculative\.enabled = true: .*{why}.*; set it to auto or false"
    ):
        resolve_for_device(engine, architecture, traits)
    for enabled in ("auto", "false"):
        without = replace(engine, speculative=SpeculativeConfig(enabled=enabled))
        config = resolve_for_device(without, architecture, traits)
        assert config.engine.speculative.enabled == "false"
        assert (why in config.no_guesses) == (enabled == "auto")
    for enabled in ("auto", "true"):
        guessing = replace(engine, speculative=SpeculativeConfig(enabled=enabled, model="small"))
        with pytest.raises(FeatureDisabled, match=rf"speculative\.model = small: .*{why}.*; leave it empty"):
            resolve_for_device(guessing, architecture, traits)
    off = replace(engine, speculative=SpeculativeConfig(enabled="false", model="small"))
    assert resolve_for_device(off, architecture, traits).max_samples_per_row == 1


def test_a_cuda_device_guesses_where_it_is_asked_to():
    traits = DeviceTraits(device="cuda:0", prefers_bfloat16=True)
    by_itself = resolve_for_device(EngineConfig(), tiny_architecture(), traits)
    assert by_itself.max_samples_per_row == 1
    assert by_itself.no_guesses == "what guesses bring was not measured on cuda:0; true lets it guess"
    asked = EngineConfig(speculative=SpeculativeConfig(enabled="true"))
    config = resolve_for_device(asked, tiny_architecture(), traits)
    assert (config.max_samples_per_row, config.no_guesses) == (9, "")
    for enabled in ("auto", "true"):
        by_model = replace(asked, speculative=SpeculativeConfig(enabled=enabled, model="small"))
        why = r"speculative\.model = small: a model or a layer does not guess on cuda:0 yet; leave it empty"
        with pytest.raises(FeatureDisabled, match=why):
            resolve_for_device(by_model, tiny_architecture(), traits)
        by_layer = replace(asked, speculative=SpeculativeConfig(enabled=enabled, proposers="ngram,mtp"))
        why = r"speculative\.proposers = ngram,mtp: a model or a layer does not guess on cuda:0 yet; leave mtp out"
        with pytest.raises(FeatureDisabled, match=why):
            resolve_for_device(by_layer, tiny_architecture(), traits)
    off = replace(asked, speculative=SpeculativeConfig(enabled="false", model="small"))
    assert resolve_for_device(off, tiny_architecture(), traits).max_samples_per_row == 1


@pytest.mark.parametrize(
    ("native_kernels", "interval", "max_tokens", "why"),
    [
        (True, 48, 8, ""),
        (True, 32, 8, r"every cache\.state_interval = 32 tokens, and speculative\.max_tokens = 8 needs 45"),
        (True, 32, 5, ""),
        (False, 256, 8, "only the native kernels of CPUs take back behind a wrong guess"),
    ],
)
def test_states_are_taken_back_by_native_kernels_within_a_page(native_kernels, interval, max_tokens, why):
    architecture = tiny_architecture(
        state=StateSpec("mamba", taps=3, num_heads=1, value_dim=8, key_dim=2), attention="none"
    )
    traits = DeviceTraits(device="cpu", native_kernels=native_kernels)
    engine = EngineConfig(
        cache=CacheConfig(state_interval=interval), speculative=SpeculativeConfig(max_tokens=max_tokens)
    )
    config = resolve_for_device(engine, architecture, traits)
    assert config.engine.speculative.enabled == ("false" if why else "true")
    assert re.search(why, config.no_guesses)
    asked = replace(engine, speculative=replace(engine.speculative, enabled="true"))
    if not why:
        assert resolve_for_device(asked, architecture, traits).max_samples_per_row == 1 + max_tokens
        return
    with pytest.raises(FeatureDisabled, match=rf"enabled = true: .*{why}.*; set it to auto or false"):
        resolve_for_device(asked, architecture, traits)


def test_ranks_guess_by_a_model_too():
    engine = EngineConfig(
        model=ModelConfig(batch_invariant="true"), parallel=ParallelConfig(tensor_parallel_size=2)
    )
    traits = DeviceTraits(device="cpu", prefers_bfloat16=True, native_kernels=True)
    for enabled, max_samples in (("auto", 9), ("true", 9), ("false", 1)):
        chosen = replace(engine, speculative=SpeculativeConfig(enabled=enabled))
        assert resolve_for_device(chosen, tiny_architecture(), traits).max_samples_per_row == max_samples
    for enabled in ("auto", "true"):
        guessing = replace(engine, speculative=SpeculativeConfig(enabled=enabled, model="small"))
        assert resolve_for_device(guessing, tiny_architecture(), traits).max_samples_per_row == 9
        staged = replace(guessing, parallel=ParallelConfig(pipeline_parallel_size=2))
        with pytest.raises(
            FeatureDisabled, match=r"model = small: 2 pipeline stages do not guess yet; leave it"
        ):
            resolve_for_device(staged, tiny_architecture(), traits)


@pytest.mark.parametrize(
    ("native_kernels", "batch_invariant", "enabled"),
    [(True, "auto", "true"), (True, "false", "false"), (False, "auto", "false")],
)
def test_a_worker_guesses_by_itself_where_no_tie_may_fall_otherwise(native_kernels, batch_invariant, enabled):
    engine = EngineConfig(model=ModelConfig(batch_invariant=batch_invariant))
    assert engine.speculative.enabled == "auto"
    config = resolve_for_device(
        engine, tiny_architecture(), DeviceTraits(device="cpu", native_kernels=native_kernels)
    )
    assert config.engine.speculative.enabled == enabled
    assert config.no_guesses == (
        "" if enabled == "true" else "near ties may fall otherwise, since model.batch_invariant is false"
    )
    by_model = replace(engine, speculative=SpeculativeConfig(model="small"))
    config = resolve_for_device(by_model, tiny_architecture(), DeviceTraits(device="cpu"))
    assert config.engine.speculative.enabled == "true"
    asked = replace(engine, speculative=SpeculativeConfig(enabled="true"))
    config = resolve_for_device(asked, tiny_architecture(), DeviceTraits(device="cpu"))
    assert config.engine.speculative == asked.speculative
