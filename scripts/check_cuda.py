"""Compile the CUDA library for every architecture, and hold the compiler's report to limits. Needs no GPU.

    python -m scripts.check_cuda            # --write: the table of docs/trust/cuda.md too

It refuses
- a warning,
- a kernel that spills registers or keeps a stack frame, or uses more registers than its blocks of 256 threads allow,
- a symbol that neither this torch nor the list below has (a CUDA build of torch would not load the library),
- a main kernel with more instructions or waits an element than its limit (cuda_model.py),
- a table of docs/trust/cuda.md that differs from the model's output for this nvcc's code.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts import cuda_model

ROOT = Path(__file__).resolve().parent.parent
REGISTERS = 128  # of 65 536, for 2 x 256 threads
# Kernels with one block of 256 threads a multiprocessor.
ALONE = re.compile(r"two_shot_kernel|feedback_kernelI(LNS_5DTypeE\dE)?Lb1E")
REGISTERS_ALONE = 255  # most registers of a thread
# Four blocks of these share a multiprocessor, or three (codec_kernels.h says which).
PLAIN = re.compile(r"plain_\w+_kernel")
REGISTERS_PLAIN = 80
DOCS = ROOT / "docs" / "trust" / "cuda.md"
# Symbols of torch's stable ABI in libtorch_cuda.so, checked on torch 2.11.0+cu130; the CPU build lacks them.
OF_TORCH_CUDA = {
    "aoti_torch_get_current_cuda_stream",
    "torch_c10_cuda_check_msg",
    "torch_c10_cuda_free_error_msg",
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """The compiler's report of one kernel on one architecture."""

    name: str
    architecture: str
    registers: int
    stack: int  # bytes
    spills: int  # bytes, stored and loaded
    shared: int  # bytes


def parse(report: str) -> list[Kernel]:
    """The kernels of a report of `ptxas -v`, in its order."""
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\S+)' for '(?P<architecture>\S+)'"
        r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
        r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
        re.DOTALL,
    )
    kernels = []
    for found in pattern.finditer(report):
        shared = re.search(r"(\d+) bytes smem", found["rest"])
        kernels.append(
            Kernel(
                found["name"],
                found["architecture"],
                registers=int(found["registers"]),
                stack=int(found["stack"]),
                spills=int(found["stores"]) + int(found["loads"]),
                shared=int(shared[1]) if shared else 0,
            )
        )
    return kernels


def problems(kernels: Sequence[Kernel]) -> list[str]:
    found = [] if kernels else ["the compiler reported no kernel"]
    for k in kernels:
        name = f"{k.name} on {k.architecture}"
        if k.spills or k.stack:
            found.append(f"{name}: {k.spills} bytes of spills, a stack frame of {k.stack}; expected none")
        plain = REGISTERS_PLAIN if PLAIN.search(k.name) else REGISTERS
        most = REGISTERS_ALONE if ALONE.search(k.name) else plain
        if k.registers > most:
            found.append(f"{name}: {k.registers} registers; expected {most} at most")
    return found


def missing_symbols(library: Path) -> list[str]:
    """Symbols of torch that the library asks for and that no CUDA build of torch is known to have."""
    import torch

    def symbols(path: Path, kind: str) -> set[str]:
        listing = subprocess.run(["nm", "-D", kind, str(path)], capture_output=True, text=True, check=True).stdout
        return {line.split()[-1].split("@")[0] for line in listing.splitlines()}

    torch_libraries = Path(torch.__file__).parent / "lib"
    there = set(OF_TORCH_CUDA)
    for name in ("libtorch_cpu.so", "libc10.so"):
        there |= symbols(torch_libraries / name, "--defined-only")
    asked = {name for name in symbols(library, "--undefined-only") if re.match(r"aoti_|torch_|_ZN3c10|_ZN5torch", name)}
    return sorted(asked - there)


def compiler() -> str | None:
    return shutil.which(os.environ.get("NVCC", "nvcc")) or shutil.which("/usr/local/cuda/bin/nvcc")


def release(nvcc: str) -> str:
    """Return the version of nvcc, as in "13.0": another one may generate other machine code."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\S+),", said)
    return found[1] if found else "unknown"


def disassembler() -> str | None:
    """Return nvdisasm, from PATH or from nvcc's folder."""
    nvcc = compiler()
    beside = shutil.which(str(Path(nvcc).resolve().parent / "nvdisasm")) if nvcc else None
    return shutil.which(os.environ.get("NVDISASM", "nvdisasm")) or beside


def modelled(kernels: Sequence[Kernel], folder: Path, tool: str) -> tuple[list[str], list[str]]:
    """Return the table of docs/trust/cuda.md, and the numbers above their limits. folder: nvcc's binaries."""
    compiled = {}
    for gpu in cuda_model.GPUS:
        architecture = gpu.architecture
        binaries = sorted(folder.glob(f"codec*{architecture.removeprefix('sm_')}*.cubin"))
        if len(binaries) != 1:
            return [], [f"{len(binaries)} binaries of codec.cu for {architecture}; expected 1"]
        sass = subprocess.run([tool, "-c", str(binaries[0])], capture_output=True, text=True, check=True).stdout
        texts = cuda_model.kernels(sass)
        reports = {k.name: k for k in kernels if k.architecture == architecture}
        for case in cuda_model.CASES:
            names = [name for name in texts if case.kernel in name]
            if len(names) != 1:
                return [], [f"{case.name}: {len(names)} kernels on {architecture} are named {case.kernel}; expected 1"]
            report = reports[names[0]]
            compiled[case.name, architecture] = cuda_model.Compiled(report.registers, report.shared, texts[names[0]])
    return cuda_model.table(cuda_model.CASES, compiled)


def documented(text: str) -> tuple[str, str, str]:
    """Return docs/trust/cuda.md before its table, the table, and the text after it."""
    before, begin, rest = text.partition("<!-- python -m scripts.check_cuda --write -->\n")
    written, end, after = rest.partition("<!-- end -->\n")
    return before + begin, written, end + after


def short(names: Sequence[str]) -> list[str]:
    """Readable names, without the parameters."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None:
        return list(names)
    text = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::|flash_allreduce::|void |_INTERNAL\w*", "", text)
    return [line.split("(")[0] if "DType)" not in line else re.split(r">\(", line)[0] for line in plain.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-lib", type=Path, help="keep the library here")
    parser.add_argument("--write", action="store_true", help="write the table into docs/trust/cuda.md")
    arguments = parser.parse_args()
    tool = disassembler()
    if tool is None:
        sys.exit("no nvdisasm: put it on PATH, or name it in NVDISASM; `nox -s check-cuda` installs one with its nvcc")
    with tempfile.TemporaryDirectory() as folder:
        target = arguments.build_lib or Path(folder)
        build = subprocess.run(
            [sys.executable, "setup.py", "build_cuda", "--build-lib", str(target)],
            cwd=ROOT,
            env={**os.environ, "NVCC_APPEND_FLAGS": f"-Xptxas -v --keep --keep-dir={folder}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if build.returncode:
            print(build.stdout)
            return 1
        kernels = parse(build.stdout)
        found = problems(kernels)
        found += [
            f"{name}: torch is not known to have this symbol"
            for name in missing_symbols(target / "flash_allreduce_plugin" / "_cuda.so")
        ]
        lines, above = modelled(kernels, Path(folder), tool)
        found += above
    names = dict(zip((k.name for k in kernels), short([k.name for k in kernels]), strict=True))
    architectures = sorted({k.architecture for k in kernels})
    print(f"{'kernel':60}" + "".join(f"{a:>9}" for a in architectures) + "   registers")
    for name in dict.fromkeys(k.name for k in kernels):
        registers = {k.architecture: k.registers for k in kernels if k.name == name}
        print(f"{names[name][:60]:60}" + "".join(f"{registers.get(a, ''):>9}" for a in architectures))
    nvcc = compiler()
    head = f"nvcc {release(nvcc)}:\n" if nvcc else ""
    written = "\n".join([head, *lines]) + "\n"
    print(f"\nA model of what follows, not measured (scripts/cuda_model.py):\n{written}")
    before, there, after = documented(DOCS.read_text())
    if arguments.write:
        DOCS.write_text(before + written + after)
    elif not there.startswith(head):
        print("The table of docs/trust/cuda.md is of another nvcc: it is not compared.")
    elif there != written:
        found.append("the table of docs/trust/cuda.md is another one: python -m scripts.check_cuda --write")
    print(
        "\n".join(found)
        if found
        else f"{len(kernels)} kernels: no spills, no stack, at most {REGISTERS} registers; those that are alone on a "
        f"multiprocessor (two_shot, feedback with options) {REGISTERS_ALONE}, those of plain_warp.h {REGISTERS_PLAIN}."
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
