"""csrc/cuda, compiled by nvcc and linked with the machine in the place of the CUDA runtime.

    csrc/cuda/codec.cu      nvcc -> codec.o (host code), codec.ptx
    csrc/cuda/two_shot.cu   nvcc -> two_shot.o, two_shot.ptx
    csrc/ops.cpp            c++  -> ops.o, the operators' schemas
    tests/ptx/*.cpp         c++  -> the machine
                                    -> library.so, which torch loads

Objects are kept in build/ptx under the hash of their sources and command, so that only changed ones are made again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
FOLDER = ROOT / "build" / "ptx"
CUDA = ("codec", "two_shot")
MACHINE = ("machine", "opcodes", "runtime")
#: The machine runs the PTX of this generation. The library has binaries of several, each compiled from its own.
ARCHITECTURE = os.environ.get("PTX_ARCHITECTURE", "90")
DEFINES = ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"]  # as setup.py


def compilers() -> tuple[str | None, str | None]:
    nvcc = shutil.which(os.environ.get("NVCC", "nvcc")) or shutil.which("/usr/local/cuda/bin/nvcc")
    return nvcc, shutil.which("c++") or shutil.which("g++")


def missing() -> str | None:
    """Return the reason why nothing can be built here, or None."""
    nvcc, cxx = compilers()
    if nvcc is None:
        return "no nvcc: put it on PATH, or name it in NVCC; `nox -s check-ptx` installs one"
    return "no C++ compiler" if cxx is None else None


@dataclass(frozen=True, slots=True)
class Built:
    library: Path
    ptx: tuple[Path, ...]


def _text_of(paths: list[Path]) -> bytes:
    return b"".join(path.name.encode() + path.read_bytes() for path in sorted(paths))


def _made(name: str, command: list[str], sources: list[Path]) -> Path:
    """Return a folder with the output of the command for these sources. Run the command if there is none yet."""
    digest = hashlib.sha256(_text_of(sources) + repr(command).encode()).hexdigest()[:16]
    folder = FOLDER / f"{name}-{digest}"
    if not folder.exists():
        part = FOLDER / f"{folder.name}.{os.getpid()}"
        part.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [*command, "-o", str(part / f"{name}.o")], cwd=part, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        part.rename(folder)
    return folder


def ptx_of(source: Path, *flags: str) -> Path:
    """Return the object file of a .cu and its PTX, in the same folder."""
    from torch.utils.cpp_extension import include_paths

    nvcc, _ = compilers()
    command = [
        str(nvcc), "-std=c++17", "-O3", "-fmad=false", *DEFINES, *(f"-isystem={path}" for path in include_paths()),
        f"-gencode=arch=compute_{ARCHITECTURE},code=compute_{ARCHITECTURE}", "-Xcompiler=-fPIC,-O0", "--keep",
        "-include", str(HERE / "on_cpu.h"), *flags, "-c", str(source),
    ]  # fmt: skip
    headers = [p for p in (ROOT / "csrc").rglob("*.h") if "cpu" not in p.parts]
    return _made(source.stem, command, [source, *headers, HERE / "on_cpu.h"])


def _host(source: Path, *flags: str) -> Path:
    _, cxx = compilers()
    command = [str(cxx), "-O2", "-fPIC", "-Wall", "-Wextra", "-ffp-contract=off", *flags, "-c", str(source)]
    return _made(source.stem, command, [source, *HERE.glob("*.h")])


def build() -> Built:
    import torch
    from torch.utils.cpp_extension import include_paths

    torch_flags = [*DEFINES, *(f"-isystem{path}" for path in include_paths()), "-include", str(HERE / "on_cpu.h")]
    with ThreadPoolExecutor(2) as pool:
        cuda = [pool.submit(ptx_of, ROOT / "csrc" / "cuda" / f"{name}.cu") for name in CUDA]
        others = [pool.submit(_host, HERE / f"{name}.cpp", "-std=c++20") for name in MACHINE]
        others.append(pool.submit(_host, ROOT / "csrc" / "ops.cpp", "-std=c++17", *torch_flags))
        folders = [future.result() for future in (*cuda, *others)]
    objects = [str(next(folder.glob("*.o"))) for folder in folders]
    libraries = Path(torch.__file__).parent / "lib"
    # Its own runtime comes before any that is loaded already.
    _, cxx = compilers()
    command = [str(cxx), "-shared", "-Wl,-Bsymbolic", *objects, f"-L{libraries}", "-ltorch_cpu", "-lc10"]
    library = _made("library", command, []) / "library.o"
    return Built(library, tuple(next(folder.glob("*.ptx")) for folder in folders[: len(cuda)]))
