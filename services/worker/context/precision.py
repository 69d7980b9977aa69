"""The precisions of activations, of weights that are not quantized, and of keys and values, by what the device does."""

from __future__ import annotations

from triptych.checkpoint.architecture import ModelArchitecture
from triptych.errors import FeatureDisabled
from triptych_services.worker.context.attention_choice import NATIVE_DTYPES


def choose_dtype(
    requested: str, architecture: ModelArchitecture, *, device: str, prefers_bfloat16: bool
) -> str:
    """Return the precision that `model.dtype` means; `auto` is the checkpoint's, if the device computes in it.

    GGUF files are quantized, so the precision of their tensors is no guide: they count as bfloat16, which becomes
    float32 on a device that would only emulate it. So does float16 on a CPU, where no native kernel takes it.

    Args:
        device: As of `DeviceTraits`.
    """
    if requested != "auto":
        return requested
    stored = stored_dtype(architecture)
    is_half = stored == "bfloat16" or (stored == "float16" and device == "cpu")
    if not is_half:
        return stored
    return "bfloat16" if prefers_bfloat16 else "float32"


def stored_dtype(architecture: ModelArchitecture) -> str:
    """Return the precision that a checkpoint means: bfloat16 if it is a GGUF file."""
    return "bfloat16" if architecture.is_gguf else architecture.dtype


def choose_weight_dtype(
    requested: str,
    architecture: ModelArchitecture,
    dtype: str,
    *,
    device: str,
    quantization: str,
    native_kernels: bool,
) -> str:
    """Return the precision of weights that are not quantized and have none in their stored form.

    It is that of the activations. Only where `auto` computes in float32, since a CPU would emulate the checkpoint's
    precision, weights are rounded to the latter all the same: the native kernels widen them, and read half the bytes.

    Args:
        requested: `model.dtype`.
        dtype: Precision of activations.
        device, native_kernels: As of `DeviceTraits`.
        quantization: Form of linear weights, resolved.
    """
    may_widen = requested == "auto" and dtype == "float32" and device == "cpu" and native_kernels
    return stored_dtype(architecture) if may_widen and quantization in ("none", "stored") else dtype


def choose_kv_dtype(
    requested: str,
    dtype: str,
    *,
    device: str,
    native_kernels: bool,
    native_float8: bool = False,
    stands_for_bfloat16: bool = False,
) -> str:
    """Return the precision of keys and values that `cache.dtype` means; `auto` is that of the activations.

    Only where float32 replaces bfloat16, since this CPU would emulate it, `auto` is bfloat16: keys and values then
    take half the memory and half the time to read.

    Args:
        dtype: Precision of activations.
        device, native_kernels, native_float8: As of `DeviceTraits`.
        stands_for_bfloat16: Whether `dtype` was chosen for a checkpoint in bfloat16.

    Raises:
        FeatureDisabled: It is 8 bits, and no kernel reads them: plain torch would first convert them, which would cost
            time instead of saving it.
    """
    automatic = "bfloat16" if stands_for_bfloat16 and device == "cpu" and native_kernels else dtype
    if requested == "auto":
        return automatic
    obstacle = None
    if requested == "float8_e4m3fn":
        obstacle = _obstacle_to_float8(device, native_float8=native_float8)
    elif requested == "int8" and device == "cpu":
        obstacle = _obstacle_to_int8(dtype, native_kernels=native_kernels)
    if obstacle is not None:
        raise FeatureDisabled(f"cache.dtype = {requested}", f"{obstacle} auto, which is {automatic} here")
    return requested


def _obstacle_to_float8(device: str, *, native_float8: bool) -> str | None:
    if device == "cpu":
        return "8-bit floats are read on CUDA devices only; set it to int8, or to"
    if device.startswith("cuda") and not native_float8:
        return (
            "8-bit floats are converted by devices of compute capability 8.9 and above, which this is not; set it to "
            "int8, or to"
        )
    return None


def _obstacle_to_int8(dtype: str, *, native_kernels: bool) -> str | None:
    if not native_kernels:
        return (
            "on CPUs it is read by the native kernels only, which are not in use here: "
            "`python -m triptych_kernels.cpu.build` says why, and builds them; or set it to"
        )
    if dtype not in NATIVE_DTYPES:
        return f"the native kernels take {' and '.join(NATIVE_DTYPES)}, not model.dtype = {dtype}; set it to"
    return None
