"""Builds the compiled libraries against the torch that is installed, on its stable ABI (torch >= 2.11).

    pip install --no-build-isolation -e .

FLASH_ALLREDUCE_BUILD says what is built:
    auto   the CPU library, and the CUDA library where torch is a CUDA build and nvcc is there (the default)
    cpu    the CPU library
    cuda   both; it is an error if nvcc is not there
    none   neither: the codec in plain PyTorch, slower, no compiler needed
TORCH_CUDA_ARCH_LIST (for example "8.0;9.0+PTX") says for which GPUs; NVCC or CUDA_HOME, where nvcc is. Without it they
are A100, H100 and B200, as far as nvcc and torch know them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Command, setup

# The first release whose stable ABI has all we use: one binary serves this one and every later one.
TORCH_TARGET = "0x020b000000000000"
PACKAGE = "flash_allreduce_plugin"
# A100, H100, B200; their binaries serve the chips of the same generation, the PTX of the last one later ones.
CUDA_ARCHITECTURES = ("8.0", "9.0", "10.0")
CHOICES = ("auto", "cpu", "cuda", "none")
DEFINES = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    wished = os.environ.get("NVCC") or (f"{home}/bin/nvcc" if home else None)
    return shutil.which(wished or "nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def unfit(nvcc: str) -> str | None:
    """Why what this nvcc compiles would not run beside the torch that is installed, or None.

    The runtime is linked into the library. A driver that serves torch's CUDA serves every runtime of the same major
    version (NVIDIA's minor-version compatibility), and none of a newer one.
    """
    import torch

    found = re.search(r"release (\d+)\.(\d+)", output_of(nvcc, "--version"))
    if found is None:
        return f"{nvcc} --version does not say its release"
    if torch.version.cuda is not None and int(found[1]) > int(torch.version.cuda.split(".")[0]):
        return (
            f"{nvcc} is of CUDA {found[1]}.{found[2]} and torch {torch.__version__} of CUDA {torch.version.cuda}: "
            "a driver that serves torch need not serve it; name an nvcc of torch's CUDA in NVCC or CUDA_HOME"
        )
    return None


def default_architectures(nvcc: str) -> str:
    """Of CUDA_ARCHITECTURES those that nvcc can compile for and torch, if it is a CUDA build, runs on."""
    import torch

    known = set(re.findall(r"compute_(\d+)", output_of(nvcc, "--list-gpu-arch")))
    if torch.version.cuda is not None:
        known &= set(re.findall(r"(?:sm|compute)_(\d+)", torch._C._cuda_getArchFlags() or "")) or known
    names = [name for name in CUDA_ARCHITECTURES if name.replace(".", "") in known]
    if not names:
        sys.exit(
            f"FLASH_ALLREDUCE_BUILD=cuda: {nvcc} and torch {torch.__version__} have none of "
            f"{', '.join(CUDA_ARCHITECTURES)} in common; name the GPUs in TORCH_CUDA_ARCH_LIST."
        )
    return ";".join(names) + "+PTX"


def architecture_flags(architectures: str) -> list[str]:
    """-gencode flags of a TORCH_CUDA_ARCH_LIST: "9.0 10.0+PTX"."""
    flags = []
    for name in architectures.replace(";", " ").split():
        number = name.removesuffix("+PTX").replace(".", "")
        codes = [f"sm_{number}", *([f"compute_{number}"] if name.endswith("+PTX") else [])]
        flags.append(f"-gencode=arch=compute_{number},code=[{','.join(codes)}]")
    return flags


def without_places(headers: list[str]) -> list[str]:
    """Flags for error messages that name the place in the source, not where that lay on the machine that compiled it.

    GCC writes paths of -isystem without their links, where that is shorter.
    """
    places = [str(Path(__file__).parent.absolute()), *headers, *map(os.path.realpath, headers)]
    return [f"-ffile-prefix-map={path}/=" for path in dict.fromkeys(places)]


class BuildCuda(Command):
    """The CUDA library: one nvcc call, also against a torch without CUDA, where it can be linked but not loaded."""

    description = "compile csrc/cuda into one library"
    user_options: ClassVar = [("build-lib=", "b", "folder to put the package's library in")]

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        import torch
        from torch.utils.cpp_extension import include_paths

        nvcc = find_nvcc()
        if nvcc is None:
            sys.exit("FLASH_ALLREDUCE_BUILD=cuda: no nvcc found; put it on PATH, or name it in NVCC or CUDA_HOME.")
        reason = unfit(nvcc)
        if reason is not None:
            sys.exit(f"FLASH_ALLREDUCE_BUILD=cuda: {reason}.")
        architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or default_architectures(nvcc)
        libraries, headers = Path(torch.__file__).parent / "lib", include_paths()
        assert self.build_lib is not None
        target = Path(self.build_lib) / PACKAGE / "_cuda.so"
        target.parent.mkdir(parents=True, exist_ok=True)
        linked = [name for name in ("torch_cuda", "torch_cpu", "c10") if (libraries / f"lib{name}.so").exists()]
        command = [
            nvcc,
            "-std=c++17",
            "-O3",
            # Results must not depend on where the compiler fuses a multiply with an add: see csrc/codec_math.h.
            "-fmad=false",
            "-DUSE_CUDA",
            *DEFINES,
            *architecture_flags(architectures),
            "-Werror=all-warnings",
            "-Xcompiler=-fPIC,-fvisibility=hidden",
            *(f"-isystem={path}" for path in headers),
            *(f"-Xcompiler={flag}" for flag in without_places(headers)),
            "--threads=0",
            "-shared",
            *sorted(map(str, Path("csrc/cuda").glob("*.cu"))),
            f"--output-file={target}",
            f"-L{libraries}",
            f"-L{Path(nvcc).resolve().parent.parent / 'lib'}",  # where NVIDIA's wheels have the runtime
            *(f"-l{name}" for name in linked),
        ]
        print(f"{PACKAGE}: building the CUDA library for {architectures} with {nvcc}", flush=True)
        subprocess.run(command, check=True, cwd=Path(__file__).parent)


def left_out(wanted: str) -> str | None:
    """Why the CUDA library is not built, or None if it is."""
    import torch

    if wanted != "auto":
        return None if wanted == "cuda" else "asked for none"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    nvcc = find_nvcc()
    return "no nvcc found" if nvcc is None else unfit(nvcc)


def extension() -> dict[str, Any]:
    wanted = os.environ.get("FLASH_ALLREDUCE_BUILD", "auto")
    if wanted not in CHOICES:
        sys.exit(f"FLASH_ALLREDUCE_BUILD={wanted!r}: expected {', '.join(CHOICES[:-1])} or {CHOICES[-1]}.")
    if wanted == "none" or sys.argv[1:2] in (["egg_info"], ["dist_info"], ["sdist"]):
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
    except ImportError:
        sys.exit(
            "flash_allreduce_plugin compiles against the torch that will run it, and none is installed here: "
            "install torch>=2.11 first, then run `pip install --no-build-isolation .`"
        )
    without_cuda = left_out(wanted)

    class Build(BuildExtension):
        def run(self) -> None:
            super().run()
            if without_cuda is None:
                command = self.get_finalized_command("build_cuda")
                command.build_lib = "." if self.inplace else self.build_lib
                command.run()

    root = Path(__file__).parent
    sources = ["csrc/ops.cpp", *sorted(str(p.relative_to(root)) for p in (root / "csrc/cpu").glob("*.cpp"))]
    headers = include_paths()
    flags = [
        "-O3",
        "-g0",
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
        "-fvisibility=hidden",
        # As above.
        "-ffp-contract=off",
        # Nobody reads the flags of floating-point exceptions; else GCC makes no vectors of a choice between results.
        "-fno-trapping-math",
        *DEFINES,
        *(f"-isystem{path}" for path in headers),  # torch's headers may warn, ours may not
        *without_places(headers),
    ]
    print(f"{PACKAGE}: building the CPU library (AVX-512, AVX2 and plain code; chosen at run time)")
    if without_cuda is not None:
        print(f"{PACKAGE}: no CUDA library: {without_cuda}")
    module = CppExtension(
        name=f"{PACKAGE}._C",
        sources=sources,
        depends=[str(p.relative_to(root)) for p in (root / "csrc").rglob("*.h")],
        extra_compile_args={"cxx": flags},
        py_limited_api=True,
    )
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": Build, "build_cuda": BuildCuda},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**extension())
