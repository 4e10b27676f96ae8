"""Find the packages and build the CPU backend's optional kernels. Everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

KERNELS = "amp_backend_cpu.native._kernels"


class OptionalLibrary(build_ext):
    """Build a plain shared library in the package; without a compiler or OpenMP, the install continues."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Return the symbols to export; the library is not a Python module."""
        return list(ext.export_symbols)

    def get_ext_filename(self, fullname: str) -> str:
        """Return a name without Python's suffix, because any Python can load the kernels."""
        if fullname not in {KERNELS, KERNELS.rpartition(".")[2]}:
            return super().get_ext_filename(fullname)
        return str(Path(*fullname.split("."))) + (".so" if unix else ".dll")


class AnyPython(bdist_wheel):
    """Build one wheel per platform, because the contents work with any Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return ``py3-none-<platform>``."""
        return "py3", "none", super().get_tag()[2]


native = "backends/cpu/amp_backend_cpu/native"
unix = sys.platform != "win32"
# GCC makes vectors of a loop with conditions only if it may set the flags of exceptions, which nobody reads.
optimization = ["-O3", "-fno-trapping-math", "-Wno-psabi"]
# The stack protector and fortified calls cost nothing in loops over vectors.
hardening = ["-fvisibility=hidden", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2"]
relocations = ["-Wl,-z,relro,-z,now"] if sys.platform == "linux" else []
# Apple's clang has no -fopenmp, so the kernels are single-threaded there.
openmp = ["-fopenmp"] if sys.platform == "linux" else []
# A folder under backends/ is a device: its package is found here, its line in pyproject.toml declares it.
roots = [".", "compat", *sorted(path.as_posix() for path in Path("backends").iterdir() if path.is_dir())]
packages = {name: root for root in roots for name in find_packages(root, include=["amp_*"])}

setup(
    packages=list(packages),
    package_dir={name: f"{root}/{name}" for name, root in packages.items() if "." not in name},
    cmdclass={"build_ext": OptionalLibrary, "bdist_wheel": AnyPython},
    ext_modules=[
        Extension(
            KERNELS,
            sources=[f"{native}/{name}.c" for name in ("kernels", "quantize", "storage")],
            depends=[f"{native}/{name}.h" for name in ("common", "loops", "quantize_loops", "vectors")],
            export_symbols=[
                "amp_abi",
                "amp_add",
                "amp_grad_stats",
                "amp_multiply",
                "amp_cast",
                "amp_join",
                "amp_round",
                "amp_split",
                "amp_instruction_set",
                "amp_limit",
                "amp_calibrate",
                "amp_compiler",
                "amp_quantize_largest",
                "amp_quantize_round",
                "amp_quantize_scales",
                "amp_start",
                "amp_stream",
            ],
            extra_compile_args=[*optimization, *openmp, *hardening] if unix else ["/O2", "/openmp"],
            extra_link_args=[*openmp, *relocations] if unix else [],
            optional=True,
        ),
    ],
)
