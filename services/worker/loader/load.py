"""Opening a checkpoint and streaming it into a model, so that no rank holds the weights twice."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
from torch import nn

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.checkpoint.config_json import read_architecture, read_stored_quantization
from triptych.checkpoint.eagle import Eagle3Spec
from triptych.checkpoint.gguf.index import GGUF_INDEX_FILE
from triptych.checkpoint.mtp import MtpSpec
from triptych.errors import FeatureDisabled, ModelError
from triptych_kernels.weights.quantized import QuantizedWeight, allow_wide_products
from triptych_services.worker.context.device import STORED_DTYPES, TORCH_DTYPES
from triptych_services.worker.context.garbage import without_collection
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.context.rank_group import OneRank, RankGroup
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.layers.quantization import (
    CodedStack,
    CodedTensor,
    StoredBlocks,
    UnreadTensor,
    keeps_codes,
)
from triptych_services.worker.layers.weights import LoadedTensor, linear_weights
from triptych_services.worker.loader.base import Checkpoint, StoredTensor
from triptych_services.worker.loader.gguf import GgufCheckpoint
from triptych_services.worker.loader.quantized import QuantizedCheckpoint
from triptych_services.worker.loader.random import RandomCheckpoint
from triptych_services.worker.loader.safetensors import SafetensorsCheckpoint
from triptych_services.worker.models.base import CausalLM, StagedModel
from triptych_services.worker.models.decoder import DecoderForCausalLM, MtpLayer
from triptych_services.worker.models.eagle import FLAGS, OFFSETS, Eagle3Head, tokens_of_head
from triptych_services.worker.models.registry import create_model

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called after each tensor with (bytes read, bytes in all), as stored."""

_SECONDS_BETWEEN_LINES = 5.0

DuringLoad = Callable[[CausalLM], AbstractContextManager[object]]


def open_checkpoint(
    directory: Path,
    *,
    format: str = "auto",
    seed: int = 0,
    device: torch.device | None = None,
    architecture: ModelArchitecture | None = None,
) -> Checkpoint:
    """Open the weights of a model directory.

    Args:
        directory: As of `triptych.hub.resolve_model`.
        format: `load.format`: auto, safetensors, gguf, or random, which reads config.json only.
        seed: `model.seed`, for random weights.
        device: Device that draws random weights and converts stored ones; None: the CPU.
        architecture: What random weights are drawn for; None: what config.json says to a native family.

    Raises:
        ModelError: There are no weights, or a file is missing, cut short or not understood.
    """
    if format == "random":
        return RandomCheckpoint(architecture or read_architecture(directory), seed, device)
    is_gguf = (directory / GGUF_INDEX_FILE).is_file()
    if format not in ("auto", "gguf" if is_gguf else "safetensors"):
        raise ModelError(
            f"load.format: {format}, but {directory} holds {'GGUF' if is_gguf else 'no GGUF'} weights; "
            "set it to auto"
        )
    if is_gguf:
        return GgufCheckpoint(directory)
    quantization = read_stored_quantization(directory) if architecture is None else architecture.quantization
    if quantization is not None:
        return QuantizedCheckpoint(directory, quantization, device)
    return SafetensorsCheckpoint(directory, device)


def load_model(
    config: ResolvedConfig,
    checkpoint: Checkpoint,
    *,
    group: RankGroup | None = None,
    progress: Progress | None = None,
    during: DuringLoad = nullcontext,
    kept_types: list[str] | None = None,
) -> CausalLM:
    """Create the model that `config.architecture` names and stream the weights into it, tensor by tensor.

    Args:
        group: The connected ranks; None: one rank.
        progress: Called after each tensor.
        during: Makes a context manager that is entered before the model has weights, and left when it has all of them.
        kept_types: Gets the forms of the file of which weights keep the codes, the most frequent first.

    Raises:
        FeatureDisabled: No model is registered for the architecture.
        ModelError: A tensor is missing, left over or of another shape.
    """
    context = _context_of(config, checkpoint, group)
    with without_collection():  # among the objects of a growing model it finds no garbage, and looks often
        model = create_model(context=context)
    names = list(checkpoint.tensors)
    if config.rank.num_stages > 1:
        assert isinstance(model, StagedModel), "checked at its creation"
        names = [name for name in names if not model.is_elsewhere(name)]
    _check_kv_scales(checkpoint, config)
    with during(model):
        kept = _fill(model, checkpoint, names, config, progress)
    if kept_types is not None:
        kept_types += kept
    return model


def load_mtp_layer(config: ResolvedConfig, checkpoint: Checkpoint, spec: MtpSpec) -> MtpLayer:
    """Create the layer with which a checkpoint guesses, and stream its weights into it.

    Args:
        config: Its architecture has this layer only.

    Raises:
        ModelError: A tensor is missing, left over or of another shape.
    """
    with without_collection():
        layer = MtpLayer(spec, context=_context_of(config, checkpoint, None))
    _fill(layer, checkpoint, [name for name in checkpoint.tensors if spec.holds(name)], config)
    return layer


def load_ends(config: ResolvedConfig, checkpoint: Checkpoint) -> DecoderForCausalLM:
    """Create a model without its layers, and stream the weights of its embedding and its head into it.

    Args:
        config: That of one rank.

    Raises:
        ModelError: A tensor is missing or of another shape.
    """
    with without_collection():
        model = DecoderForCausalLM(context=_context_of(config, checkpoint, None), has_layers=False)
    _fill(model, checkpoint, [name for name in checkpoint.tensors if not model.is_elsewhere(name)], config)
    return model


def load_eagle3_head(
    config: ResolvedConfig, directory: Path, spec: Eagle3Spec
) -> tuple[Eagle3Head, torch.Tensor | None]:
    """Create a head that guesses, and stream its weights into it.

    Args:
        config: Its architecture is that of `spec`.

    Returns:
        The head, and [its tokens] int64, their ids in the model; None: they are the model's.

    Raises:
        ModelError: A tensor is missing, left over or of another shape, or a token is none of the model's.
    """
    checkpoint = SafetensorsCheckpoint(directory, has_codes=True)
    offsets = checkpoint.view(OFFSETS) if OFFSETS in checkpoint.tensors else None
    tokens = tokens_of_head(directory, offsets, spec)
    with without_collection():
        head = Eagle3Head(spec, context=_context_of(config, checkpoint, None))
    _fill(head, checkpoint, [name for name in checkpoint.tensors if name not in (OFFSETS, FLAGS)], config)
    return head, tokens


def _context_of(config: ResolvedConfig, checkpoint: Checkpoint, group: RankGroup | None) -> ModelContext:
    current = config.architecture.stored_names.current
    tensor_types = {current(name): stored.type for name, stored in checkpoint.tensors.items()}
    tensor_formats = {
        current(name): stored.format
        for name, stored in checkpoint.tensors.items()
        if stored.format is not None
    }
    return ModelContext(config, group or OneRank(), tensor_types, tensor_formats)


def _fill(
    model: CausalLM,
    checkpoint: Checkpoint,
    names: Sequence[str],
    config: ResolvedConfig,
    progress: Progress | None = None,
) -> list[str]:
    """Stream these tensors into a model, and return the forms of the file of which weights keep the codes, the most
    frequent first.
    """
    dequantized: set[str] = set()
    rate = _LoadRate(sum(checkpoint.tensors[name].size for name in names), progress)
    with _one_thread(), without_collection():
        model.load_weights(_stream(checkpoint, names, config, rate, dequantized))
    rate.log_end()
    _log_dequantized(checkpoint, dequantized, config)
    kept = _kept_types(checkpoint, set(names) - dequantized, config)
    if kept:
        log.info("weights keep the codes of the file: %s", ", ".join(f"{n} {kind}" for kind, n in kept))
    if not config.batch_invariant:
        _allow_wide_products(model, TORCH_DTYPES[config.dtype])
    return [kind for kind, _ in kept]


def _check_kv_scales(checkpoint: Checkpoint, config: ResolvedConfig) -> None:
    """Say that scales of keys and values are not used, with a cache that needs none.

    Raises:
        FeatureDisabled: The cache is of 8-bit floats, for which they are meant; names it.
    """
    stored = config.architecture.quantization
    if not isinstance(checkpoint, QuantizedCheckpoint) or stored is None:
        return
    if not checkpoint.kv_scales and not stored.kv_cache:
        return
    made_for = f"{stored.kv_cache or '8-bit float'}, with {len(checkpoint.kv_scales)} scales of them"
    if config.kv_dtype == "float8_e4m3fn":
        raise FeatureDisabled(
            f"cache.dtype = {config.kv_dtype}",
            f"the checkpoint was made for keys and values as {made_for}, which this cache does not apply; set "
            "it to auto",
        )
    log.warning(
        "the checkpoint was made for keys and values as %s (%s); they are in %s here, which needs none",
        made_for,
        ", ".join(checkpoint.kv_scales[:2]) or "none",
        config.kv_dtype,
    )


def _loses_codes(checkpoint: Checkpoint, stored: StoredTensor) -> bool:
    """Return whether a tensor is a matrix of a .gguf file in blocks that have no format here."""
    is_in_blocks = isinstance(checkpoint, GgufCheckpoint) and stored.type not in STORED_DTYPES
    return is_in_blocks and stored.format is None and len(stored.shape) > 1


def _coded(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype, dequantized: set[str]
) -> CodedTensor | StoredBlocks | CodedStack:
    """Return a tensor of quantized weights, a matrix or those of all experts."""
    stored = checkpoint.tensors[name]
    format, (*experts, rows, columns) = stored.format, stored.shape
    assert format is not None, "it has codes"

    def matrix(expert: int) -> CodedTensor | StoredBlocks:
        codes = partial(checkpoint.read_codes, name, expert=expert)
        if not isinstance(checkpoint, GgufCheckpoint):
            return CodedTensor(name, format, (rows, columns), codes, dtype, dequantized)
        read = partial(_read_expert, checkpoint, name, dtype, expert if experts else None)
        tensor = CodedTensor(name, format, (rows, columns), codes, dtype, dequantized, read)
        blocks = checkpoint.read_blocks(name).narrow(0, expert * rows, rows)
        return StoredBlocks(stored.type, blocks, tensor.shape, tensor)

    return CodedStack((experts[0], rows, columns), matrix) if experts else matrix(0)


def _read_expert(
    checkpoint: GgufCheckpoint,
    name: str,
    dtype: torch.dtype,
    expert: int | None,
    dim: int,
    start: int,
    length: int,
) -> torch.Tensor:
    """Read a part of a matrix, or of that of one expert, in floating point, which blocks are read as directly."""
    if expert is None:
        return checkpoint.read_part(name, dtype, dim, start, length)
    return checkpoint.read_part(name, dtype, 0, expert, 1)[0].narrow(dim, start, length)


def _kept_types(
    checkpoint: Checkpoint, names: Collection[str], config: ResolvedConfig
) -> list[tuple[str, int]]:
    """Return the forms of these tensors that have codes, with their numbers, the most frequent first."""
    if not keeps_codes(config.quantization):
        return []
    tensors = (checkpoint.tensors[name] for name in sorted(names))
    return Counter(stored.type for stored in tensors if stored.format is not None).most_common()


def _log_dequantized(checkpoint: Checkpoint, names: Collection[str], config: ResolvedConfig) -> None:
    """Say which quantized weights are held in floating point, and why, by the forms that their files have."""
    by_form: dict[str, list[str]] = {}
    for name in sorted(names):
        by_form.setdefault(checkpoint.tensors[name].type, []).append(name)
    for form, own in by_form.items():
        log.warning(
            "%d weights stored as %s become %s, since no product of this device reads them so: %s%s",
            len(own),
            form,
            config.weight_dtype if config.quantization in ("none", "stored") else config.quantization,
            ", ".join(own[:3]),
            " …" if len(own) > 3 else "",
        )


def _allow_wide_products(model: CausalLM, dtype: torch.dtype) -> None:
    assert isinstance(model, nn.Module), "the contract of CausalLM"
    quantized = [weight for weight in linear_weights(model) if isinstance(weight, QuantizedWeight)]
    for (out_features, in_features, _), wide in allow_wide_products(quantized, dtype).items():
        log.info(
            "quantized products [%d, %d] of %d rows and more are computed in %s, faster",
            out_features,
            in_features,
            wide.num_rows,
            "bytes" if wide.bits == 8 else "bfloat16",
        )


class _LoadRate:
    """Counts the bytes of files that have become weights, and says in the log how fast."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done = 0
        self._started = self._said = time.perf_counter()

    def add(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)
        now = time.perf_counter()
        if now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            log.info("weights: %s", self._describe(now))

    def log_end(self) -> None:
        log.info("weights are loaded: %s", self._describe(time.perf_counter()))

    def _describe(self, now: float) -> str:
        seconds = max(now - self._started, 1e-9)
        done, total = self._done / 1e9, self._total / 1e9
        return f"{done:.2f} of {total:.2f} GB in {seconds:.1f} s, {done / seconds:.2f} GB/s"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from spreading thousands of short operations over its threads.

    They are bound by memory, and each ends at a barrier. Beside other busy processes, as when a whole stack starts, the
    embedded model took 10 s at the barriers; one thread takes 0.3 s, busy or not.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _stream(
    checkpoint: Checkpoint,
    names: Sequence[str],
    config: ResolvedConfig,
    rate: _LoadRate,
    dequantized: set[str],
) -> Iterator[tuple[str, LoadedTensor]]:
    """Yield (name, tensor) one by one; the model copies its part of each to its device before it reads the next.

    Args:
        dequantized: Gets the names of tensors of which the model reads codes as floating point.
    """
    is_plain = config.quantization in ("none", "stored")
    # what is quantized is rounded once, from float32
    dtype = TORCH_DTYPES[config.weight_dtype] if is_plain else torch.float32
    # beside activations in float32 nothing is rounded that the file does not round
    own_dtypes = STORED_DTYPES if is_plain and config.dtype == "float32" else {}
    for name, next_name in zip_longest(names, names[1:]):
        if next_name is not None:  # a disk reads while this one is packed
            checkpoint.read_ahead(next_name)
        stored = checkpoint.tensors[name]
        read = partial(checkpoint.read_part, name, own_dtypes.get(stored.type, dtype))
        if stored.format is None or (
            isinstance(checkpoint, GgufCheckpoint) and not keeps_codes(config.quantization)
        ):
            if keeps_codes(config.quantization) and _loses_codes(checkpoint, stored):
                dequantized.add(name)
            yield name, UnreadTensor(stored.shape, read)
        else:
            yield name, _coded(checkpoint, name, dtype, dequantized)
        checkpoint.release(name)
        rate.add(stored.size)
