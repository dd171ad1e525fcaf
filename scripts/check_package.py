"""What is inside an sdist and a wheel of this checkout, against what is to be: no file more, none less.

    python -m scripts.check_package dist/*.tar.gz dist/*.whl

Of a wheel also its tag, metadata and entry points, and its libraries: what they ask of the system, and that no path of
the machine that compiled them is in them. Needs nm and readelf.
"""

from __future__ import annotations

import argparse
import base64
import email
import email.message
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "flash_allreduce_plugin"
LIBRARY = f"{PACKAGE}/_C.abi3.so"
OPTIONAL = {f"{PACKAGE}/_cuda.so"}  # where there was nvcc
DIST_INFO = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
EGG_INFO = {"PKG-INFO", "SOURCES.txt", "dependency_links.txt", "entry_points.txt", "requires.txt", "top_level.txt"}
OF_SDIST = {"PKG-INFO", "setup.cfg", "setup.py", "pyproject.toml", "MANIFEST.in"}
OF_SDIST |= {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md"}
ENTRY_POINTS = {
    "console_scripts": "flash-allreduce = flash_allreduce_plugin.cli:run",
    "torch.backends": "flash_allreduce = flash_allreduce_plugin.autoload:load",
}
TAG = re.compile(r"cp310-abi3-(linux|manylinux(_\d+_\d+|\d+))_\w+(\.manylinux(_\d+_\d+|\d+)_\w+)*")
# Of the system, of the compiler's run time, and of torch: what a library may be linked to.
LINKED = re.compile(
    r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|c10|torch|torch_cpu|c10_cuda|torch_cuda)\.so(\.\d+)?|ld-linux.*"
)
# As an assertion or a traceback would have it: the place of a source or a library on the machine that compiled.
BUILD_PATH = re.compile(rb"(?<![\w.+@~-])(?:/[\w.+@~-]+){2,}\.(?:h|hpp|cuh|c|cc|cpp|cu|o|so|py)\b")


def modules(root: Path = ROOT) -> set[str]:
    """What of the package both hold."""
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
        info = archive.extractfile(f"{top}/PKG-INFO") if f"{top}/PKG-INFO" in names else None
        metadata = email.message_from_bytes(info.read() if info else b"")
    wanted = {*OF_SDIST, *modules(root), *sources(root), *(f"{PACKAGE}.egg-info/{name}" for name in EGG_INFO)}
    problems = _compared(names, {f"{top}/{name}" for name in wanted}, set())
    problems += [f"{name} is neither a file nor a folder" for name in strange]
    return problems + metadata_problems(metadata, top)


def wheel_problems(path: Path, root: Path = ROOT) -> list[str]:
    name, version, *tag = path.name.removesuffix(".whl").split("-")
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path) as archive:
        files = {entry.filename: archive.read(entry) for entry in archive.infolist() if not entry.is_dir()}
    wanted = {LIBRARY, *modules(root), *(f"{info}/{file}" for file in DIST_INFO)}
    problems = _compared(set(files), wanted, OPTIONAL)
    if not TAG.fullmatch("-".join(tag)):
        problems.append(f"the wheel is tagged {'-'.join(tag)}; expected cp310-abi3 and a Linux")
    metadata = email.message_from_bytes(files.get(f"{info}/METADATA", b""))
    wheel = email.message_from_bytes(files.get(f"{info}/WHEEL", b""))
    said = {f"{python}-{abi}-{platform}" for python, abi, platform in _expanded(wheel.get_all("Tag") or [])}
    if said != {f"{python}-{abi}-{platform}" for python, abi, platform in _expanded(["-".join(tag)])}:
        problems.append(f"WHEEL says {sorted(said)}, the name {'-'.join(tag)}")
    problems += metadata_problems(metadata, f"{name}-{version}")
    problems += _entry_point_problems(files.get(f"{info}/entry_points.txt", b"").decode(), files)
    problems += _record_problems(files, f"{info}/RECORD")
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(name for name in files if name.endswith(".so")):
            library = Path(folder) / Path(file).name
            library.write_bytes(files[file])
            problems += library_problems(library)
    return problems


def metadata_problems(metadata: email.message.Message, named: str) -> list[str]:
    """named: NAME-VERSION, as in the name of the file."""
    problems = []
    version = str(metadata["Version"])
    if f"{PACKAGE}-{version}" != named:
        problems.append(f"the metadata say version {version}, the name {named}")
    expected = {"License-Expression": "Apache-2.0", "License-File": "LICENSE", "Requires-Python": ">=3.10"}
    for key, value in expected.items():
        if metadata[key] != value:
            problems.append(f"the metadata have {key}: {metadata[key]}; expected {value}")
    required = {
        re.split(r"[^\w.-]", text)[0] for text in metadata.get_all("Requires-Dist") or [] if "extra" not in text
    }
    if required != {"torch", "pydantic"}:
        problems.append(f"the metadata require {sorted(required)}; expected pydantic and torch")
    return problems


def library_problems(library: Path) -> list[str]:
    problems = []
    dynamic = _output("readelf", "--dynamic", "--wide", str(library))
    for needed in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic):
        if not LINKED.fullmatch(needed):
            problems.append(f"{library.name} is linked to {needed}")
    for kind, path in re.findall(r"\((RPATH|RUNPATH)\).*\[(.*)\]", dynamic):
        problems.append(f"{library.name} has {kind} {path}")
    undefined = _output("nm", "--dynamic", "--undefined-only", str(library))
    asked = sorted(set(re.findall(r"\bU (_?Py\w+)", undefined)))
    if asked:  # a library of operators alone needs none, so that every Python loads it
        problems.append(f"{library.name} asks for {', '.join(asked[:5])} of Python")
    paths = sorted(set(BUILD_PATH.findall(library.read_bytes())))
    if paths:
        problems.append(
            f"{library.name} has paths of the build in it: {b', '.join(paths[:3]).decode(errors='replace')}"
        )
    return problems


def needs(library: Path) -> dict[str, str]:
    """The newest version of each library's symbols that a library asks for: {"GLIBC": "2.32", ...}."""
    text = _output("readelf", "--version-info", "--wide", str(library))
    newest: dict[str, tuple[int, ...]] = {}
    for name, version in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", text):
        newest[name] = max(newest.get(name, ()), tuple(map(int, version.split("."))))
    return {name: ".".join(map(str, version)) for name, version in sorted(newest.items())}


def needs_of_wheel(path: Path) -> dict[str, dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        return {Path(name).name: needs(Path(archive.extract(name, folder))) for name in libraries}


def _compared(found: set[str], wanted: set[str], optional: set[str]) -> list[str]:
    return [f"{name} is missing" for name in sorted(wanted - found)] + [
        f"{name} does not belong here" for name in sorted(found - wanted - optional)
    ]


def _expanded(tags: list[str]) -> set[tuple[str, str, str]]:
    parts = [tag.split("-") for tag in tags]
    return {(p, a, f) for python, abi, platform in parts for p in python.split(".") for a in abi.split(".")
            for f in platform.split(".")}  # fmt: skip


def _entry_point_problems(text: str, files: dict[str, bytes]) -> list[str]:
    problems = []
    for group, line in ENTRY_POINTS.items():
        if f"[{group}]\n{line}\n" not in text + "\n":
            problems.append(f"entry_points.txt has no {line!r} in [{group}]")
        module, _, function = line.partition(" = ")[2].partition(":")
        file = module.replace(".", "/")
        source = files.get(f"{file}.py") or files.get(f"{file}/__init__.py") or b""
        if f"def {function}(".encode() not in source:
            problems.append(f"the entry point {line!r} leads nowhere")
    return problems


def _record_problems(files: dict[str, bytes], record: str) -> list[str]:
    said = dict(line.split(",")[:2] for line in files.get(record, b"").decode().splitlines())
    problems = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if name != record and said.get(name) != f"sha256={digest}":
            problems.append(f"RECORD does not have {name} as it is")
    return problems


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("archives", nargs="+", type=Path)
    status = 0
    for path in parser.parse_args().archives:
        is_wheel = path.suffix == ".whl"
        problems = wheel_problems(path) if is_wheel else sdist_problems(path)
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, {len(problems) or 'no'} problems")
        print("".join(f"    {problem}\n" for problem in problems), end="")
        for library, newest in needs_of_wheel(path).items() if is_wheel else ():
            print(f"    {library} needs {', '.join(f'{name} {version}' for name, version in newest.items())}")
        status |= bool(problems)
    return status


if __name__ == "__main__":
    sys.exit(main())
