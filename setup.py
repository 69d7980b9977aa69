"""Adds the native kernels of every instruction set to a wheel, if TRIPTYCH_NATIVE=all asks for them.

Everything else is in pyproject.toml. Without the variable a wheel has only their sources, as images want it:
`python -m triptych_kernels.cpu.build` compiles them where they are installed.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CPU = Path("kernels/triptych_kernels/cpu")
NATIVE = os.environ.get("TRIPTYCH_NATIVE", "")
if NATIVE not in ("", "all"):
    raise SystemExit(f"TRIPTYCH_NATIVE: {NATIVE!r} must be 'all' or empty")


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if NATIVE and not self.editable_mode:
            subprocess.run([sys.executable, CPU / "compile.py"], check=True)
            self.copy_libraries(Path(self.build_lib, CPU.relative_to("kernels"), "lib"))

    def copy_libraries(self, target: Path) -> None:
        """Copy the compiled libraries.

        Raises:
            SystemExit: There are none for this architecture, or the compiler does not know an instruction set.
        """
        build = runpy.run_path(str(CPU / "compile.py"))
        isas = build["FLAGS_OF_MACHINE"].get(build["platform"].machine(), {})
        paths = [build["library_path"](isa) for isa in isas]
        missing = [path.name for path in paths if not path.is_file()]
        if missing or not paths:
            raise SystemExit(f"wheel: the native kernels are not complete: {', '.join(missing) or 'none'}")
        target.mkdir(parents=True, exist_ok=True)
        for path in (*paths, build["DIGEST"]):
            shutil.copy2(path, target)


class Package(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(NATIVE)


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every version of Python: the libraries are loaded by ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if NATIVE else (python, abi, platform)


setup(distclass=Package, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
