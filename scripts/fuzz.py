"""Fuzz the code that reads foreign bytes, text and tensors, under AddressSanitizer and UBSan (docs/inside/testing.md).

    python -m scripts.fuzz [codec device seeded library python ...] [--seconds 60] [--runs 10000000] [--quick]

codec     the CPU kernels with any bytes (tests/fuzz/codec.cpp)
device    the CUDA codec on the host with any bytes (tests/fuzz/device.cpp)
seeded    kernels with a mistake made on purpose, which the first has to find
library   the compiled library, instrumented, under the tests of the operators
python    configurations, flags, logs, sizes and arguments of the operators, by hypothesis

The first two run the corpus, and then for --seconds, or --runs executions of each if given, in a process a core. With
clang++ and its libFuzzer they search by coverage; with another compiler tests/fuzz/driver.cpp mutates the corpus.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "fuzz"
FUZZ = ROOT / "tests" / "fuzz"
CORPUS = FUZZ / "corpus"
KERNELS = [ROOT / "csrc" / "cpu" / f"codec_{name}.cpp" for name in ("default", "avx2", "avx512")]
TARGETS = ("codec", "device", "seeded", "library", "python")
SANITIZERS = "-fsanitize=address,undefined,float-cast-overflow"
FLAGS = [
    "-std=c++17", "-g1", "-fno-omit-frame-pointer", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi",
    "-ffp-contract=off", "-fno-sanitize-recover=all",
]  # fmt: skip
# The tests of the library to run; all of them would take an hour.
LIBRARY_TESTS = ("tests/codec/test_ops.py", "tests/codec/test_rows.py", "tests/codec/test_fuzz_operators.py")
PYTHON_TESTS = ("tests/codec/test_fuzz_operators.py", "tests/test_fuzz_texts.py")
# The widths of the broken kernels and of --quick; these two have every plane.
SEEDED_WIDTHS = (5,)
QUICK_WIDTHS = (7, 8)
# Mistakes for codec_default.cpp: a file of csrc/cpu, a text that occurs once in it, and its replacement.
SEEDED = (
    ("codec_kernels.h", "(i < n ? i : 0)", "(i <= n ? i : 0)"),
    ("codec_kernels.h", "rank = 1; rank < p.count;", "rank = 1; rank <= p.count;"),
    ("planes.h", "pack_plane<4>(x, 0, planes + i / 2)", "pack_plane<4>(x, 0, planes + i / 2 + 1)"),
    ("codec_kernels.h", "(numel - whole * g) * kBytes)", "(numel - whole * g) * kBytes + 1)"),
    ("option_kernels.h", "at[k] = place & (g - 1);", "at[k] = place;"),
    ("option_kernels.h", "static_cast<int>(low[j]) & (g - 1)", "static_cast<int>(low[j] * 1e30f)"),
)  # fmt: skip
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:handle_abort=1:allocator_may_return_null=1:quarantine_size_mb=16",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class Compiler:
    """The programs to fuzz. quick: without optimization, two widths; compiled in a fifth of the time."""

    def __init__(self, wished: str | None, quick: bool = False) -> None:
        clang = wished or shutil.which("clang++")
        self.fuzzes = clang is not None and _has_libfuzzer(clang)
        name = clang if self.fuzzes else wished or shutil.which("c++") or shutil.which("g++")
        if name is None:
            sys.exit("fuzz: no C++ compiler; expected clang++, c++ or g++ on PATH, or one given with --compiler.")
        self.name = name
        self.quick = quick
        self.flags = [*FLAGS, *(["-O0", _define(QUICK_WIDTHS)] if quick else ["-O1"])]
        widths = "-".join(["", "quick", *map(str, QUICK_WIDTHS)]) if quick else ""  # no object of other widths
        self.folder = BUILD / (Path(name).name.replace("+", "p") + widths)

    def objects(self, sources: Iterable[Path], flags: Sequence[str] = (), folder: Path | None = None) -> list[Path]:
        """Compile the programs in parallel, into `folder` or the compiler's. Up-to-date programs are kept."""
        folder = folder or self.folder
        folder.mkdir(parents=True, exist_ok=True)
        coverage = ",fuzzer-no-link" if self.fuzzes else ""

        def compiled(source: Path) -> Path:
            target = folder / f"{source.stem}.o"
            if _is_old(target):
                part = target.with_suffix(".part.o")
                command = [self.name, *self.flags, SANITIZERS + coverage, *flags, "-MMD", "-MF", str(_included(target))]
                _check([*command, "-c", str(source), "-o", str(part)])
                part.replace(target)
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(compiled, sources))

    def link(self, objects: Iterable[Path], program: Path) -> Path:
        fuzzer = ",fuzzer" if self.fuzzes else ""
        _check([self.name, SANITIZERS + fuzzer, *map(str, objects), "-o", str(program)])
        return program

    def kernels(self) -> list[Path]:
        """The sources of the kernels, default, AVX2, AVX-512."""
        return KERNELS if not self.quick else [_copy(self.folder, QUICK_WIDTHS) / k.relative_to(ROOT) for k in KERNELS]

    def target(self, name: str) -> list[Path]:
        """The sources of a fuzz target, without kernels."""
        return [FUZZ / f"{name}.cpp", *([] if self.fuzzes else [FUZZ / "driver.cpp"])]


def _included(target: Path) -> Path:
    """Return the file in which the compiler lists an object's sources."""
    return target.with_suffix(".d")


def _is_old(target: Path) -> bool:
    if not target.exists() or not _included(target).exists():
        return True
    sources = _included(target).read_text().partition(":")[2].replace("\\\n", " ").split()
    return any(not Path(s).exists() or Path(s).stat().st_mtime > target.stat().st_mtime for s in sources)


def _define(widths: Sequence[int]) -> str:
    return f"-DFUZZ_WIDTHS={','.join(map(str, widths))}"


def _copy(folder: Path, widths: Sequence[int], mistake: tuple[str, str, str] | None = None) -> Path:
    """Fill `folder` with a copy of csrc, with kernels for some widths only, and with a mistake if one is given."""
    for file in (ROOT / "csrc").rglob("*.*"):
        text = file.read_text()
        if mistake is not None and file.name == mistake[0]:
            assert text.count(mistake[1]) == 1, mistake
            text = text.replace(mistake[1], mistake[2])
        if file.name in ("option_kernels.h", "codebook_kernels.h"):  # those with the tables of kernels
            text = re.sub(
                r"\b(table|kCodebooks)<(\d), ",
                lambda m: f"{m[1]}<{m[2] if int(m[2]) in widths else widths[0]}, ",
                text,
            )
        target = folder / file.relative_to(ROOT)
        if not target.exists() or target.read_text() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    return folder


def _has_libfuzzer(compiler: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.cpp"
        source.write_text(
            '#include <cstddef>\n#include <cstdint>\nextern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t)'
            "{ return 0; }\n"
        )
        command = [compiler, "-fsanitize=fuzzer,address", str(source), "-o", f"{folder}/empty"]
        return subprocess.run(command, capture_output=True).returncode == 0


def _check(command: Sequence[str]) -> None:
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(f"fuzz: {' '.join(command)} failed.")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a target's processes. text: the end of the output of the process with a finding."""

    executed: int
    decoded: int
    a_second: int
    text: str | None


def run(program: Path, limits: Sequence[str], seed: int, jobs: int) -> Outcome:
    processes = []
    for job in range(jobs):
        mine = program.parent / f"corpus-{program.name}-{job}"  # libFuzzer's folder of new inputs
        mine.mkdir(exist_ok=True)
        options = [*limits, f"-seed={seed + job}", f"-artifact_prefix={program}-", "-print_final_stats=1"]
        log = program.parent / f"{program.name}-{job}.log"
        with log.open("w") as file:
            command = [str(program), *options, "-max_len=512", str(mine), str(CORPUS)]
            environment = {**os.environ, **ENVIRONMENT}
            processes.append((log, subprocess.Popen(command, stdout=file, stderr=file, env=environment)))
    text = None
    executed = decoded = a_second = 0
    for log, process in processes:
        status = process.wait()
        said = log.read_text(errors="replace")
        if status:
            text = f"{said[-6000:]}\n{log} has it all; the input again: {program} FILE"
        executed += _number(said, r"stat::number_of_executed_units: +(\d+)")
        a_second += _number(said, r"stat::average_exec_per_sec: +(\d+)")
        decoded += _number(said, r"decoder executions: (\d+)")
    return Outcome(executed, decoded, a_second, text)


def fuzz(target: str, compiler: Compiler, runs: int | None, seconds: float, seed: int, jobs: int) -> bool:
    """Run a target in `jobs` processes, and say how often; whether nothing was found."""
    kernels = compiler.kernels() if target == "codec" else compiler.kernels()[:1]
    program = compiler.link(compiler.objects([*kernels, *compiler.target(target)]), compiler.folder / target)
    limit = f"-max_total_time={seconds:g}" if runs is None else f"-runs={-(-runs // jobs)}"
    outcome = run(program, [limit], seed, jobs)
    if outcome.text is not None:
        print(outcome.text)
    how = "libFuzzer" if compiler.fuzzes else "mutations of the corpus"
    print(
        f"{target}: {outcome.executed:,} executions, {outcome.decoded:,} of the decoder, {outcome.a_second:,} a second "
        f"in {jobs} processes ({how}), {'no finding' if outcome.text is None else 'A FINDING'}",
        flush=True,
    )
    return outcome.text is None


def seeded(compiler: Compiler, seconds: float) -> bool:
    """Return True if every mistake is found."""
    compiler.flags.append(_define(SEEDED_WIDTHS))
    folder = compiler.folder / "seeded"
    sound = [_copy(folder, SEEDED_WIDTHS) / kernel.relative_to(ROOT) for kernel in KERNELS[1:]]
    whole = compiler.objects([*compiler.target("codec"), *sound], folder=folder)

    def broken(number: int) -> Path:
        place = _copy(folder / str(number + 1), SEEDED_WIDTHS, SEEDED[number])
        objects = compiler.objects([place / KERNELS[0].relative_to(ROOT)], folder=place)
        return compiler.link([*whole, *objects], place / "codec")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = list(pool.map(broken, range(len(SEEDED))))
    good = True
    for (name, _, new), program in zip(SEEDED, programs, strict=True):
        outcome = run(program, [f"-max_total_time={seconds:g}"], 1, 1)
        kind = re.search(r"found: .*|SUMMARY: .*|runtime error: .*", outcome.text or "")
        print(f"seeded: {name}, {new}: {kind[0] if kind else 'NOT FOUND'}", flush=True)
        good &= kind is not None
    return good


def _number(text: str, pattern: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def library(examples: int) -> bool:
    """Build the library with sanitizers, in a copy of the package, and run tests with it."""
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        sys.exit("fuzz: no c++; it builds the library with sanitizers.")
    plain = Compiler(compiler)
    plain.fuzzes = False
    torch_flags = [f"-isystem{path}" for path in include_paths()]
    torch_flags += _definitions()
    objects = plain.objects(KERNELS)
    objects += plain.objects([ROOT / "csrc" / "ops.cpp", ROOT / "csrc" / "cpu" / "codec_cpu.cpp"], torch_flags)
    site = BUILD / "site"
    shutil.rmtree(site, ignore_errors=True)
    for name in ("flash_allreduce_plugin", "tests", "scripts", "csrc", "docs"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, site / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, site / name)
    target = site / "flash_allreduce_plugin" / "_C.abi3.so"
    libraries = [f"-L{path}" for path in library_paths()] + ["-ltorch_cpu", "-lc10"]
    _check([compiler, SANITIZERS, "-shared", *map(str, objects), *libraries, "-o", str(target)])
    preloaded = " ".join(
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    )
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "LD_PRELOAD": preloaded,
        "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONMALLOC": "malloc",
        "FUZZ_EXAMPLES": str(examples),
    }
    loaded = (
        "from flash_allreduce_plugin.codec import ops; "
        "assert ops.unavailable is None, ops.unavailable; print(ops.__file__)"
    )
    if subprocess.run([sys.executable, "-c", loaded], cwd=site, env=environment).returncode:
        return False
    return _pytest(LIBRARY_TESTS, site, environment, "library")


def _definitions() -> list[str]:
    match = re.search(r'TORCH_TARGET = "(\w+)"', (ROOT / "setup.py").read_text())
    assert match is not None
    return [f"-DTORCH_TARGET_VERSION={match[1]}"]


def python(examples: int) -> bool:
    return _pytest(PYTHON_TESTS, ROOT, {**os.environ, "FUZZ_EXAMPLES": str(examples)}, "python")


def _pytest(tests: Sequence[str], folder: Path, environment: dict[str, str], target: str) -> bool:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "--timeout=3600",
        "--capture=sys",  # shows the sanitizer's report before it ends the process
        *tests,
    ]
    status = subprocess.run(command, cwd=folder, env=environment).returncode
    print(f"{target}: {'no finding' if status == 0 else f'A FINDING (exit code {status})'}", flush=True)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the first two")
    parser.add_argument("--runs", type=int, help="executions of each of them, in place of --seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of each of the first two")
    parser.add_argument("--quick", action="store_true", help="the first two: without optimization, some widths")
    parser.add_argument("--examples", type=int, default=2000, help="of each test of the last two")
    parser.add_argument("--compiler", help="default: clang++ if it has libFuzzer, else c++")
    arguments = parser.parse_args()
    unknown = set(arguments.targets) - set(TARGETS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(TARGETS)}")
    good = True
    for target in arguments.targets or TARGETS:
        if target in ("codec", "device"):
            compiler = Compiler(arguments.compiler, arguments.quick)
            good &= fuzz(target, compiler, arguments.runs, arguments.seconds, arguments.seed, arguments.jobs)
        elif target == "seeded":
            good &= seeded(Compiler(arguments.compiler), arguments.seconds)
        else:
            good &= {"library": library, "python": python}[target](arguments.examples)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
