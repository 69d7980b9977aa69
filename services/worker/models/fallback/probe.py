"""A pass over a model without weights: what its layers attend with, and that nothing else mixes its tokens.

Parameters are one number each, however large they are, and projections return something that depends on their input
row by row, so that the pass takes no memory and no time. All else is the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from triptych.errors import FeatureDisabled
from triptych_services.worker.models.fallback.attention import Attention, AttentionCall, AttentionCalls
from triptych_services.worker.models.fallback.experts import is_stacked
from triptych_services.worker.models.fallback.layers import features, is_projection

_FEATURE = "model.backend = transformers"
_NUM_TOKENS = 5
_MAX_FIRST_POSITION = 3  # RoBERTa begins after the id of its padding, which is 1
_GIVEN = torch.empty(0)
"""Default of an argument: the positions of the probe."""


class Parts(Protocol):
    """The interface of a model that has been cut at its ends."""

    body: nn.Module
    calls: AttentionCalls

    def modules(self) -> Iterator[nn.Module]:
        """Return all modules, those of the model included."""
        ...

    def __call__(self, token_ids: Tensor, positions: Tensor | None, attention: Attention | None) -> Tensor:
        """Compute the states [num_tokens, hidden_size] of tokens [num_tokens]."""
        ...


class Probe:
    """A model of transformers that computes with numbers of no meaning."""

    def __init__(
        self, model: PreTrainedModel, cut: Callable[[PreTrainedModel], Parts], *, max_positions: int
    ) -> None:
        """
        Args:
            model: On the meta device.
            cut: Makes the model's body callable by itself; afterwards the model may lack it.
            max_positions: Number of positions that the model may be called with.
        """
        self.class_name = type(model).__name__
        self._stacks = _stacks(model)
        self._embedding = embedding = input_embedding(model)
        self.vocab_size = embedding.num_embeddings
        self.hidden_size = embedding.embedding_dim
        self.input_sizes = sorted({features(m)[0] for m in model.modules() if is_projection(m)})
        """Lengths of the projections' inputs."""
        head = model.get_output_embeddings()
        self.is_tied = head is not None and head.weight is embedding.weight
        self._parts = cut(model)
        simplify(self._parts)
        self._embedding.register_forward_hook(self._spoil)
        self._dirty: int | None = None
        last = max_positions - 1
        self._positions = torch.tensor([0, min(1, last), min(7, last), last // 2, last])
        self._ids = probe_ids(_NUM_TOKENS, self.vocab_size)

    @torch.inference_mode()
    def attention_calls(self) -> list[AttentionCall]:
        """Return the calls of one pass, in their order.

        Raises:
            FeatureDisabled: A layer does not attend, or what it does is not supported; names it.
        """
        recorder = RowWise()
        self.hidden_size = self._run(slice(None), recorder).shape[1]
        names = [call.name for call in recorder.calls]
        for layers in self._stacks:
            idle = [
                layer for layer in layers if not any(f"{name}.".startswith(f"{layer}.") for name in names)
            ]
            # other stacks are those of images and sound, which no token goes through
            if idle and (not names or len(idle) < len(layers)):
                raise FeatureDisabled(
                    _FEATURE, f"{self.class_name}: {idle[0]} does not attend through the cache"
                )
        if not names:
            raise FeatureDisabled(
                _FEATURE, f"{self.class_name} does not call transformers' attention interface"
            )
        return recorder.calls

    @torch.inference_mode()
    def check_rows(self) -> None:
        """Check that a token's states depend on no other token, and not on its place in the step.

        A row of NaN must stay alone: whatever a sum, a convolution or a scan reads of it becomes NaN.

        Raises:
            FeatureDisabled: Something beside attention mixes tokens; names the module.
        """
        expected = self._run(slice(None), RowWise())
        for dirty in (0, _NUM_TOKENS - 1):
            clean = [row for row in range(_NUM_TOKENS) if row != dirty]
            with self._nan_in(dirty), self._culprits(dirty) as culprits:
                found = self._run(slice(None), RowWise())
            if not torch.allclose(found[clean], expected[clean], rtol=1e-4, atol=1e-4):
                where = f"{culprits[0]} of " if culprits else ""
                raise FeatureDisabled(_FEATURE, f"{where}{self.class_name} mixes tokens outside of attention")
        some = [3, 1]
        found = self._run(some, RowWise(), shifted=len(some))
        if not torch.allclose(found, expected[some], rtol=1e-4, atol=1e-4):
            raise FeatureDisabled(
                _FEATURE,
                f"{self.class_name} computes positions by a token's place in the step, not by its sequence",
            )

    @torch.inference_mode()
    def first_position(self) -> int:
        """Return the number that the class gives to the first token of a sequence.

        Raises:
            FeatureDisabled: It does not count on from there.
        """
        own = self._run(slice(None), RowWise(), positions=None)
        for first in range(_MAX_FIRST_POSITION + 1):
            counted = self._run(slice(None), RowWise(), positions=first + torch.arange(_NUM_TOKENS))
            if torch.allclose(own, counted, rtol=1e-4, atol=1e-4):
                return first
        raise FeatureDisabled(_FEATURE, f"{self.class_name} does not number a sequence's tokens one by one")

    def _run(
        self,
        rows: slice | Sequence[int],
        attention: RowWise,
        *,
        positions: Tensor | None = _GIVEN,
        shifted: int = 0,
    ) -> Tensor:
        try:
            with StandIns(shifted):
                hidden: Tensor = self._parts(
                    self._ids[rows], self._positions[rows] if positions is _GIVEN else positions, attention
                )
        except FeatureDisabled:
            raise
        except Exception as error:  # whatever a model raises that does not expect to be called so
            raise FeatureDisabled(
                _FEATURE, f"{self.class_name} cannot be called without its own cache and masks: {error}"
            ) from error
        return hidden

    def _spoil(self, module: nn.Module, arguments: Any, out: Tensor) -> Tensor:
        if self._dirty is not None:
            out[..., self._dirty, :] = torch.nan
        return out

    @contextmanager
    def _nan_in(self, row: int) -> Iterator[None]:
        self._dirty = row
        try:
            yield
        finally:
            self._dirty = None

    @contextmanager
    def _culprits(self, dirty: int) -> Iterator[list[str]]:
        """Note the modules that return a NaN in a row that was clean."""
        found: list[str] = []
        names = self._parts.calls.names

        def look(module: nn.Module, arguments: Any, out: Any) -> None:
            first = out[0] if isinstance(out, (tuple, list)) and out else out
            if (
                isinstance(first, Tensor)
                and first.is_floating_point()
                and first.shape[:2] == (1, _NUM_TOKENS)
            ):
                rows = first[0].isnan().flatten(1).any(1)
                rows[dirty] = False
                if rows.any():
                    found.append(f"{type(module).__name__} at {names.get(id(module), '')}")

        hooks = [module.register_forward_hook(look) for module in self._parts.body.modules()]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()


class RowWise:
    """Answers each token by its own value alone, and keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        num_heads = call.query.shape[1]
        key, value = (x.repeat_interleave(num_heads // x.shape[1], 1) for x in (call.key, call.value))
        return value * (1 + torch.tanh((call.query * key).mean(-1, keepdim=True)))


class StandIns(TorchDispatchMode):
    """Looks up waves in place of rows of tables, which are all the same here."""

    def __init__(self, shifted: int = 0) -> None:
        """
        Args:
            shifted: Length of `arange`s that begin one later: the places of tokens in a step. 0: of none.
        """
        super().__init__()
        self._shifted = shifted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding.default:
            waves = torch.arange(1, out.shape[-1] + 1) * 0.37
            return torch.sin((args[1][..., None] + 1) * waves).to(out.dtype)
        if self._shifted and func.name().startswith("aten::arange") and out.shape == (self._shifted,):
            return out + 1
        return out


def input_embedding(model: PreTrainedModel) -> nn.Embedding:
    """Return the table of the vocabulary.

    Raises:
        FeatureDisabled: The class has none, or one of another kind.
    """
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        embedding = None
    if not isinstance(embedding, nn.Embedding):
        kind = "no table" if embedding is None else type(embedding).__name__
        raise FeatureDisabled(_FEATURE, f"{type(model).__name__} has {kind} for its embedding")
    return embedding


def probe_ids(num_tokens: int, vocab_size: int) -> Tensor:
    """Return token ids [num_tokens] that are not all different, and none of the first, of which one may be padding."""
    return torch.tensor([13, 11, 14, 11, 15]).repeat(-(-num_tokens // 5))[:num_tokens] % vocab_size


def simplify(model: Parts) -> None:
    """Give each parameter one number, and let projections depend on their inputs row by row."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                number = (
                    torch.full((), 0.5)
                    if parameter.is_floating_point()
                    else torch.zeros((), dtype=parameter.dtype)
                )
                module._parameters[name] = nn.Parameter(number.expand(parameter.shape), requires_grad=False)
        if is_stacked(module):
            module.forward = _mix
        if is_projection(module):
            module.forward = _Spread(features(module)[1])


def _mix(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Take the place of a mixture of experts."""
    return hidden * top_k_weights.sum(-1, keepdim=True)


class _Spread:
    """Takes the place of a projection: two sums of its inputs, each times numbers of its own.

    One sum would not do: a norm behind it makes all rows equal.
    """

    def __init__(self, out_features: int) -> None:
        self._ramp = torch.linspace(-1.0, 1.3, out_features)
        self._wave = torch.sin(torch.arange(out_features) * 0.7)

    def __call__(self, x: Tensor) -> Tensor:
        wave = torch.cos(torch.arange(x.shape[-1]) * 0.61)
        total = x.mean(-1, keepdim=True) + 0.1 * x[..., :1]
        return total * self._ramp + (x * wave).mean(-1, keepdim=True) * self._wave + 0.1


def _stacks(model: PreTrainedModel) -> list[list[str]]:
    """Return the paths of the modules of each list that is as long as the config says that layers are."""
    num_layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    return [
        [f"{name}.{index}" for index in range(num_layers)]
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
