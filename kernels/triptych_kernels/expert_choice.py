"""How a mixture chooses the experts of a token, which `ops.fused_moe` takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "sparsemixer", "given")
"""Names of `ExpertChoice.score`."""
SMALLEST_SUM = 1e-20
"""Added to the sum of scores that weights are divided by, unless they are a softmax: scores of 0 come to 0."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertChoice:
    """The choice of experts of one layer, the same in every step.

    Of a token's logits, one for each expert:

        score[e]   softmax: e^logit[e] / sum of e^logit. sigmoid: 1 / (1 + e^-logit[e]).
                   sqrtsoftplus: sqrt(log(1 + e^logit[e])). sparsemixer: as softmax, see below.
                   given: logit[e], the weight of an expert that has been chosen, or 0
        key[e]     score[e] + correction[e]; given: |score[e]|
        group      num_experts / num_groups neighbours; it counts as the sum of its `group_experts` largest keys
        chosen     the top_k largest keys among the experts of the top_groups groups that count most
        weight[e]  scale * score[e], or with `renormalize` scale * score[e] / sum of the scores of those chosen;
                   times expert_scales[e]

    With sparsemixer the weight of each expert that is chosen is its softmax among those that are not chosen yet and are
    near it: (its logit - logit[e]) / max(its logit, |logit[e]|) is at most 2 * jitter. These weights are not
    renormalised.

    Of equal keys that of the lowest number is the larger, and so with groups. Everything is computed in float32.
    Without `correction` logits may be compared in place of scores, since that is the same choice. Which experts a
    token with NaN among its logits has is undefined. The tensors are on the device of the layer, and must keep their
    memory: a recorded step and a CUDA graph read them.

    Sources: softmax, Mixtral of Experts, arXiv:2401.04088; groups, DeepSeek V2, arXiv:2405.04434; sigmoid, correction
    and the sum of two, DeepSeek V3, arXiv:2412.19437; sparsemixer, arXiv:2409.12136.
    """

    top_k: int
    """Number of experts of a token."""
    score: str = "softmax"
    """One of `SCORES`."""
    renormalize: bool = True
    """Whether the weights of a token's experts sum to `scale`."""
    scale: float = 1.0
    """Factor of the weights."""
    num_groups: int = 1
    """Number of groups of experts."""
    top_groups: int = 1
    """Number of groups that a token chooses from."""
    group_experts: int = 1
    """Number of a group's largest keys that it counts as, 1 or 2."""
    correction: Tensor | None = None
    """[num_experts] float32, added to the scores for the choice only."""
    expert_scales: Tensor | None = None
    """[num_experts] float32, a factor of the weights for each expert."""
    scales_input: bool = False
    """Whether the weights multiply what an expert reads, and not its result."""
    jitter: float = 0.0
    """sparsemixer: half of the distance within which experts share their weight, as a part of their logits."""
    weight_index: Tensor | None = None
    """[num_experts] int64, the index of each expert's weights among those of all ranks, one rank after the other. It is
    a permutation, which is not checked, and is looked up once the choice is made. None: an expert's number."""
    layer: int = -1
    """Layer of the model under which CPUs count the choices, by number of the expert; below 0 they are not counted."""

    def __post_init__(self) -> None:
        """Check the values; `check_experts` checks that they fit the experts.

        Raises:
            ValueError: A value is out of its range, or a tensor is no vector of float32; names it.
        """
        if self.score not in SCORES:
            raise ValueError(f"experts: score {self.score!r} is none of {', '.join(SCORES)}")
        if self.score in ("sparsemixer", "given") and (
            self.renormalize or self.correction is not None or self.num_groups > 1
        ):
            raise ValueError(
                f"experts: score {self.score} has neither renormalize nor correction nor num_groups above 1"
            )
        if not 0 < self.scale < math.inf:
            raise ValueError(f"experts: scale {self.scale} must be positive")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"experts: top_groups {self.top_groups} must be from 1 to the number of groups, {self.num_groups}"
            )
        if self.group_experts not in (1, 2):
            raise ValueError(f"experts: group_experts {self.group_experts} must be 1 or 2")
        for name, vector in self._vectors():
            if vector.dtype != torch.float32 or vector.ndim != 1 or not vector.is_contiguous():
                raise ValueError(
                    f"experts: {name} {list(vector.shape)} of {vector.dtype} must be a contiguous [num_experts] of "
                    "torch.float32"
                )
        index = self.weight_index
        if index is not None and (index.dtype != torch.int64 or index.ndim != 1 or not index.is_contiguous()):
            raise ValueError(
                f"experts: weight_index {list(index.shape)} of {index.dtype} must be a contiguous [num_experts] of "
                "torch.int64"
            )

    def _vectors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that there are, with their names."""
        named = (("correction", self.correction), ("expert_scales", self.expert_scales))
        return [(name, vector) for name, vector in named if vector is not None]

    @property
    def is_plain(self) -> bool:
        """Whether it is a softmax over single experts, without factors, a correction or other indices."""
        is_by_groups = self.top_groups < self.num_groups
        is_scaled = self.scale != 1.0 or self.scales_input or self.expert_scales is not None
        is_changed = self.correction is not None or self.weight_index is not None
        return self.score == "softmax" and not (is_changed or is_by_groups or is_scaled)

    @property
    def compares_logits(self) -> bool:
        """Whether keys are logits, rather than scores."""
        if self.score == "given":
            return False
        return self.correction is None and (self.top_groups == self.num_groups or self.group_experts == 1)

    def check_experts(self, num_experts: int) -> None:
        """Check that the choice fits the number of experts.

        Raises:
            ValueError: It does not; names both.
        """
        if num_experts % self.num_groups:
            raise ValueError(f"experts: num_groups {self.num_groups} does not divide {num_experts} experts")
        eligible = num_experts // self.num_groups * self.top_groups
        if not 1 <= self.top_k <= eligible:
            of_groups = f" of {self.top_groups} groups" if self.top_groups < self.num_groups else ""
            raise ValueError(
                f"experts: top_k {self.top_k} must be from 1 to the number of experts{of_groups}, {eligible}"
            )
        for name, vector in (*self._vectors(), ("weight_index", self.weight_index)):
            if vector is not None and vector.shape != (num_experts,):
                raise ValueError(
                    f"experts: {name} {list(vector.shape)} must be [num_experts] = [{num_experts}]"
                )
