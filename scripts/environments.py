"""Virtual environments for installing the package, and commands that run in them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

#: Programs that compile; none of them is to be found where a wheel is tested.
COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "clang++", "nvcc", "ninja")
# Variables that a command of the environment inherits: those of pip and the network, none of this interpreter.
_INHERITED = re.compile(r"PIP_\w+|\w*_proxy|\w*_PROXY|SSL_\w+|REQUESTS_CA_BUNDLE|LANG|LC_\w+|TMPDIR|HOME|USER|TERM")


class CommandFailed(RuntimeError):
    """A command of an environment failed. The message has its output."""


def closure(roots: Iterable[str]) -> dict[str, set[str]]:
    """The packages that `roots` are and require here, each with those that require it. Requirements as in metadata.

    A package that is not installed is in it and has no requirements.
    """
    needed: dict[str, set[str]] = {}
    queue = [(Requirement(root), "") for root in roots]
    seen = set()
    while queue:
        requirement, asker = queue.pop()
        name = canonical(requirement.name)
        needed.setdefault(name, set()).update({asker} - {""})
        extras = ("", *sorted(requirement.extras))
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        installed = found(name)
        for text in (installed.requires or []) if installed else []:
            wanted = Requirement(text)
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
                queue.append((wanted, name))
    return needed


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def found(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


class Environment:
    """A new virtual environment with nothing in it; pip is this interpreter's.

    python: the interpreter it is made with. compiler: False: commands find nothing but the environment's own programs.
    """

    def __init__(self, folder: Path, python: str = sys.executable, *, compiler: bool = True) -> None:
        self.folder = folder.resolve()
        shutil.rmtree(self.folder, ignore_errors=True)
        _checked([python, "-m", "venv", "--without-pip", str(self.folder / "venv")], env=dict(os.environ))
        self.bin = self.folder / "venv" / "bin"
        self._compiler = compiler
        self.empty = self.folder / "empty"  # where commands run: nothing to be imported by accident
        self.empty.mkdir()
        self.site = Path(self.python("import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        if not compiler:
            there = [name for name in COMPILERS if shutil.which(name, path=str(self.bin))]
            assert not there, f"{there} in {self.bin}"

    def lend(self, *roots: str) -> None:
        """Link packages of this interpreter, with all that they require, into the environment: torch is not downloaded
        again, and nothing else of this interpreter's is there."""
        for name in closure(roots):
            installed = found(name)
            if installed is None:
                raise CommandFailed(f"{name} is not installed here, and {', '.join(roots)} needs it")
            base = Path(str(installed.locate_file("")))
            for top in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
                if (base / top).exists() and not (self.site / top).exists():
                    (self.site / top).symlink_to(base / top)

    def run(
        self, *command: str, timeout: float = 600, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        """Return the output of a program of the environment. Raises CommandFailed."""
        return self._checked([str(self.bin / command[0]), *command[1:]], timeout, cwd, env)

    def python(self, script: str, *arguments: str, timeout: float = 600) -> str:
        return self.run("python", "-c", script, *arguments, timeout=timeout)

    def pip(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        command = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), *arguments]
        return self._checked(command, 1800, None, env)

    def install(self, *requirements: str, env: Mapping[str, str] | None = None) -> None:
        """Options of pip's among them. Python compiles the modules that are imported, and no others."""
        self.pip("install", "--quiet", "--no-compile", *requirements, env=env)

    def _checked(self, command: list[str], timeout: float, cwd: Path | None, env: Mapping[str, str] | None) -> str:
        variables = {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}
        path = str(self.bin) + (f"{os.pathsep}{os.environ['PATH']}" if self._compiler else "")
        variables |= {"PATH": path, "VIRTUAL_ENV": str(self.bin.parent), **(env or {})}
        return _checked(command, env=variables, cwd=cwd or self.empty, timeout=timeout)


def _checked(command: list[str], env: Mapping[str, str], cwd: Path | None = None, timeout: float | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        raise CommandFailed(f"{' '.join(command)}: not finished after {timeout:g} s\n{printed[-4000:]}") from error
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-8000:]}")
    return done.stdout
