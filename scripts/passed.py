"""Name the checks for CI to run: their files have changed since they passed. Say of the others when they passed.

    python -m scripts.passed                        # names on stdout; stderr says when the others passed
    python -m scripts.passed --record check-cuda    # nox does it where the session has passed

The checks below compile for many minutes. `.ci/passed.json` has the digest of a check's files and the day on which it
passed. The digest knows files of this repository only: after a change of nvcc or the C++ compiler run the checks again.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(".ci/passed.json")
_TABLES = re.compile(r"^<!-- python -m .*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
_CODEC = ("csrc/**/*", "setup.py", "flash_allreduce_plugin/codec/*.py")
_CUDA = ("csrc/*", "csrc/cuda/*", *_CODEC[1:])  # the kernels of the CPU are another library: tests/codec has their bits
#: Of each check the patterns of its files.
FILES = {
    "check-cuda": (*_CUDA, "scripts/check_cuda.py", "scripts/cuda_model.py", "docs/trust/cuda.md"),  # its table
    "check-ptx": (*_CUDA, "tests/ptx/*", "tests/gpu/*.py", "tests/codecs.py", "tests/simulation.py"),
    "fuzz-check": (*_CODEC, "scripts/fuzz.py", "tests/fuzz/**/*", "tests/host/*"),
    "package": (
        "csrc/**/*",
        "flash_allreduce_plugin/**/*.py",
        "setup.py",
        "pyproject.toml",
        "MANIFEST.in",
        "scripts/*package.py",
        "scripts/environments.py",
    ),
    "check-arm": (
        *_CODEC,
        "scripts/check_*.py",
        "scripts/fuzz.py",
        "tests/fuzz/**/*",
        "tests/golden/*",
        "tests/host/*",
    ),
}


def digest(check: str, root: Path = ROOT) -> str:
    """Return the digest of a check's files, names and contents. Raises FileNotFoundError where a pattern has none."""
    found: set[Path] = set()
    for pattern in FILES[check]:
        files = {path for path in root.glob(pattern) if path.is_file() and "__pycache__" not in path.parts}
        if not files:
            raise FileNotFoundError(f"{check}: no file is named {pattern}; mend FILES of scripts/passed.py")
        found |= files
    hashed = hashlib.sha256()
    for path in sorted(found):
        hashed.update(f"{path.relative_to(root)}\0{hashlib.sha256(_checked(path)).hexdigest()}\n".encode())
    return hashed.hexdigest()


def _checked(path: Path) -> bytes:
    """Return the contents of a file; of a page of the docs, the tables that a command has written into it."""
    if path.suffix != ".md":
        return path.read_bytes()
    return "\n".join(_TABLES.findall(path.read_text(encoding="utf-8"))).encode()


def records(root: Path = ROOT) -> dict[str, dict[str, str]]:
    path = root / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def record(check: str, root: Path = ROOT) -> None:
    """Write that a check has passed on the files that are here."""
    passed = {"on": f"{datetime.date.today()}", "files": digest(check, root)}
    text = json.dumps(records(root) | {check: passed}, indent=1, sort_keys=True)
    (root / RECORD).write_text(text + "\n", encoding="utf-8")


def to_run(root: Path = ROOT) -> list[str]:
    """Return the checks that have no record of these files."""
    known = records(root)
    return [check for check in FILES if known.get(check, {}).get("files") != digest(check, root)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", choices=FILES, metavar="CHECK", help=f"it has passed: {', '.join(FILES)}")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.record)
        return 0
    left, known = to_run(), records()
    for check in FILES:
        if check in left:
            print(check)
        else:
            print(f"{check}: not run, it passed on these files on {known[check]['on']} ({RECORD})", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
