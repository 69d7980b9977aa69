"""Which experts `fused_moe` chooses, and their weights, against the routers of transformers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.ops.implementations import Implementation, implementations_of
from tests.kernels.ops.test_fused_moe import operands, weights_for
from triptych_kernels.expert_choice import ExpertChoice
from triptych_kernels.ops import fused_moe

# of Triton's interpreter: inf and NaN, as on GPUs
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp", "ignore:invalid value encountered"
)

NUM_EXPERTS = 16
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}

implementation = implementations_of("fused_moe")


def correction() -> Tensor:
    return torch.randn(NUM_EXPERTS, generator=torch.Generator().manual_seed(3)) / 4


@dataclass(frozen=True)
class Oracle:
    """A router of transformers."""

    router: str
    """`module.Class` in `transformers.models`."""
    config: str
    choice: ExpertChoice
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of its config."""
    weight: str = "weight"
    correction: str = ""
    """Name of the correction in the router; `argument`: it is an argument of `forward`."""

    def weigh(self, logits: Tensor) -> Tensor:
        """Return the weight of each expert, 0 where it is not chosen: [num_tokens, num_experts]."""
        module, name = self.router.split(".")
        package = f"transformers.models.{module}"
        sizes = {"hidden_size": NUM_EXPERTS, "num_attention_heads": 4, "num_key_value_heads": 2}
        create_config = getattr(import_module(f"{package}.configuration_{module}"), self.config)
        router = getattr(import_module(f"{package}.modeling_{module}"), name)(
            create_config(**sizes, **self.options)
        )
        state = {self.weight: torch.eye(NUM_EXPERTS)}  # so that logits are what it reads
        arguments = [logits]
        if self.correction == "argument":
            arguments.append(correction())
        elif self.correction:
            state[self.correction] = correction().view(router.state_dict()[self.correction].shape)
        router.load_state_dict(state)
        with torch.no_grad():
            _, weights, experts = router.eval()(*arguments)
        return torch.zeros(len(logits), NUM_EXPERTS).scatter_(1, experts, weights.float())


BY_GROUPS = ExpertChoice(
    3, "sigmoid", scale=2.5, num_groups=4, top_groups=2, group_experts=2, correction=correction()
)
GLM_KEYS = GROUPS | {"n_routed_experts": NUM_EXPERTS, "norm_topk_prob": True}
ORACLES = {
    "Qwen 2 MoE": Oracle(
        "qwen2_moe.Qwen2MoeTopKRouter",
        "Qwen2MoeConfig",
        ExpertChoice(4, renormalize=False),
        {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 4, "norm_topk_prob": False},
    ),
    "Granite MoE": Oracle(
        "granitemoe.GraniteMoeTopKRouter",
        "GraniteMoeConfig",
        ExpertChoice(4),
        {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 4},
    ),
    "DeepSeek V2": Oracle(
        "deepseek_v2.DeepseekV2TopkRouter",
        "DeepseekV2Config",
        ExpertChoice(3, renormalize=False, scale=2.5, num_groups=4, top_groups=2),
        GROUPS | {"n_routed_experts": NUM_EXPERTS, "topk_method": "group_limited_greedy"},
    ),
    "DeepSeek V3": Oracle(
        "deepseek_v3.DeepseekV3TopkRouter",
        "DeepseekV3Config",
        BY_GROUPS,
        GLM_KEYS,
        correction="e_score_correction_bias",
    ),
    "DeepSeek V4": Oracle(
        "deepseek_v4.DeepseekV4TopKRouter",
        "DeepseekV4Config",
        ExpertChoice(3, "sqrtsoftplus", scale=1.5, correction=correction()),
        {"num_experts_per_tok": 3, "n_routed_experts": NUM_EXPERTS, "routed_scaling_factor": 1.5},
        correction="e_score_correction_bias",
    ),
    "GLM 4.5": Oracle(
        "glm4_moe.Glm4MoeTopkRouter",
        "Glm4MoeConfig",
        replace(BY_GROUPS, renormalize=False),
        GLM_KEYS | {"norm_topk_prob": False},
        correction="e_score_correction_bias",
    ),
    "MiniMax M2": Oracle(
        "minimax_m2.MiniMaxM2TopKRouter",
        "MiniMaxM2Config",
        ExpertChoice(4, "sigmoid", correction=correction()),
        {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 4},
        correction="argument",
    ),
    "Phi 3.5 MoE": Oracle(
        "phimoe.PhimoeTopKRouter",
        "PhimoeConfig",
        ExpertChoice(2, "sparsemixer", renormalize=False, jitter=0.2),
        {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "router_jitter_noise": 0.2},
    ),
    "Ernie 4.5 MoE": Oracle(
        "ernie4_5_moe.Ernie4_5_MoeTopKRouter",
        "Ernie4_5_MoeConfig",
        ExpertChoice(4, correction=correction()),
        {"moe_num_experts": NUM_EXPERTS, "moe_k": 4},
        correction="moe_statics.e_score_correction_bias",
    ),
    "Hunyuan MoE": Oracle(
        "hunyuan_v1_moe.HunYuanMoEV1Gate",
        "HunYuanMoEV1Config",
        ExpertChoice(4),
        {"num_experts": NUM_EXPERTS, "moe_topk": 4},
        weight="wg.weight",
    ),
}


def weigh(implementation: Implementation, logits: Tensor, choice: ExpertChoice) -> Tensor:
    """Return the weight of each expert by `fused_moe`, as `Oracle.weigh` does.

    Expert e maps anything to its weight in column e.
    """
    num_experts, device = logits.shape[1], implementation.device
    w13 = torch.full((num_experts, 4, num_experts), 1 / num_experts, device=device)  # gates and ups are 1
    half = 0.5 / functional.silu(torch.ones(()))
    w2 = torch.eye(num_experts, device=device)[..., None].expand(-1, -1, 2) * half
    weights = weights_for(implementation, w13, w2.contiguous())
    x = torch.ones(len(logits), num_experts, device=device)
    return implementation(fused_moe, x, logits.to(device), **weights, choice=moved_to(device, choice)).cpu()


def moved_to(device: torch.device, choice: ExpertChoice) -> ExpertChoice:
    names = ("correction", "expert_scales", "weight_index")
    tensors = {name: tensor.to(device) for name in names if (tensor := getattr(choice, name)) is not None}
    return replace(choice, **tensors)


@pytest.mark.parametrize("oracle", ORACLES)
def test_experts_and_weights_are_those_of_transformers(oracle: str, implementation: Implementation) -> None:
    logits = 2 * torch.randn(70, NUM_EXPERTS, generator=torch.Generator().manual_seed(5))
    expected = ORACLES[oracle].weigh(logits)
    found = weigh(implementation, logits, ORACLES[oracle].choice)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


CHOICES = {
    "scaled by expert": ExpertChoice(3, expert_scales=torch.arange(8) / 4 - 0.5),
    "sigmoid": ExpertChoice(2, "sigmoid", renormalize=False),
    "sqrtsoftplus": ExpertChoice(2, "sqrtsoftplus", scale=3.0),
    "given": ExpertChoice(3, "given", renormalize=False),
    "sparsemixer": ExpertChoice(3, "sparsemixer", renormalize=False, jitter=0.3),
    "best of a group": ExpertChoice(2, num_groups=4, top_groups=2),
    "two of a group": ExpertChoice(3, "sigmoid", num_groups=2, top_groups=1, group_experts=2),
    "two of a group by softmax": ExpertChoice(3, scale=2.5, num_groups=4, top_groups=2, group_experts=2),
    "corrected": ExpertChoice(
        2, "sigmoid", correction=torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0])
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_choices_and_ties_are_those_of_the_reference(choice: str, implementation: Implementation) -> None:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randint(-2, 3, (40, 8), generator=generator).float()  # most tokens have equal ones
    x, w13 = torch.ones(40, 8), torch.full((8, 4, 8), 1 / 8)
    w2 = torch.eye(8)[..., None].expand(-1, -1, 2) * 0.5 / functional.silu(torch.ones(()))
    expected = fused_moe(x, logits, w13, w2.contiguous(), CHOICES[choice], impl="reference")
    found = weigh(implementation, logits, CHOICES[choice])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("choice", CHOICES)
def test_experts_elsewhere_among_the_weights_change_no_bit(
    choice: str, implementation: Implementation
) -> None:
    generator = torch.Generator().manual_seed(11)
    x, _, w13, w2 = operands(40, 8, 32, 24, implementation.device)
    logits = torch.randint(-2, 3, (40, 8), generator=generator).to(x)  # most tokens have equal ones
    order = torch.randperm(8, generator=generator)
    plain = moved_to(implementation.device, CHOICES[choice])
    moved = moved_to(implementation.device, replace(plain, weight_index=order.argsort()))
    expected, found = (
        implementation(fused_moe, x, logits, **weights_for(implementation, *weights), choice=own)
        for weights, own in (((w13, w2), plain), ((w13[order], w2[order]), moved))
    )
    assert torch.equal(found, expected)
    total = torch.zeros_like(x)
    for first in (0, 4):
        own = weights_for(implementation, w13[order[first : first + 4]], w2[order[first : first + 4]])
        total += implementation(fused_moe, x, logits, **own, choice=moved, first_expert=first)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_row_of_nan_affects_no_other(choice: str, implementation: Implementation) -> None:
    logits = torch.randn(9, 8, generator=torch.Generator().manual_seed(1))
    clean = weigh(implementation, logits, CHOICES[choice])
    logits[4] = torch.nan
    found = weigh(implementation, logits, CHOICES[choice])
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    torch.testing.assert_close(found[others], clean[others])
    # what is no expert's of the token is 0 of it or NaN, by how sums are taken
    assert found[4].isnan().sum() >= CHOICES[choice].top_k


@pytest.mark.parametrize("top_k", [1, 2])
def test_weights_may_multiply_what_experts_read(top_k: int, implementation: Implementation) -> None:
    x, logits, w13, w2 = operands(9, 4, 32, 24, implementation.device)
    choice = ExpertChoice(top_k, "sigmoid", renormalize=False, scales_input=True)
    expected = fused_moe(x, logits, w13, w2, choice, impl="reference")
    found = implementation(fused_moe, x, logits, **weights_for(implementation, w13, w2), choice=choice)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(
        found, fused_moe(x, logits, w13, w2, replace(choice, scales_input=False), impl="reference")
    )


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_shared_expert_is_added(top_k: int, is_gated: bool, implementation: Implementation) -> None:
    x, logits, w13, w2 = operands(9, 4, 18, 10, implementation.device)
    shared = torch.randn(9, 18, generator=torch.Generator().manual_seed(2)).to(implementation.device)
    options = {"shared": shared, "shared_gate": logits[:, 0].contiguous() if is_gated else None}
    expected = fused_moe(x, logits, w13, w2, ExpertChoice(top_k), **options, impl="reference")
    found = implementation(
        fused_moe, x, logits, **weights_for(implementation, w13, w2), choice=ExpertChoice(top_k), **options
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "relu"}, "score 'relu' is none of softmax, sigmoid, sqrtsoftplus"),
        ({"scale": 0.0}, "scale 0.0 must be positive"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups 3 must be from 1 to the number of groups, 2"),
        ({"group_experts": 3}, "group_experts 3 must be 1 or 2"),
        ({"correction": torch.ones(8, 1)}, r"correction \[8, 1\] of torch.float32 must be a contiguous"),
        ({"score": "sparsemixer"}, "score sparsemixer has neither renormalize nor correction"),
        ({"score": "given"}, "score given has neither renormalize nor correction"),
        ({"num_groups": 3}, "num_groups 3 does not divide 8 experts"),
        ({"num_groups": 4}, "top_k 3 must be from 1 to the number of experts of 1 groups, 2"),
        ({"correction": torch.ones(7)}, r"correction \[7\] must be \[num_experts\] = \[8\]"),
        ({"weight_index": torch.ones(8)}, r"weight_index \[8\] of torch.float32 must be .* torch.int64"),
        ({"weight_index": torch.arange(9)}, r"weight_index \[9\] must be \[num_experts\] = \[8\]"),
    ],
)
def test_a_choice_that_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertChoice(3, **options).check_experts(8)


def test_a_shared_expert_that_does_not_fit_is_named() -> None:
    x, logits, w13, w2 = operands(3, 4, 16, 8, torch.device("cpu"))
    for options, message in (
        ({"shared": torch.ones(3, 15)}, r"shared \[3, 15\] torch.float32 must be as x, \[3, 16\]"),
        ({"shared_gate": torch.ones(3)}, "shared_gate must be None without shared"),
        (
            {"shared": torch.ones(3, 16), "shared_gate": torch.ones(2)},
            r"shared_gate \[2\] torch.float32 must",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            fused_moe(x, logits, w13, w2, ExpertChoice(2), **options)
