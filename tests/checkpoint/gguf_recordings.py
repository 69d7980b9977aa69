"""Conversions of llama.cpp's own converter, recorded: which number of the checkpoint each number of the file is.

A conversion moves numbers, and changes some of them in one of a few ways. So a recording holds the metadata, and for
each tensor of the file its shape, the change, and the places of its numbers among those of all tensors of the
checkpoint, in the order of their names. It does not hold the numbers: tests take those of their own checkpoint. The
same is done for weights that the file has in its metadata.

`python -m tests.checkpoint.gguf_recordings LLAMA_CPP [NAME...]` records them anew. LLAMA_CPP is the directory of
llama.cpp's source, as `vendor/llama.cpp` of the source distribution of llama-cpp-python.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
import zlib
from base64 import b85decode, b85encode
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.checkpoint.gguf_families import CONVERSIONS, ENCODER_CONVERSIONS

ALL_CONVERSIONS = CONVERSIONS | ENCODER_CONVERSIONS
RECORDINGS_FILE = Path(__file__).with_name("gguf_recordings.json.xz")

Floats = NDArray[np.float32]
Tables = dict[str, tuple[Floats, NDArray[np.int64]]]
"""Change -> the checkpoint's numbers after it, sorted, and the places of these."""

CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda numbers: numbers,
    "+1": lambda numbers: numbers + 1,
    "-exp": lambda numbers: -torch.exp(numbers),
    **{f"*{factor}": lambda numbers, factor=factor: numbers * factor for factor in (0.7, 1.5, 0.8, 1.25)},
    "*1.25*0.6": lambda numbers: numbers * 0.6 * 1.25,
    **{f"*{factor}": lambda numbers, factor=factor: numbers * factor for factor in (1.3, 0.4, 0.5, 2.0)},
}
"""Changes that converters make to numbers; the factors are those of the tiny Falcon-H1."""


@cache
def recordings() -> dict[str, Any]:
    """Return name of a conversion -> {"metadata", "tensors"}."""
    return json.loads(lzma.decompress(RECORDINGS_FILE.read_bytes()))


def write_recorded(
    name: str,
    checkpoint: Path,
    path: Path,
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    is_dequantized: bool = False,
    others: Mapping[str, Floats] | None = None,
    keys: Mapping[str, Any] | None = None,
    num_further: int = 0,
) -> None:
    """Write the .gguf file that llama.cpp's converter makes of the checkpoint of a conversion.

    Args:
        checkpoint: Directory in which the tiny model of that name was saved.
        quantization: Type of the matrices with rows of whole blocks.
        is_dequantized: Whether the file holds what they were rounded to, in float32.
        others: Further tensors of the file.
        keys: Values of the metadata in place of those that were recorded; None leaves one out.
        num_further: Layers behind the last one that predict further tokens, of which tensors are among `others`.
    """
    recording, numbers = recordings()[name], numbers_of(checkpoint)
    writer = gguf.GGUFWriter(path, recording["metadata"]["general.architecture"][1])
    for key, (kind, value) in recording["metadata"].items():
        if key != "general.architecture":
            value = value + num_further if key.endswith(".block_count") else value
            types = [gguf.GGUFValueType[each] for each in kind.split()]
            value = _restore(value, numbers).tolist() if isinstance(value, dict) else value
            if (value := (keys or {}).get(key, value)) is not None:
                writer.add_key_value(key, value, types[0], sub_type=types[1] if types[1:] else None)
    if num_further:
        writer.add_nextn_predict_layers(num_further)
    _add_vocabulary(writer)
    for tensor, facts in recording["tensors"].items():
        array = _restore(facts, numbers)
        per_block = gguf.GGML_QUANT_SIZES[quantization][0]
        kind = (
            quantization if array.ndim > 1 and array.shape[-1] % per_block == 0 else GGMLQuantizationType.F32
        )
        data = quantize(array, kind)
        if is_dequantized:
            data, kind = dequantize(data, kind), GGMLQuantizationType.F32
        writer.add_tensor(tensor, data, raw_dtype=kind)
    for tensor, array in (others or {}).items():
        writer.add_tensor(tensor, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def numbers_of(checkpoint: Path) -> torch.Tensor:
    """Return all numbers of a checkpoint, tensor by tensor in the order of their names."""
    tensors = {name: t for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()}
    return torch.cat([tensors[name].float().flatten() for name in sorted(tensors)])


def _restore(facts: dict[str, Any], numbers: torch.Tensor) -> Floats:
    if "values" in facts:
        return np.array(facts["values"], dtype=np.float32)
    steps = np.frombuffer(zlib.decompress(b85decode(facts["steps"])), dtype=np.int32)
    chosen = numbers[torch.from_numpy(np.cumsum(steps))]
    return CHANGES[facts["change"]](chosen).view(facts["shape"]).numpy()


def record(llama_cpp: Path, names: Sequence[str]) -> None:
    """Run the converter on checkpoints and write the recordings.

    Args:
        names: Those to record anew; the others stay as they are.
    """
    for module in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        del sys.modules[module]  # the converter has a version of its own
    sys.path.insert(0, str(llama_cpp / "gguf-py"))
    sys.path.append(str(llama_cpp))
    found = {name: old for name, old in recordings().items() if names and name in ALL_CONVERSIONS}
    for name in names or ALL_CONVERSIONS:
        found[name] = _record(name)
        print(f"{name}: {len(found[name]['tensors'])} tensors", flush=True)
    RECORDINGS_FILE.write_bytes(lzma.compress(json.dumps(found).encode(), preset=9 | lzma.PRESET_EXTREME))


def _record(name: str) -> dict[str, Any]:
    import conversion  # llama.cpp's
    from conversion.base import ModelBase, ModelType, get_model_architecture
    from gguf import GGUFReader, LlamaFileType

    conversion_of = ALL_CONVERSIONS[name]
    with tempfile.TemporaryDirectory() as scratch:
        directory, path = Path(scratch), Path(scratch, "model.gguf")
        conversion_of.save(directory)
        _make_distinct(directory)
        vocabulary = {f"t{index}": index for index in range(97)}
        tokens = {"model": {"type": "WordPiece", "vocab": vocabulary}, "added_tokens": []}
        (directory / "tokenizer.json").write_text(json.dumps(tokens))
        config = ModelBase.load_hparams(directory, False) | conversion_of.for_converter
        kind = conversion.get_model_class(get_model_architecture(config, ModelType.TEXT))
        conversion.get_model_class("LlamaForCausalLM").set_vocab = lambda self: None
        own = {"set_vocab": lambda self: None, "no_mtp": True, "model_arch": kind.model_arch}
        converter = type(kind.__name__, (kind,), own)
        file_config = json.loads((directory / "config.json").read_text()) | conversion_of.for_converter
        (directory / "config.json").write_text(json.dumps(file_config))
        converter(directory, LlamaFileType.ALL_F32, path, eager=True, hparams=config).write()
        reader = GGUFReader(path)
        numbers = numbers_of(directory)
        tables = {change: _places(function(numbers)) for change, function in CHANGES.items()}
        metadata = {
            key: (" ".join(each.name for each in field.types), _contents(key, field, tables))
            for key, field in reader.fields.items()
            if not key.startswith(("GGUF.", "general.", "tokenizer.")) or key == "general.architecture"
        }
        tensors = {
            tensor.name: {"values": tensor.data.tolist()}
            if tensor.name.startswith("rope_")  # divisors of frequencies, which config.json has
            else _find(tensor.data, [int(n) for n in reversed(tensor.shape)], tables)
            for tensor in reader.tensors
        }
    return {"metadata": metadata, "tensors": tensors}


def _contents(key: str, field: Any, tables: Tables) -> Any:
    """Return the value of a key, or the places of its numbers if they are the checkpoint's."""
    value = field.contents()
    return _find(np.array(value, np.float32), [len(value)], tables) if key.startswith("xielu.") else value


def _add_vocabulary(writer: Any) -> None:
    """Write a vocabulary that serves for any: tokens of a tiny model are only numbers."""
    tokens = ["a", "b", "ab", *(f"t{index}" for index in range(94))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["a b"])


def _make_distinct(directory: Path) -> None:
    """Give every number of a checkpoint a value of its own, so that its place in the file tells where it is from."""
    total, done = len(numbers_of(directory)), 0
    values = torch.linspace(-2, 2, total)[torch.randperm(total, generator=torch.Generator().manual_seed(0))]
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            tensors[name] = values[done : done + tensor.numel()].view(tensor.shape).clone()
            done += tensor.numel()
        save_file(tensors, file, metadata={"format": "pt"})


def _places(numbers: torch.Tensor) -> tuple[Floats, NDArray[np.int64]]:
    order = np.argsort(numbers.numpy(), kind="stable")
    return numbers.numpy()[order], order


def _find(data: Floats, shape: list[int], tables: Tables) -> dict[str, Any]:
    flat = np.ascontiguousarray(data).reshape(-1)
    for change, (values, order) in tables.items():
        at = np.searchsorted(values, flat).clip(max=len(values) - 1)
        if (values[at] == flat).all():
            steps = np.diff(order[at].astype(np.int32), prepend=np.int32(0))
            return {
                "shape": shape,
                "change": change,
                "steps": b85encode(zlib.compress(steps.tobytes(), 9)).decode(),
            }
    raise AssertionError(f"a tensor of {shape} is made of numbers that are not the checkpoint's")


if __name__ == "__main__":
    record(Path(sys.argv[1]), sys.argv[2:])
