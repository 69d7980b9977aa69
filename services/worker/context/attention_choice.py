"""Which attention backend `worker.attention_backend` means here, and what it is refused for. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.errors import FeatureDisabled

FLASH_ATTN, FLASH_ATTN_3, FLASHINFER = "flash_attn", "flash_attn_interface", "flashinfer"
"""Packages that attend, as Python imports them."""

BATCH_INVARIANT_CHOICES = frozenset({"auto", "triton"})
"""Those whose results do not depend on which rows share a step; others cut keys, or gather rows, by that."""

NATIVE_DTYPES = ("float32", "bfloat16")
"""What the native kernels for CPUs compute with."""

_FLASH_ATTN_PAGE = 256  # mha_varlen_fwd of flash-attn 2.8: "block size must be divisible by 256"
_FLASH_ATTN_MAX_HEAD_DIM = 256
_FLASHINFER_HEAD_DIMS = (64, 128, 256)  # that its prefill kernels are built for on every device
_HOPPER = 9  # major; FlashAttention 3 is written for it alone
_HALF_DTYPES = ("bfloat16", "float16")
_UNSCALED_DTYPES = ("float32", *_HALF_DTYPES)


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """What a choice has to fit."""

    architecture: ModelArchitecture
    device: str
    """`cpu`, `cuda:<local_rank>` or `simulated`."""
    dtype: str
    """Of activations."""
    kv_dtype: str
    block_size: int
    native_kernels: bool
    """Whether the native kernels for CPUs are built and understood here."""
    compute_capability: tuple[int, int] = (0, 0)
    """Of a CUDA device."""
    packages: frozenset[str] = frozenset()
    """Which of those above are installed."""


def installed_packages() -> frozenset[str]:
    """Those that Python would find; none is imported."""
    return frozenset(name for name in (FLASH_ATTN, FLASH_ATTN_3, FLASHINFER) if find_spec(name) is not None)


def choose_attention_backend(requested: str, site: AttentionSite) -> str:
    """native, triton, torch, flash-attn, flash-attn-3 or flashinfer; none where nothing attends.

    `auto` is triton on a CUDA device, on a CPU the native kernels, or plain torch where there are none. `flash-attn` is
    FlashAttention 3 where that is installed and the device is one that it is written for.

    Raises:
        FeatureDisabled: the backend cannot serve this model on this device.
    """
    on_cuda = site.device.startswith("cuda")
    if requested == "auto":
        if on_cuda:
            return "triton"
        if site.device != "cpu":
            return "none"
        return "native" if site.native_kernels and site.dtype in NATIVE_DTYPES else "torch"
    obstacle = _obstacle(requested, site, on_cuda=on_cuda)
    if obstacle is not None:
        raise FeatureDisabled(f"worker.attention_backend = {requested}", obstacle)
    return "flash-attn-3" if requested == "flash-attn" and _has_flash_attn_3(site) else requested


def _obstacle(requested: str, site: AttentionSite, *, on_cuda: bool) -> str | None:
    if requested == "torch":
        return _obstacle_to_torch(site, on_cuda=on_cuda)
    if not on_cuda:
        return f"it runs on CUDA devices alone, and this is {site.device}; set it to auto"
    if requested == "flash-attn":
        return _obstacle_to_flash_attn(site)
    if requested == "flashinfer":
        return _obstacle_to_flashinfer(site)
    return None


def _obstacle_to_torch(site: AttentionSite, *, on_cuda: bool) -> str | None:
    if site.device != "cpu" and not on_cuda:
        return f"nothing attends on a device that is {site.device}; set it to auto"
    if site.device == "cpu" and site.kv_dtype not in _UNSCALED_DTYPES:
        return (
            f"on CPUs cache.dtype = {site.kv_dtype} is read by the native kernels alone; set cache.dtype or this to "
            "auto"
        )
    return None


def _obstacle_to_flash_attn(site: AttentionSite) -> str | None:
    if not site.packages & {FLASH_ATTN, FLASH_ATTN_3}:
        return _missing("flash-attn") + _hint_at_flash_attn_3(site)
    if not _has_flash_attn_3(site):
        if FLASH_ATTN not in site.packages:
            return (
                f"FlashAttention 3 alone is installed, which runs on compute capability {_HOPPER}.x, and this "
                f"device has {_dotted(site.compute_capability)}; install flash-attn, or set it to auto"
            )
        if site.block_size % _FLASH_ATTN_PAGE:
            return (
                f"it reads pages of a multiple of {_FLASH_ATTN_PAGE} tokens, and cache.block_size is "
                f"{site.block_size}; set cache.block_size to {_FLASH_ATTN_PAGE}, or this to auto"
                + _hint_at_flash_attn_3(site)
            )
    head_dim = site.architecture.head_dim
    if head_dim % 8 or head_dim > _FLASH_ATTN_MAX_HEAD_DIM:
        return (
            f"it takes heads of a multiple of 8 elements up to {_FLASH_ATTN_MAX_HEAD_DIM}, and the model's head_dim "
            f"is {head_dim}; set it to auto"
        )
    return _unsupported_device_or_dtype(site, lowest=(8, 0))


def _obstacle_to_flashinfer(site: AttentionSite) -> str | None:
    if FLASHINFER not in site.packages:
        return _missing("flashinfer-python")
    if site.architecture.head_dim not in _FLASHINFER_HEAD_DIMS:
        return (
            f"it takes heads of {', '.join(map(str, _FLASHINFER_HEAD_DIMS))} elements, and the model's head_dim is "
            f"{site.architecture.head_dim}; set it to auto"
        )
    return _unsupported_device_or_dtype(site, lowest=(7, 5))


def _unsupported_device_or_dtype(site: AttentionSite, *, lowest: tuple[int, int]) -> str | None:
    if site.compute_capability < lowest:
        return (
            f"it runs from compute capability {_dotted(lowest)} on, and this device has "
            f"{_dotted(site.compute_capability)}; set it to auto"
        )
    if site.dtype not in _HALF_DTYPES:
        return f"it takes {' and '.join(_HALF_DTYPES)}, not model.dtype = {site.dtype}; set it to auto"
    if site.kv_dtype != site.dtype:
        return (
            f"it reads keys and values of model.dtype, which is {site.dtype}, not cache.dtype = {site.kv_dtype}; "
            "set cache.dtype or this to auto"
        )
    return None


def _has_flash_attn_3(site: AttentionSite) -> bool:
    return FLASH_ATTN_3 in site.packages and site.compute_capability[0] == _HOPPER


def _hint_at_flash_attn_3(site: AttentionSite) -> str:
    """Where to get it, on a device that it is written for; else nothing."""
    if site.compute_capability[0] != _HOPPER:
        return ""
    return (
        "; FlashAttention 3 takes blocks of any size on this device, but is not on PyPI (fa3-fwd there reads no paged "
        "cache): build it from the directory hopper of github.com/Dao-AILab/flash-attention"
    )


def _missing(package: str) -> str:
    return f"the package {package} is not installed; `pip install {package}`, or set it to auto"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
