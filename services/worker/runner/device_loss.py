"""Distinguishes a lost device from an operation that failed. Needs no torch, which a simulation does without."""

from __future__ import annotations

_LOST_DEVICE = ("CUDA error", "Triton Error [CUDA]")
"""How torch, cuBLAS by way of torch, and Triton begin."""
_CAPTURE = "captur"
"""Part of CUDA's text for each error of a capture, 900 to 908: "operation not permitted when stream is capturing"."""


def is_device_lost(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, says that the device's context is unusable from now on.

    It is after an illegal access, a failed launch or an error of the device's memory. A new process may have it again.
    """
    while error is not None:
        if isinstance(error, RuntimeError) and (
            type(error).__name__ == "AcceleratorError" or str(error).startswith(_LOST_DEVICE)
        ):
            return True
        error = error.__cause__
    return False


def is_lost_at_capture(error: RuntimeError) -> bool:
    """Return whether an error of a capture says that the device is lost, and not that something cannot be captured.

    CUDA reports both in the same way. The lines below the first are torch's advice.
    """
    return is_device_lost(error) and _CAPTURE not in str(error).partition("\n")[0]
