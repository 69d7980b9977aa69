"""The attention backend that `worker.attention_backend` means here, or why it cannot be used. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.errors import FeatureDisabled

FLASH_ATTN, FLASH_ATTN_3, FLASHINFER = "flash_attn", "flash_attn_interface", "flashinfer"
"""Packages of attention kernels, as Python imports them."""

BATCH_INVARIANT_CHOICES = frozenset({"auto", "triton"})
"""Choices with results that do not depend on which rows share a step. Others split keys, or gather rows, by that."""

NATIVE_DTYPES = ("float32", "bfloat16")
"""Precisions in which the native kernels for CPUs compute."""

_FLASH_ATTN_PAGE = 256  # mha_varlen_fwd of flash-attn 2.8: "block size must be divisible by 256"
_FLASH_ATTN_MAX_HEAD_DIM = 256
TRITON_MAX_HEAD_DIM = 256
"""Elements of a head that the Triton kernels take at most."""
_FLASHINFER_HEAD_DIMS = (64, 128, 256)  # sizes that its prefill kernels are built for on every device
_HOPPER = 9  # major version; FlashAttention 3 is written for it only
_HALF_DTYPES = ("bfloat16", "float16")
_UNSCALED_DTYPES = ("float32", *_HALF_DTYPES)


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """The model and the device that a backend has to serve."""

    architecture: ModelArchitecture
    device: str
    """`cpu`, `cuda:<local_rank>` or `simulated`."""
    dtype: str
    """Precision of activations."""
    kv_dtype: str
    block_size: int
    native_kernels: bool
    """Whether the native kernels for CPUs are built and run on this processor."""
    compute_capability: tuple[int, int] = (0, 0)
    """Compute capability of a CUDA device."""
    packages: frozenset[str] = frozenset()
    """Those of the packages above that are installed."""


def installed_packages() -> frozenset[str]:
    """Return the installed packages of attention kernels, without importing them."""
    return frozenset(name for name in (FLASH_ATTN, FLASH_ATTN_3, FLASHINFER) if find_spec(name) is not None)


def choose_attention_backend(requested: str, site: AttentionSite) -> str:
    """Return native, triton, torch, flash-attn, flash-attn-3 or flashinfer; none on a simulated device.

    `auto` is triton on a CUDA device. On a CPU it is the native kernels, or plain torch if there are none. `flash-attn`
    is FlashAttention 3 if that is installed and the device is one that it is written for.

    Raises:
        FeatureDisabled: The backend cannot serve this model on this device.
    """
    on_cuda = site.device.startswith("cuda")
    if requested == "auto":
        if on_cuda:
            obstacle = _obstacle_to_triton(site)
            if obstacle is not None:
                raise FeatureDisabled("worker.attention_backend = auto", obstacle)
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
        return f"it runs on CUDA devices only, and this is {site.device}; set it to auto"
    if site.architecture.latent is not None and requested in ("flash-attn", "flashinfer"):
        return f"it does not compute latent attention, which {site.architecture.name} has; set it to auto"
    if requested == "flash-attn":
        return _obstacle_to_flash_attn(site)
    if requested == "flashinfer":
        return _obstacle_to_flashinfer(site)
    return _obstacle_to_triton(site)


def _obstacle_to_triton(site: AttentionSite) -> str | None:
    architecture = site.architecture
    if architecture.latent is not None or architecture.head_dim <= TRITON_MAX_HEAD_DIM:
        return None
    return (
        f"the Triton kernels take heads of up to {TRITON_MAX_HEAD_DIM} elements, and the model's head_dim is "
        f"{architecture.head_dim}; set it to torch, which is slower"
    )


def _obstacle_to_torch(site: AttentionSite, *, on_cuda: bool) -> str | None:
    if site.device != "cpu" and not on_cuda:
        return f"there is no attention on a device that is {site.device}; set it to auto"
    if site.device == "cpu" and site.kv_dtype not in _UNSCALED_DTYPES:
        return (
            f"on CPUs cache.dtype = {site.kv_dtype} is read by the native kernels only; set cache.dtype or this to "
            "auto"
        )
    return None


def _obstacle_to_flash_attn(site: AttentionSite) -> str | None:
    if not site.packages & {FLASH_ATTN, FLASH_ATTN_3}:
        return _missing("flash-attn") + _hint_at_flash_attn_3(site)
    if not _has_flash_attn_3(site):
        if FLASH_ATTN not in site.packages:
            return (
                f"only FlashAttention 3 is installed, which runs on compute capability {_HOPPER}.x, and this "
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
    """Return where to get FlashAttention 3, on a device that it is written for; else an empty string."""
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
