"""A layout of LoRA adapters: one .npz file with the arrays of each module under the module's name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Factors = tuple[NDArray[np.float32], NDArray[np.float32], float]


def read_npz(path: Path) -> dict[str, Factors]:
    """Return name of a module -> the factors A, [rank, in_features], and B, [out_features, rank], and the scaling.

    The file has `NAME.down`, which is A, `NAME.up`, which is B, and `NAME.alpha`, which is divided by the rank.
    """
    with np.load(path, allow_pickle=False) as file:
        names = sorted(name.removesuffix(".down") for name in file.files if name.endswith(".down"))
        return {
            name: (
                file[f"{name}.down"],
                file[f"{name}.up"],
                float(file[f"{name}.alpha"]) / len(file[f"{name}.down"]),
            )
            for name in names
        }
