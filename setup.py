"""Builds the C++ extension against the torch that is installed, on its stable ABI (torch >= 2.11).

    pip install --no-build-isolation -e .

FLASH_ALLREDUCE_BUILD=none installs the pure-PyTorch codec only (no compiler needed, slower).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

# The first release whose stable ABI has all we use: one binary serves this one and every later one.
TORCH_TARGET = "0x020b000000000000"
PACKAGE = "flash_allreduce_plugin"


def extension() -> dict[str, Any]:
    wanted = os.environ.get("FLASH_ALLREDUCE_BUILD", "cpu")
    if wanted not in ("cpu", "none"):
        sys.exit(f"FLASH_ALLREDUCE_BUILD={wanted!r}: expected cpu or none.")
    if wanted == "none" or sys.argv[1:2] in (["egg_info"], ["dist_info"], ["sdist"]):
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
    except ImportError:
        sys.exit(
            "flash_allreduce_plugin compiles against the torch that will run it, and none is installed here: "
            "install torch>=2.11 first, then run `pip install --no-build-isolation .`"
        )
    root = Path(__file__).parent
    sources = ["csrc/ops.cpp", *sorted(str(p.relative_to(root)) for p in (root / "csrc/cpu").glob("*.cpp"))]
    flags = [
        "-O3",
        "-g0",
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
        "-fvisibility=hidden",
        # Results must not depend on where the compiler fuses a multiply with an add: see csrc/codec_math.h.
        "-ffp-contract=off",
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
        *(f"-isystem{path}" for path in include_paths()),  # torch's headers may warn, ours may not
    ]
    print(f"{PACKAGE}: building the CPU library (AVX-512, AVX2 and plain code; chosen at run time)")
    module = CppExtension(
        name=f"{PACKAGE}._C",
        sources=sources,
        depends=[str(p.relative_to(root)) for p in (root / "csrc").rglob("*.h")],
        extra_compile_args={"cxx": flags},
        py_limited_api=True,
    )
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**extension())
