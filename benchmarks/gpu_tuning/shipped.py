"""Compiles every choice of stored files for the device that they are of, without it; a program of its own.

    python -m benchmarks.gpu_tuning.shipped FILE …

Not in a process with Triton's interpreter, which is decided when kernels are defined. Prints what is wrong with which
entry, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from triton.backends.compiler import GPUTarget

from benchmarks.gpu_tuning.cases import NAME_TO_TUNABLE, create_case
from benchmarks.gpu_tuning.compiling import (
    compile_candidate,
    largest_shared_bytes,
    pretend_to_be,
    start_process,
)
from benchmarks.gpu_tuning.stored import check
from triptych_kernels.triton.tuning.tunable import read_file

_NUM_SMS = 132  # grids and splits depend on it, and what is compiled hardly


def problems(paths: Sequence[Path]) -> Iterator[str]:
    """What does not compile, or wants more shared memory than there is; each names file and entry.

    Raises:
        ValueError: see `stored.check`.
    """
    for path in paths:
        file = read_file(path)
        check(file, NAME_TO_TUNABLE)
        major, minor = file.compute_capability
        target = GPUTarget("cuda", 10 * major + minor, 32)
        pretend_to_be(target, _NUM_SMS)
        limit = largest_shared_bytes(target.arch)
        if limit is None:
            yield f"{path}: compute_capability {major}.{minor}: its shared memory stands in no table here"
            continue
        for name in file.kernel_to_entries:
            for key, config in NAME_TO_TUNABLE[name].read(file).items():
                case = create_case(name, key)
                try:
                    shared_bytes = compile_candidate(case, config)
                except Exception as error:  # whatever the compiler says of it
                    yield f"{path}: {case.title}: {config}: {type(error).__name__}: {error}"
                    continue
                if shared_bytes > limit:
                    yield f"{path}: {case.title}: {config}: {shared_bytes} bytes of shared memory, not up to {limit}"


if __name__ == "__main__":
    start_process(("cuda", 90, 32), _NUM_SMS)
    json.dump(list(problems([Path(name) for name in sys.argv[1:]])), sys.stdout)
