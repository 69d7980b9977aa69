"""Modules of transformers recorded as they are: blocks between the products and the attention of a model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.cpu.recorded import MODES, TOKENS, Mode, assert_recorded, record_function, widest_isa
from triptych_kernels.cpu.recording import NotRecordable

__all__ = ["widest_isa"]
pytest.importorskip("transformers")
from transformers import (
    AutoModel,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP, GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

pytestmark = [pytest.mark.usefixtures("widest_isa"), pytest.mark.parametrize("mode", MODES)]
HIDDEN, HEADS, KV_HEADS = 24, 4, 2
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 40, "num_attention_heads": HEADS}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=KV_HEADS)
NEOX = GPTNeoXConfig(**SIZES)


def redrawn(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the module with random weights, since ones and zeros hide mistakes."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "create",
    [
        lambda: LlamaRMSNorm(HIDDEN, 1e-5),
        lambda: Gemma2RMSNorm(HIDDEN),
        lambda: nn.LayerNorm(HIDDEN),
        lambda: nn.RMSNorm(HIDDEN, 1e-5),
        lambda: LlamaMLP(LLAMA),
        lambda: GPTNeoXMLP(NEOX),
        lambda: Gemma2MLP(Gemma2Config(**SIZES)),
        lambda: GPT2MLP(40, GPT2Config(n_embd=HIDDEN)),
    ],
)
def test_block(create: Callable[[], nn.Module], dtype: torch.dtype, mode: Mode) -> None:
    module = redrawn(create(), dtype)
    tolerances = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-2, "atol": 4e-2}
    with mode():
        assert_recorded(module, torch.randn(TOKENS, HIDDEN).to(dtype), **tolerances)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_embedding(dtype: torch.dtype, mode: Mode) -> None:
    module = LlamaRotaryEmbedding(LLAMA)
    head_dim = HIDDEN // HEADS

    def rotated(positions: Tensor, query: Tensor, key: Tensor) -> Tensor:
        cos, sin = module(query, positions)
        pair = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        return torch.cat(pair, 1).transpose(1, 2)

    positions = torch.arange(TOKENS) * 3
    query, key = (torch.randn(TOKENS, heads, head_dim).to(dtype) for heads in (HEADS, KV_HEADS))
    with mode():
        assert_recorded(rotated, positions, query, key)
        assert_recorded(lambda positions, x: GPTNeoXRotaryEmbedding(NEOX)(x, positions)[1], positions, query)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: object
) -> tuple[Tensor, None]:
    """Stand for attention: [1, heads, tokens, head_dim] each; tokens see themselves only."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return (query + key * value).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("tests_recorded", attend)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, num_key_value_heads=KV_HEADS, num_hidden_layers=2, vocab_size=50),
        Qwen3Config(**SIZES, num_key_value_heads=KV_HEADS, head_dim=6, num_hidden_layers=2, vocab_size=50),
        Gemma2Config(**SIZES, num_key_value_heads=KV_HEADS, head_dim=6, num_hidden_layers=2, vocab_size=50),
        GPTNeoXConfig(**SIZES, num_hidden_layers=2, vocab_size=50),
        GPT2Config(n_embd=HIDDEN, n_layer=2, n_head=HEADS, vocab_size=50, bos_token_id=0, eos_token_id=0),
    ],
    ids=lambda config: config.model_type,
)
def test_model(config: PreTrainedConfig, mode: Mode) -> None:
    model = redrawn(AutoModel.from_config(config), torch.float32)
    model.set_attn_implementation("tests_recorded")

    def hidden(token_ids: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = model(input_ids=token_ids, position_ids=positions, use_cache=False, return_dict=False)[
            0
        ]
        return out

    with mode():
        inputs = torch.randint(50, (TOKENS,)), torch.arange(TOKENS) * 3
        assert_recorded(hidden, *inputs, rtol=1e-4, atol=1e-4)


def test_frequencies_that_depend_on_the_length_are_refused(mode: Mode) -> None:
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    module, x = (
        LlamaRotaryEmbedding(config),
        SimpleNamespace(device=torch.device("meta"), dtype=torch.float32),
    )
    with mode(), pytest.raises(NotRecordable, match="aten::max has no native kernel"):
        record_function(lambda positions: module(x, positions)[0], torch.arange(TOKENS))
