"""A rank never holds much more than its share of the weights, not even while it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.parallel.test_tensor_parallel import SIZES
from tests.worker.ranks import ROOT

MODEL = SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
}
CODES = MODEL | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "quantization_config": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
    },
}
"""A model of 4 bits, of as many bytes."""
LOAD = """
import ctypes, json, sys
from pathlib import Path
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages that are not full are not looked at
import torch
from triptych_services.worker.context.rank_group import OneRank
from triptych_services.worker.context.resolve import resolve_for_device
from triptych_services.worker.context.resolved_config import DeviceTraits
from triptych_services.worker.layers.weights import weight_bytes
import triptych_services.worker.models.decoder  # whose import is no weight
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych.checkpoint.config_json import read_architecture
from triptych.config import EngineConfig, ModelConfig, ParallelConfig, WorkerConfig
from triptych_kernels.cpu.library import isa

directory, rank, num_ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
engine = EngineConfig(
    model=ModelConfig(dtype="float32"),
    worker=WorkerConfig(rank=rank),
    parallel=ParallelConfig(tensor_parallel_size=num_ranks),
)

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

config = resolve_for_device(
    engine, read_architecture(directory), DeviceTraits(device="cpu", native_kernels=bool(isa()))
)
group = OneRank(rank=rank, size=num_ranks, tensor_parallel_size=num_ranks)
torch.zeros(8).to(torch.bfloat16).float()
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
before = status("VmRSS")
model = load_model(config, open_checkpoint(directory), group=group)
print(json.dumps({"peak": status("VmHWM") - before, "share": weight_bytes(model)}))
"""
OWN_BYTES = 40 << 20
"""Libraries that a first load needs, 9 MiB, what allocators keep, and pages of the file that the system maps beside
those that are read: together 16 to 22 MiB on most runs, and 32 where the file lay in large pages of the cache."""


def write_model(directory: Path, config: dict[str, Any]) -> None:
    """Write a model of zeros, its matrices as GPTQ has them if the config says so."""
    from safetensors.torch import save_file

    from triptych.checkpoint.config_json import read_architecture
    from triptych_services.worker.loader.random import RandomCheckpoint

    (directory / "config.json").write_text(json.dumps(config))
    shapes = RandomCheckpoint(read_architecture(directory), 0).tensors
    tensors = {name: torch.zeros(stored.shape, dtype=torch.bfloat16) for name, stored in shapes.items()}
    for name in [name for name in tensors if "_proj" in name and "quantization_config" in config]:
        rows, columns = tensors.pop(name).shape
        tensors |= {
            name.replace("weight", "qweight"): torch.zeros(columns // 8, rows, dtype=torch.int32),
            name.replace("weight", "qzeros"): torch.full(
                (columns // 128, rows // 8), 0x77777777, dtype=torch.int32
            ),
            name.replace("weight", "scales"): torch.ones(columns // 128, rows, dtype=torch.float16),
        }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module", params=["bfloat16", "gptq"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, CODES if request.param == "gptq" else MODEL)
    return directory


@pytest.mark.thorough
@pytest.mark.quick_cases(1)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's peak")
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_peak_while_loading_is_a_rank_s_share_and_little_more(num_ranks: int, directory: Path) -> None:
    sources = os.pathsep.join(str(ROOT / source) for source in ("libs", "kernels", "."))
    command = [sys.executable, "-c", LOAD, str(directory), str(num_ranks - 1), str(num_ranks)]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": sources},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    whole = (directory / "model.safetensors").stat().st_size
    assert found["share"] < 1.1 * whole / num_ranks
    # The process's own needs are the same for a model of any size; the whole file would be 96 MiB and more.
    assert found["peak"] < 1.1 * found["share"] + OWN_BYTES, found
