"""The published package: versions, metadata, sdist, wheel, licences, the tables of docs/trust/releases.md.

`nox -s package` makes, installs and tests the real wheel. Here its checks meet archives with planted faults.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flash_allreduce_plugin as fap
from scripts import check_package, package_cuda, support_matrix
from scripts.check_package import PACKAGE
from scripts.package import doctor_problems
from scripts.support_matrix import Cell

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # mypy, of the dev extra, brings it there

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = PYPROJECT["version"]

needs_binutils = pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")


def test_one_version_everywhere() -> None:
    assert fap.__version__ == VERSION
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+)", changelog, re.MULTILINE)[1] == VERSION  # type: ignore[index]
    assert f"| {'.'.join(VERSION.split('.')[:2])}.x |" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_the_supported_pythons_agree_everywhere() -> None:
    prefix = "Programming Language :: Python :: "
    said = [c.removeprefix(prefix) for c in PYPROJECT["classifiers"] if re.match(prefix + r"\d+\.\d+$", c)]
    assert tuple(said) == support_matrix.PYTHONS
    assert PYPROJECT["requires-python"] == f">={said[0]}"
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f'"py_limited_api": "cp{said[0].replace(".", "")}"' in text
    assert f"| Python | {said[0]} to {said[-1]} |" in support_matrix.DOCUMENT.read_text(encoding="utf-8")


def test_the_matrix_runs_tests_that_exist() -> None:
    assert all((ROOT / file).is_file() for files in support_matrix.TESTS.values() for file in files)


def test_the_matrix_has_the_ends_of_every_window() -> None:
    """Check that the oldest torch is the one that the binary targets."""
    (torch,) = [text for text in PYPROJECT["dependencies"] if text.startswith("torch")]
    major, minor, _ = support_matrix.TORCHES[0].split(".")
    assert torch == f"torch>={major}.{minor}"
    target = f"0x{int(major):02x}{int(minor):02x}000000000000"
    assert f'TORCH_TARGET = "{target}"' in (ROOT / "setup.py").read_text(encoding="utf-8")
    for name in ("megatron", "deepspeed"):
        (window,) = PYPROJECT["optional-dependencies"][name]
        first = re.search(r">=([\d.]+)", window)[1]  # type: ignore[index]
        below = re.search(r"<(\d+)\.(\d+)", window)
        tried = [f.partition("==")[2] for f in support_matrix.FRAMEWORKS if f.startswith(name)]
        assert tried[0].startswith(first) and below is not None
        assert tried[-1].startswith(f"{below[1]}.{int(below[2]) - 1}.")


def built(tmp_path: Path, release: str, knows: str, torch_cuda: str | None, torch_knows: str = "") -> tuple[int, str]:
    """Return exit status and output of build_cuda with an nvcc of a release and a torch of a CUDA, both imitations.

    The imitated nvcc prints its arguments. scripts/check_cuda.py runs the real one.
    """
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\ncase $1 in\n"
        f"--version) echo 'Cuda compilation tools, release {release}, V{release}.1' ;;\n"
        f"--list-gpu-arch) printf '{knows}' ;;\n*) echo compiles $@ ;;\nesac\n"
    )
    nvcc.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(
        f"import torch\ntorch.version.cuda = {torch_cuda!r}\ntorch._C._cuda_getArchFlags = lambda: {torch_knows!r}\n"
    )
    kept = {k: v for k, v in os.environ.items() if k not in ("TORCH_CUDA_ARCH_LIST", "CUDA_HOME")}
    done = subprocess.run(
        [sys.executable, "setup.py", "build_cuda", "--build-lib", str(tmp_path)],
        cwd=ROOT,
        env={**kept, "NVCC": str(nvcc), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


NEW, OLD = "compute_80\\ncompute_90\\ncompute_100\\n", "compute_70\\ncompute_80\\ncompute_90\\n"


@pytest.mark.parametrize(
    ("release", "knows", "torch_cuda", "torch_knows", "expected"),
    [
        ("13.0", NEW, None, "", "8.0;9.0;10.0+PTX"),
        ("13.2", NEW, "13.0", "sm_80 sm_90 sm_100 compute_120", "8.0;9.0;10.0+PTX"),
        ("12.4", OLD, "12.8", "sm_80 sm_90 sm_100", "8.0;9.0+PTX"),  # nvcc 12.4 refuses 10.0
        ("12.8", NEW, "13.0", "sm_90 sm_100", "9.0;10.0+PTX"),  # an older runtime serves a newer driver
    ],
)
def test_the_gpus_are_supported_by_nvcc_and_torch(
    tmp_path: Path, release: str, knows: str, torch_cuda: str | None, torch_knows: str, expected: str
) -> None:
    status, said = built(tmp_path, release, knows, torch_cuda, torch_knows)
    assert status == 0 and f"building the CUDA library for {expected} with" in said, said
    last = expected.removesuffix("+PTX").rpartition(";")[2].replace(".", "")
    assert f"code=[sm_{last},compute_{last}]" in said


def test_the_operators_that_the_cuda_wheel_has_to_register_are_those_of_its_sources() -> None:
    """Compare with nox -s package-cuda, which asks for them; not for those that csrc/cuda gives CPU tensors."""
    codec = {"encode", "decode", "decode_sum", "decode_sum_encode", "encode_feedback", "decode_sum_encode_feedback"}
    assert set(package_cuda.operators()) == {*codec, "two_shot_all_reduce", "load_two_shot"}


def test_an_nvcc_newer_than_torchs_cuda_is_refused(tmp_path: Path) -> None:
    status, said = built(tmp_path, "13.0", NEW, "12.8")
    assert status == 1 and "compiles" not in said
    assert re.search(r"nvcc is of CUDA 13\.0 and torch \S+ of CUDA 12\.8: a driver that serves torch need not", said), (
        said
    )


def test_no_common_gpu_is_an_error(tmp_path: Path) -> None:
    status, said = built(tmp_path, "13.0", "compute_120\\n", "13.0", "sm_90")
    assert status == 1 and "have none of 8.0, 9.0, 10.0 in common; name the GPUs in TORCH_CUDA_ARCH_LIST." in said


def test_every_dependency_has_its_licence() -> None:
    table = support_matrix.DOCUMENT.read_text(encoding="utf-8").partition("<!-- licences -->")[2]
    named = {re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r"[\w.-]+", table)}
    extras = (extra for name, extra in PYPROJECT["optional-dependencies"].items() if name != "dev")
    for requirement in [*PYPROJECT["dependencies"], *(text for extra in extras for text in extra)]:
        name = re.split(r"[^\w.-]", requirement)[0]
        assert name in named, f"{name} is not in the table of licences: nox -s licences"


# The contents of the sdist.


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with files to package, and with files to leave out."""
    folder = tmp_path / "checkout"
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder)
    for name in (*check_package.modules(), *check_package.sources()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in ("tests/test_a.py", "lab/benchmarks/b.py", "scripts/c.py", "notes/d.md", f"{PACKAGE}/_C.abi3.so"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def sdist(checkout: Path) -> Path:
    script = "import setuptools.build_meta as backend; backend.build_sdist('dist')"
    done = subprocess.run([sys.executable, "-c", script], cwd=checkout, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (path,) = (checkout / "dist").glob("*.tar.gz")
    return path


def test_the_sdist_has_its_files(checkout: Path) -> None:
    assert check_package.sdist_problems(sdist(checkout)) == []


def test_an_sdist_with_more_or_less_is_refused(checkout: Path) -> None:
    manifest = (checkout / "MANIFEST.in").read_text()
    manifest = manifest.replace("prune tests", "recursive-include lab *").replace("*.h ", "")
    (checkout / "MANIFEST.in").write_text(manifest)
    text = "\n".join(check_package.sdist_problems(sdist(checkout)))
    top = f"{PACKAGE}-{VERSION}"
    assert f"{top}/tests/test_a.py does not belong here" in text
    assert f"{top}/lab/benchmarks/b.py does not belong here" in text
    assert f"{top}/csrc/wire_format.h is missing" in text


# The contents of the wheel's libraries.


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Yield compiled(source, flags): a shared library."""
    folder = tmp_path_factory.mktemp("libraries")

    def make(source: str, *flags: str) -> Path:
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("needs a C++ compiler")
        path = folder / f"_{hashlib.sha256(repr((source, flags)).encode()).hexdigest()[:8]}.so"
        file = folder / "source.cpp"
        file.write_text(source)
        subprocess.run([compiler, "-shared", "-fPIC", str(file), *flags, "-o", str(path)], check=True, timeout=60)
        return path

    yield make


@needs_binutils
def test_a_library_as_it_is_to_be(compiled: Callable[..., Path]) -> None:
    source = 'extern "C" void* memcpy(void*, const void*, unsigned long);\nauto p = memcpy;\n'
    library = compiled(source + 'const char* place = "csrc/cpu/../checks.h";')  # not of the machine
    assert check_package.path_problems(library) == []


@needs_binutils
@pytest.mark.parametrize(
    ("source", "flags", "problem"),
    [
        ("const char* f() { return __FILE__; }", [], "has paths of the build in it"),
        ("int f() { return 1; }", ["-Wl,-rpath,/home/me/lib"], "has R"),
    ],
)
def test_a_library_with_a_fault_is_refused(
    source: str, flags: list[str], problem: str, compiled: Callable[..., Path]
) -> None:
    problems = check_package.path_problems(compiled(source, *flags))
    assert any(problem in text for text in problems), problems


# The output of `nox -s package` and `nox -s matrix` from doctor's report, and the table.


def _report(**levels: str) -> dict[str, object]:
    names = ["flash-allreduce-plugin", "_C (CPU)", "entry point", "codec on cpu", "all_reduce, 2 ranks, 8 bits"]
    findings = [{"name": name, "level": levels.get(name.split(" ")[0], "ok"), "text": "a text"} for name in names]
    for name in ("megatron-core", "deepspeed"):
        findings.append({"name": name, "level": "note", "text": levels.get(name[:8], "not installed (supported: 1)")})
    return {"findings": findings}


def test_problems_of_an_installation() -> None:
    assert doctor_problems(_report()) == []
    assert doctor_problems(_report(_C="problem")) == ["_C (CPU): a text", "_C (CPU) is not ok"]
    assert doctor_problems(_report(entry="note")) == ["entry point is not ok"]
    assert doctor_problems(_report(megatron="0.16.1")) == ["megatron-core is there; the environment is not empty"]
    assert doctor_problems(_report(megatron="0.16.1"), frameworks=True) == []
    assert len(doctor_problems({"findings": []})) == 7


def test_the_table_of_the_document_is_written_as_read() -> None:
    document = support_matrix.DOCUMENT.read_text(encoding="utf-8")
    rows = support_matrix.read(document)
    row = ["3.12.1", "2.11.0+cu130", "deepspeed 0.19.8", "no problem", "3 passed", "2026-01-02"]
    cell = Cell("3.12", "2.11.0", "deepspeed==0.19.8")
    assert support_matrix.key(row) == cell == Cell.parse(str(cell))
    changed = support_matrix.rewrite(document, {**rows, cell: row}, "about")
    assert support_matrix.read(changed) == {**rows, cell: row}
    assert changed.partition(support_matrix.BEGIN)[0] == document.partition(support_matrix.BEGIN)[0]
    assert changed.partition(support_matrix.END)[2] == document.partition(support_matrix.END)[2]


def test_the_last_matrix_has_passed() -> None:
    for row in support_matrix.read(support_matrix.DOCUMENT.read_text(encoding="utf-8")).values():
        assert row[3].startswith("no problem") and re.fullmatch(r"\d+ passed(, \d+ skipped)?", row[4]), row
