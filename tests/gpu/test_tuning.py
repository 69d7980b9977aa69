"""tools.tune on the device: one choice of each kind is measured and then launched with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import triptych_kernels.triton.tuning.tunable as tuning
from tools.tune import stored
from tools.tune.__main__ import main
from tools.tune.cases import NAME_TO_TUNABLE
from triptych_kernels.triton.tuning.tunable import read_file

CHOICES = (
    "linear_few_rows(out_features=1024, in_features=2048, dtype=bfloat16, rows=1)",
    "paged_attention_prefill(head_dim=64, kv_dtype=bfloat16)",
    "quantized_linear(out_features=1024, in_features=2048, bits=4, is_affine=True, rows=16)",
    "w8a8_linear(out_features=1024, in_features=2048, element_dtype=int8, rows=16)",
)


@pytest.mark.usefixtures("device")
def test_choices_are_measured_and_launchers_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), "--only", *CHOICES, "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert "4 measured, 0 failed, 0 left" in printed
    assert "the default's bits" not in printed, "a row's bits depend on the tiles of its product"
    (path,) = tmp_path.iterdir()
    file = read_file(path)
    stored.check(file, NAME_TO_TUNABLE)
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.file_of_device.cache_clear()
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        for name in file.kernel_to_entries:
            tunable = NAME_TO_TUNABLE[name]
            tunable.forget()
            for key, config in tunable.read(file).items():
                assert tunable.chosen(device, *key) == config
            tunable.forget()
    finally:
        tuning.file_of_device.cache_clear()
