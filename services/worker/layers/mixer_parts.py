"""The parts that mixers with a recurrent state have in common: convolution, parameters of a recurrence, gated norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from triptych.checkpoint.architecture import StateSpec
from triptych_kernels.ops import causal_conv, rms_norm
from triptych_kernels.state_batch import StateBatch
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.linear import Piece
from triptych_services.worker.layers.step_context import LayerStates
from triptych_services.worker.layers.weights import (
    WeightedLayer,
    WeightTarget,
    empty_parameter,
    parameter_target,
)
from triptych_services.worker.parallel.shares import share_kv_heads


class CausalConv(WeightedLayer):
    """The convolution of a mixer over each of its channels, and the part of the page that it keeps.

    Its weight lies tap by tap in float32, since so the kernels read it.
    """

    def __init__(
        self,
        spec: StateSpec,
        pieces: tuple[Piece, ...],
        *,
        activation: str | None,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            pieces: Parts of the channels that ranks share each by itself.
            activation: silu, or None.
        """
        super().__init__()
        self.prefix = prefix
        self.pieces = pieces
        self.activation = activation
        self.channels = sum(piece.length for piece in pieces)
        """Number of this rank's channels."""
        self.taps = spec.taps
        self.weight = empty_parameter(spec.taps, self.channels, context=context, dtype=torch.float32)
        self.bias = (
            empty_parameter(self.channels, context=context, dtype=torch.float32) if spec.conv_bias else None
        )

    @property
    def page_elements(self) -> int:
        """Numbers that a row keeps."""
        return (self.taps - 1) * self.channels

    def forward(self, x: Tensor, states: LayerStates) -> Tensor:
        """Convolve [num_tokens, channels].

        Args:
            states: Those of the mixer.
        """
        pages, batch = states.part(slice(self.page_elements), slice(self.channels))
        state = pages.unflatten(1, (self.taps - 1, self.channels))
        return causal_conv(x, self.weight, self.bias, state, batch, activation=self.activation)

    def matrices(self, states: LayerStates, shape: tuple[int, ...]) -> tuple[Tensor, StateBatch]:
        """Return the states behind the inputs of the convolution, [num_pages, *shape], and the batch for their op."""
        pages, batch = states.part(slice(self.page_elements, None), slice(self.channels, None))
        return pages.unflatten(1, shape), batch

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets: dict[str, WeightTarget] = {}
        first = 0
        for piece in self.pieces:
            # stored as [channels, 1, taps]
            own = self.weight[:, first : first + piece.length].t()[:, None]
            name, shape = f"{self.prefix}.{piece.name}", (piece.out_features, 1, self.taps)
            targets[f"{name}.weight"] = parameter_target(own, shape, start=piece.start)
            if self.bias is not None:
                bias = self.bias[first : first + piece.length]
                targets[f"{name}.bias"] = parameter_target(bias, shape[:1], start=piece.start)
            first += piece.length
        return targets


class StateParameters(WeightedLayer):
    """Parameters of a recurrence in float32: `A_log`, which is kept as rates, `dt_bias` and `D`."""

    def __init__(
        self,
        num_heads: int,
        *,
        start: int = 0,
        length: int = 0,
        key_dim: int = 0,
        has_bias: bool = True,
        has_skip: bool = True,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            num_heads: Number of heads, or of channels, of all ranks together.
            start: Index of this rank's first head.
            length: Number of this rank's heads; 0: all.
            key_dim: Rates of each channel, stored [num_heads, key_dim]; 0: there is one, stored [num_heads].
            has_bias: Whether there is a `dt_bias`.
            has_skip: Whether there is a `D`.
        """
        super().__init__()
        self.prefix = prefix
        self.num_heads, self.start, self.key_dim = num_heads, start, key_dim
        own = length or num_heads
        rates = (key_dim, own) if key_dim else (own,)
        self.rates = empty_parameter(*rates, context=context, dtype=torch.float32)
        """exp(A_log), [num_heads] or [key_dim, num_heads]: the state decays by exp(-rate * step size)."""
        self.dt_bias = empty_parameter(own, context=context, dtype=torch.float32) if has_bias else None
        self.skip = empty_parameter(own, context=context, dtype=torch.float32) if has_skip else None

    def weight_targets(self) -> dict[str, WeightTarget]:
        heads, length = (self.num_heads,), self.rates.shape[-1]
        shape = (*heads, self.key_dim) if self.key_dim else heads
        targets = {
            f"{self.prefix}.A_log": WeightTarget(
                lambda stored: self.rates.copy_(stored.float().exp().t()), shape, length, start=self.start
            )
        }
        for name, parameter in (("dt_bias", self.dt_bias), ("D", self.skip)):
            if parameter is not None:
                targets[f"{self.prefix}.{name}"] = parameter_target(parameter, heads, start=self.start)
        return targets


class GatedNorm(WeightedLayer):
    """A norm of what a mixer gives and its gate, in the order that `StateSpec.norm` says."""

    def __init__(
        self,
        size: int,
        *,
        order: str,
        eps: float = 0.0,
        num_groups: int = 1,
        start: int = 0,
        length: int = 0,
        context: ModelContext,
        prefix: str,
    ) -> None:
        """
        Args:
            size: Number of weights: of all groups of all ranks, or of one head if the norm comes before the gate.
            order: As `StateSpec.norm`.
            eps: As `StateSpec.norm_eps`.
            num_groups: Groups of all ranks. Neighbouring ranks share one if there are fewer groups than ranks.
            start: Index of this rank's first weight.
            length: Number of this rank's weights; 0: all.
        """
        super().__init__()
        self.prefix = prefix
        self.size, self.start = size, start
        self.is_first = order == "before_gate"
        self.eps = eps or context.architecture.block.norm.eps
        self.weight = empty_parameter(length or size, context=context) if order != "none" else None
        self.num_groups = 1
        self.shared: _SharedGroup | None = None
        """The group that this rank has a part of; None: its groups are its own."""
        if order == "gated":
            first, self.num_groups = share_kv_heads(num_groups, what="groups of a norm", rank=context.rank)
            if context.rank.tensor_parallel_size > num_groups:
                self.shared = _SharedGroup(first, num_groups, size=size // num_groups, context=context)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map [num_tokens, heads, head_dim] to [num_tokens, heads * head_dim], of x's dtype.

        Args:
            gate: [num_tokens, heads * head_dim].
        """
        factor = silu(gate.float())
        if self.weight is None:
            return (x.flatten(1) * factor).to(x.dtype)
        if self.is_first:
            normalised = rms_norm(x, self.weight, self.eps).flatten(1)
            return (normalised * factor).to(x.dtype)
        gated = x.flatten(1) * factor
        if self.shared is not None:
            normalised = gated * torch.rsqrt(self.shared.mean_square(gated) + self.eps)
        else:
            normalised = rms_norm(gated.unflatten(1, (self.num_groups, -1)), None, self.eps).flatten(1)
        return (self.weight * normalised).to(x.dtype)

    def weight_targets(self) -> dict[str, WeightTarget]:
        if self.weight is None:
            return {}
        return {f"{self.prefix}.weight": parameter_target(self.weight, (self.size,), start=self.start)}


class _SharedGroup:
    """A group of channels that several ranks normalise together."""

    def __init__(self, number: int, num_groups: int, *, size: int, context: ModelContext) -> None:
        """
        Args:
            number: That of this rank's group.
            num_groups: Groups of all ranks.
            size: Channels of a group.
        """
        self._number, self._size = number, size
        self._group = context.group
        is_own = [float(group == number) for group in range(num_groups)]
        self._is_own = torch.tensor(is_own, device=context.device)
        """[num_groups] float32, 1 for this rank's group."""

    def mean_square(self, x: Tensor) -> Tensor:
        """Return the mean square over the group of each token, [num_tokens, 1] float32, the same on its ranks.

        Args:
            x: [num_tokens, this rank's channels] float32.
        """
        sums = self._group.all_reduce(
            x.square().sum(1, keepdim=True) * self._is_own
        )  # [num_tokens, num_groups]
        return sums[:, self._number, None] / self._size
