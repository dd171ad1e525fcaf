"""The one wheel with other Pythons, releases of torch and of the frameworks: the table of docs/trust/releases.md.

    nox -s matrix                                                    # all of it: some 30 GB are downloaded, an hour
    python -m scripts.support_matrix --cells 3.12:2.11.0 3.13:2.13.0
    python -m scripts.support_matrix --cells 3.11:2.13.0:megatron-core==0.13.1 3.11:2.13.0:deepspeed==0.19.8
    python -m scripts.support_matrix --list

A cell is a separate virtual environment, without a compiler: torch of the package index (the CUDA build, if the index
has it for the Python; linked from this interpreter if it is the same), the wheel of dist/, never
compiled again, `flash-allreduce doctor`, and some of the tests, which see the installed package and not the checkout.
Pythons that are not on this machine are skipped, and said to be. The row of a cell that was not run stays as it is,
with its date.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from scripts.environments import CommandFailed, Environment, found
from scripts.package import doctor_problems

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "trust" / "releases.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"
HEADER = ("Python", "torch", "with", "doctor", "tests", "date")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.12.1", "2.13.0")
# With the Python and the torch of the development environment, except where a later Python is required.
FRAMEWORKS = ("megatron-core==0.13.1", "megatron-core==0.16.1", "megatron-core==0.19.2")
FRAMEWORKS += ("deepspeed==0.17.6", "deepspeed==0.19.8")
ELSEWHERE = {"megatron-core==0.19.2": ("3.12", "2.11.0")}
QUICK = (
    *("codec/test_format", "codec/test_ops", "codec/test_rows", "collectives/test_flat", "collectives/test_work"),
    *("config/test_fields", "policy/test_plan", "policy/test_roles", "integrations/ddp/test_hook"),
    "integrations/fsdp/test_fsdp2",
)
TESTS = {
    "": [f"tests/{name}.py" for name in QUICK],
    "megatron-core": ["tests/integrations/megatron/test_seams.py"],
    "deepspeed": ["tests/integrations/deepspeed/test_section.py"],
}
TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "numpy")


@dataclass(frozen=True, slots=True)
class Cell:
    """torch, framework: releases; framework as "name==release", or "" for none."""

    python: str
    torch: str
    framework: str = ""

    @classmethod
    def parse(cls, text: str) -> Cell:
        python, torch, framework, *rest = [*text.split(":"), "", ""]
        if not re.fullmatch(r"3\.\d+", python) or not re.fullmatch(r"\d+\.\d+\.\d+", torch) or any(rest):
            raise argparse.ArgumentTypeError(f"{text}: expected PYTHON:TORCH or PYTHON:TORCH:NAME==RELEASE")
        if framework and framework.partition("==")[0] not in TESTS:
            names = ", ".join(filter(None, TESTS))
            raise argparse.ArgumentTypeError(f"{text}: expected one of {names} with its release")
        return cls(python, torch, framework)

    def __str__(self) -> str:
        return ":".join(filter(None, (self.python, self.torch, self.framework)))


def cells() -> list[Cell]:
    plain = [Cell(python, torch) for python in PYTHONS for torch in TORCHES]
    return plain + [Cell(*ELSEWHERE.get(name, ("3.11", "2.13.0")), name) for name in FRAMEWORKS]


def interpreter(version: str) -> str | None:
    """A Python of this version: this one, on the PATH, or among pyenv's; None if there is none that starts."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, shutil.which(f"python{version}")]
    candidates += [str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*"), reverse=True)]
    for candidate in filter(None, candidates):
        script = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", script], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    return None


def run(cell: Cell, wheel: Path, folder: Path, sites: dict[str, Path]) -> list[str] | None:
    """The row of a cell; None where there is no such Python."""
    python = interpreter(cell.python)
    if python is None:
        return None
    environment = Environment(folder / "cell", python, compiler=False)
    try:
        shown = [cell.python, cell.torch]
        doctor = tests = "not installed"
        try:
            _install(cell, wheel, environment, sites)
            versions = "import platform, torch; print(platform.python_version(), torch.__version__)"
            shown = environment.python(versions).split()[-2:]
            doctor = "fails"
            doctor = _doctor(environment, bool(cell.framework))
            tests = "fail"
            tests = _tests(cell, environment, folder / "tests")
        except CommandFailed as error:
            print(error, flush=True)
        today = datetime.now(timezone.utc).date().isoformat()
        return [*shown, cell.framework.replace("==", " "), doctor, tests, today]
    finally:
        shutil.rmtree(environment.folder)


def _install(cell: Cell, wheel: Path, environment: Environment, sites: dict[str, Path]) -> None:
    ours = found("torch")
    same_python = environment.python("import sys; print(sys.version_info[:3])") == f"{sys.version_info[:3]}\n"
    if f"{cell.python}:{cell.torch}" in sites:
        (environment.site / "site.pth").write_text(f"{sites[f'{cell.python}:{cell.torch}']}\n", encoding="utf-8")
    elif same_python and ours is not None and ours.version.partition("+")[0] == cell.torch:
        environment.lend("torch")
    else:
        environment.install("--no-cache-dir", f"torch=={cell.torch}")
    environment.install("--only-binary=:all:", f"{wheel}[cli]", *TOOLS)
    if cell.framework:
        # DeepSpeed's setup.py asks bash for commands. It compiles nothing here, and ours is installed by now.
        more = {"DS_BUILD_OPS": "0", "PATH": os.pathsep.join([str(environment.bin), os.environ["PATH"]])}
        environment.install("setuptools>=77")
        environment.install("--no-build-isolation", cell.framework, env=more)


def _doctor(environment: Environment, framework: bool) -> str:
    report = environment.folder / "doctor.json"
    environment.run("flash-allreduce", "doctor", "--json", str(report), "--timeout", "300", env=_CPU)
    said = json.loads(report.read_text(encoding="utf-8"))
    wrong = doctor_problems(said, framework)
    if wrong:
        raise CommandFailed(f"flash-allreduce doctor: {'; '.join(wrong)}")
    if framework and not any(f["section"].endswith("seams") and f["text"] == "would attach" for f in said["findings"]):
        raise CommandFailed("flash-allreduce doctor: no seam would attach")
    return "no problem"


def _tests(cell: Cell, environment: Environment, folder: Path) -> str:
    """Return pytest's last line. The tests are copied: next to the package's sources they would import those."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("tests", "docs"):  # some tests run the documents' examples
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    files = TESTS[cell.framework.partition("==")[0]]
    options = ("-q", "-m", "not slow", "-p", "no:cacheprovider")
    printed = environment.run("python", "-m", "pytest", *options, *files, cwd=folder, timeout=3600, env=_CPU)
    last = printed.strip().splitlines()[-1].strip("= ")
    counts = re.findall(r"\d+ (?:passed|failed|skipped|xfailed|error)", last)
    return ", ".join(counts) or last


_CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def key(row: list[str]) -> Cell:
    """The cell of a row: 3.12.1 and 2.11.0+cu130 are those of 3.12:2.11.0."""
    return Cell(".".join(row[0].split(".")[:2]), row[1].partition("+")[0], row[2].replace(" ", "=="))


def read(document: str) -> dict[Cell, list[str]]:
    """Return the row of each cell in a document. A line of the document has a row for each torch that it names."""
    block = document.partition(BEGIN)[2].partition(END)[0]
    lines = [line.strip()[1:-1].split("|") for line in block.splitlines() if line[:1] == "|"]
    rows = [[cell.strip() for cell in line] for line in lines[2:]]
    return {
        key(row): row for first, torches, *rest in rows for row in ([first, one, *rest] for one in torches.split(", "))
    }


def rewrite(document: str, rows: dict[Cell, list[str]], about: str) -> str:
    """Return the document with these rows, in the order of `cells()`. Rows that differ in torch alone share a line."""
    order = [*(cell for cell in cells() if cell in rows), *(cell for cell in rows if cell not in cells())]
    torches: dict[tuple[str, ...], list[str]] = {}
    for first, torch, *rest in (rows[cell] for cell in order):
        torches.setdefault((first, *rest), []).append(torch)
    merged = [(first, ", ".join(several), *rest) for (first, *rest), several in torches.items()]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [HEADER, ("---",) * len(HEADER), *merged])
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{table}\n\n{about}\n{END}", document)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", type=Cell.parse, default=cells(), help="default: all of them")
    parser.add_argument("--list", action="store_true", help="print the cells, and which Pythons there are")
    parser.add_argument("--wheel", type=Path, help="default: the one in dist/")
    parser.add_argument(
        "--site",
        action="append",
        default=[],
        metavar="PYTHON:TORCH=FOLDER",
        help="a site-packages that has this torch for this Python, instead of a download",
    )
    parser.add_argument("--no-write", action="store_true", help="leave docs/trust/releases.md as it is")
    arguments = parser.parse_args()
    if arguments.list:
        for cell in arguments.cells:
            print(f"{cell!s:42} {interpreter(cell.python) or 'no such Python here'}")
        return 0
    wheels = [arguments.wheel] if arguments.wheel else sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1 or not wheels[0].is_file():
        parser.error("expected one wheel in dist/; nox -s package")
    sites = {name: Path(folder).resolve() for name, _, folder in (text.partition("=") for text in arguments.site)}
    os.environ.pop("PYTHONPATH", None)
    failed = False
    for cell in arguments.cells:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
            row = run(cell, wheels[0].resolve(), Path(folder), sites)
        if row is None:
            print(f"{cell}: skipped, there is no Python {cell.python} here", flush=True)
            continue
        failed |= "passed" not in row[4] or "failed" in row[4]
        print(f"{' | '.join(row)}   ({time.monotonic() - begin:.0f} s)", flush=True)
        if not arguments.no_write:  # after each cell: a run of an hour may be ended
            document = DOCUMENT.read_text(encoding="utf-8")
            libc = " ".join(platform.libc_ver())
            about = f"The wheel: {wheels[0].name}. The machine: {platform.machine()}, {libc}, no GPU."
            DOCUMENT.write_text(rewrite(document, {**read(document), cell: row}, about), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
