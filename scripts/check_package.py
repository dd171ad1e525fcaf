"""Check an sdist and a wheel of this checkout; `nox -s package` brings the programs.

1. The sdist has the files that it needs, and no other.
2. check-wheel-contents: the wheel has the files of the package, and no other.
3. abi3audit: every Python from 3.10 on can load its libraries. (auditwheel says which Linux can: package.py.)
4. The wheel is tagged so and has the licence, and its libraries have no path of the machine that compiled them.
"""

from __future__ import annotations

import re
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "flash_allreduce_plugin"
EGG_INFO = {"PKG-INFO", "SOURCES.txt", "dependency_links.txt", "entry_points.txt", "requires.txt", "top_level.txt"}
OF_SDIST = {"PKG-INFO", "setup.cfg", "setup.py", "pyproject.toml", "MANIFEST.in"}
OF_SDIST |= {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md"}
# The place of a source or a library on the machine that compiled, as in an assertion or a traceback.
BUILD_PATH = re.compile(rb"(?<![\w.+@~-])(?:/[\w.+@~-]+){2,}\.(?:h|hpp|cuh|c|cc|cpp|cu|o|so|py)\b")


def modules(root: Path = ROOT) -> set[str]:
    """The files of the package in both archives."""
    found = {str(path.relative_to(root)) for path in (root / PACKAGE).rglob("*.py")}
    return found | {f"{PACKAGE}/py.typed"}


def sources(root: Path = ROOT) -> set[str]:
    kinds = {".h", ".cpp", ".cu"}
    return {str(path.relative_to(root)) for path in (root / "csrc").rglob("*") if path.suffix in kinds}


def sdist_problems(path: Path, root: Path = ROOT) -> list[str]:
    top = path.name.removesuffix(".tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name for member in archive.getmembers() if not member.isdir()}
        strange = [m.name for m in archive.getmembers() if not (m.isfile() or m.isdir())]
    files = {*OF_SDIST, *modules(root), *sources(root), *(f"{PACKAGE}.egg-info/{name}" for name in EGG_INFO)}
    wanted = {f"{top}/{name}" for name in files}
    return [
        *(f"{name} is missing" for name in sorted(wanted - names)),
        *(f"{name} does not belong here" for name in sorted(names - wanted)),
        *(f"{name} is neither a file nor a folder" for name in strange),
    ]


def wheel_problems(path: Path, cuda: bool = False) -> list[str]:
    """cuda: the wheel is to have the CUDA library, and the checkout need not."""
    problems = []
    if not re.search(r"-cp310-abi3-(linux|manylinux)\w+(\.manylinux\w+)*\.whl$", path.name):
        problems.append(f"{path.name}: expected the tag cp310-abi3 and a Linux")
    options = ["--no-config", "--toplevel", PACKAGE, "--package", str(ROOT / PACKAGE)]
    options += ["--package-omit", "__pycache__,*.pyc,_cuda.so", *(["--ignore", "W102"] if cuda else [])]
    problems += _complaints("check-wheel-contents", *options, str(path))
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
            problems.append(f"{path.name}: the LICENSE is missing")
        if cuda and f"{PACKAGE}/_cuda.so" not in names:
            problems.append(f"{path.name}: the CUDA library is missing")
        for name in sorted(name for name in names if name.endswith(".so")):
            # abi3audit looks at libraries of this name alone.
            library = Path(folder) / f"{Path(name).name.split('.')[0]}.abi3.so"
            library.write_bytes(archive.read(name))
            problems += _complaints("abi3audit", "--strict", "-v", "--assume-minimum-abi3", "3.10", str(library))
            problems += path_problems(library)
    return problems


def path_problems(library: Path) -> list[str]:
    problems = []
    command = ["readelf", "--dynamic", "--wide", str(library)]
    dynamic = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for kind, path in re.findall(r"\((RPATH|RUNPATH)\).*\[(.*)\]", dynamic):
        problems.append(f"{library.name} has {kind} {path}")
    if paths := sorted(set(BUILD_PATH.findall(library.read_bytes()))):
        named = b", ".join(paths[:3]).decode(errors="replace")
        problems.append(f"{library.name} has paths of the build in it: {named}")
    return problems


def _complaints(*command: str) -> list[str]:
    """Return the output of a program if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    return [done.stdout + done.stderr] if done.returncode else []
