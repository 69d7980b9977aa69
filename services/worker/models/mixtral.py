"""Mixtral: Llama with a mixture of experts in place of each layer's MLP."""

from __future__ import annotations

from triptych.errors import ModelError
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.layers.moe import ExpertNames, SparseMoE
from triptych_services.worker.models.llama import LlamaForCausalLM


class MixtralForCausalLM(LlamaForCausalLM):
    """The whole network; a `CausalLM`."""

    def __init__(self, *, context: ModelContext, prefix: str = "") -> None:
        if not context.architecture.num_experts:
            raise ModelError(f"{context.architecture.name}: config.json: num_local_experts: is missing")
        super().__init__(context=context, prefix=prefix, mlp=MixtralMoE)


class MixtralMoE(SparseMoE):
    """The experts of one layer, the two best of eight in Mixtral 8x7B, weighted by the softmax over these."""

    def __init__(self, *, context: ModelContext, prefix: str) -> None:
        architecture = context.architecture
        super().__init__(
            architecture.hidden_size,
            architecture.intermediate_size,
            architecture.num_experts,
            architecture.num_experts_per_tok,
            renormalize=True,
            expert_names=ExpertNames(gate="w1", up="w3", down="w2"),
            context=context,
            prefix=f"{prefix}.block_sparse_moe",
        )
