"""Builds the optional compiled parts: the CPU's kernels, the state of regions. All else: pyproject.toml."""

from __future__ import annotations

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class OptionalLibrary(build_ext):
    """A plain shared library beside the package: without a compiler, or without OpenMP, install goes on."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Return what is looked up in the library; it is no Python module."""
        return list(ext.export_symbols)


unix = sys.platform != "win32"
# Finds torch's functions by the names that compilers for Linux and macOS give them.
regions = [
    Extension(
        "amp_core.native._region_state",
        sources=["amp_core/native/region_state.c"],
        export_symbols=["PyInit__region_state"],
        extra_compile_args=["-O2"],
        optional=True,
    )
]
setup(
    cmdclass={"build_ext": OptionalLibrary},
    ext_modules=[
        Extension(
            "amp_backend_cpu.native._kernels",
            sources=["backends/cpu/amp_backend_cpu/native/kernels.c"],
            depends=["backends/cpu/amp_backend_cpu/native/loops.h"],
            export_symbols=[
                "amp_abi",
                "amp_add",
                "amp_measure",
                "amp_scale",
                "amp_cast",
                "amp_update_scale",
                "amp_instruction_set",
                "amp_limit",
            ],
            extra_compile_args=["-O3", "-fopenmp", "-Wno-psabi"] if unix else ["/O2", "/openmp"],
            extra_link_args=["-fopenmp"] if unix else [],
            optional=True,
        ),
        *(regions if unix else []),
    ],
)
