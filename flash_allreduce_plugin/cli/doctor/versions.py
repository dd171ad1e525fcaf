"""Checks of `flash-allreduce doctor`: versions, against the requirements of the installed metadata."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flash_allreduce_plugin.errors import install_command

if TYPE_CHECKING:
    from flash_allreduce_plugin.cli.doctor.child import Findings

PACKAGE = "flash-allreduce-plugin"
INSTALL = install_command()


def ours() -> Any:
    """Return this package."""
    return importlib.import_module("flash_allreduce_plugin")


def own(report: Findings) -> None:
    version, where = ours().__version__, Path(ours().__file__).parent
    try:
        installed = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        report.note(
            PACKAGE,
            f"{version}, {where}: on the path, but not installed",
            f"{INSTALL}: without it torch does not call the entry point, and the supported versions are not known here",
        )
        return
    if installed == version:
        report.ok(PACKAGE, f"{installed}, {where}")
    else:
        report.problem(
            PACKAGE,
            f"{version} is imported, from {where}; installed is {installed}",
            "remove one of the two from the path (PYTHONPATH, or the folder of the started program)",
        )


def python(report: Findings) -> None:
    found = platform.python_version()
    shown = f"{found}, {platform.platform()}, {sys.executable}"
    try:
        window = str(importlib.metadata.metadata(PACKAGE)["Requires-Python"] or "")
    except importlib.metadata.PackageNotFoundError:
        window = ""
    if fits(found, window):
        report.ok("python", shown)
    else:
        report.problem("python", f"{shown} is not supported (supported: {window})", "use another Python")


def of(report: Findings, package: str, module: str) -> None:
    """Check the version of a package against our metadata."""
    window = supported(package)
    said = f"supported: {window}" if window else "supported versions: not in the installed metadata"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        where = _location(module)
        if where is None:
            report.note(package, f"not installed ({said})")
        else:
            report.note(package, f"{where}, of unknown version: on the path, but not installed ({said})")
        return
    if window is None:
        report.note(package, f"{found} ({said})", f"{INSTALL}: the installation is older than the package, or partial")
    elif fits(found, window):
        report.ok(package, f"{found} ({said})")
    else:
        report.problem(package, f"{found} is not supported ({said})", f"pip install '{package}{window}'")


def supported(package: str) -> str | None:
    """Return the versions of a package that our metadata allow, as ">=0.13,<0.20"; None if they do not name it."""
    try:
        requirements = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        match = re.match(r"([\w.-]+)\s*\(?([^;)]*)", requirement)
        if match and match[1].lower().replace("_", "-") == package:
            return ",".join(sorted((part.strip() for part in match[2].split(",")), reverse=True))
    return None


def fits(found: str, window: str) -> bool:
    """Return True if a version is in a window of ">=" and "<".

    A pre-release is below its release, but not below the end of the window.
    """
    release, final = _parsed(found)
    for operator, bound in re.findall(r"(>=|<)\s*([\w.+!]+)", window):
        edge, _ = _parsed(bound)
        size = max(len(release), len(edge))
        one, other = release + (0,) * (size - len(release)), edge + (0,) * (size - len(edge))
        if operator == "<" and one >= other:
            return False
        if operator == ">=" and (one, final) < (other, True):
            return False
    return True


def _parsed(text: str) -> tuple[tuple[int, ...], bool]:
    """Return the numbers of a version, and True for a final one."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    release = tuple(map(int, numbers[0].split("."))) if numbers else (0,)
    return release, re.search(r"\d[.-]?(a|b|rc|dev)", text.partition("+")[0]) is None


def transformer_engine(report: Findings) -> None:
    from flash_allreduce_plugin.integrations.megatron.transformer_engine import WINDOW

    name, window = "transformer-engine", " to ".join(".".join(map(str, end)) for end in WINDOW)
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        where = _location("transformer_engine")
        report.note(name, f"{where}, of unknown version" if where else f"not installed (supported: {window})")
        return
    if WINDOW[0] <= _parsed(found)[0][:2] <= WINDOW[1]:
        report.ok(name, f"{found} (supported: {window})")
    else:
        report.note(
            name,
            f"{found} (supported: {window}); its layers communicate in full precision unless its seams attach",
            "see the seams below",
        )


def apex(report: Findings) -> None:
    """Check apex by its contents: NVIDIA's and AMD's have the version 0.1 always."""
    from flash_allreduce_plugin.integrations import apex as installed

    wrong = installed.missing()
    if wrong is None:
        report.ok("apex", f"NVIDIA's or AMD's, {_location('apex')}")
    elif wrong[0] is installed.Missing.OTHER_PROJECT:
        report.problem("apex", wrong[1], "pip uninstall apex; NVIDIA's is installed from its source")
    else:
        report.note("apex", "not installed" if wrong[0] is installed.Missing.ABSENT else wrong[1])


def _location(module: str) -> str | None:
    """Return the place of a package, or None. Imports its parents only."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return next(iter(spec.submodule_search_locations or ()), spec.origin or module)
