"""Creation of the attention backend from a resolved config, and its part of a worker's description."""

from __future__ import annotations

import logging

import torch

from triptych.errors import ConfigError
from triptych_services.worker.attention.base import AttentionBackend
from triptych_services.worker.attention.flash_attn import FlashAttention2, FlashAttention3
from triptych_services.worker.attention.flashinfer import FlashInferAttention
from triptych_services.worker.attention.paged import PagedAttention
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.parallel.shares import share, share_kv_heads

log = logging.getLogger(__name__)

_IMPLS = {"native": "cpu", "triton": "triton", "torch": "torch"}


def create_attention(config: ResolvedConfig) -> AttentionBackend:
    """Create the backend that `config.attention_backend` names, for the rank's device.

    Raises:
        ConfigError: Its package is installed, but cannot be used on this machine.
    """
    try:
        attention = _create(config)
    except ImportError as error:
        raise ConfigError(
            f"worker.attention_backend: {config.attention_backend} is installed, but not for this machine ({error}); "
            "install a build for its torch and driver, or set it to auto"
        ) from error
    if config.rank.device.startswith("cuda"):
        between = "" if attention.in_graphs else ", launched between CUDA graphs and never in one"
        log.info("attention by %s%s", attention.name, between)
    return attention


def describe_kernels(forward: str, attention: AttentionBackend) -> str:
    """Return a description for people, such as "triton graphs" or "triton eager, attention by flashinfer".

    Args:
        forward: Description of the forward backend; the attention of its own kernels is not mentioned.
    """
    is_implied = attention.name in ("auto", "native", "triton") or attention.name == forward
    return forward if is_implied else f"{forward}, attention by {attention.name}"


def _create(config: ResolvedConfig) -> AttentionBackend:
    if config.attention_backend == "flash-attn":
        return FlashAttention2()
    if config.attention_backend == "flash-attn-3":
        return FlashAttention3()
    if config.attention_backend == "flashinfer":
        _, num_heads = share(config.architecture.num_heads, what="num_heads", rank=config.rank)
        _, num_kv_heads = share_kv_heads(config.architecture.num_kv_heads, rank=config.rank)
        return FlashInferAttention(
            torch.device(config.rank.device), heads_per_kv_head=num_heads // num_kv_heads
        )
    return PagedAttention(_IMPLS[config.attention_backend])
