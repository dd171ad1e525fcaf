"""Checks of `flash-allreduce doctor`: verify the seams of every row of the registry. Nothing is replaced."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flash_allreduce_plugin.cli.doctor.child import described
from flash_allreduce_plugin.integrations import registry

if TYPE_CHECKING:
    from flash_allreduce_plugin.cli.doctor.child import Findings
    from flash_allreduce_plugin.integrations.patching import Seam


def packages() -> dict[str, list[registry.Row]]:
    """Return the registry's rows by package. `doctor` runs one check a package."""
    found: dict[str, list[registry.Row]] = {}
    for row in registry.ROWS:
        found.setdefault(row.package, []).append(row)
    return found


def section(package: str) -> str:
    """Return the title of a package's findings."""
    rows = packages()[package]
    return f"{package if len(rows) > 1 else rows[0].title.removeprefix('fap.')} seams"


def check(report: Findings, package: str) -> None:
    """Import a package and verify every seam of its integrations. One that is not installed is no problem."""
    report.section(section(package))
    rows = packages()[package]
    if package == "apex" and not _is_apex(report):
        return
    for row in rows:
        if not _imported(report, row.probe, package):
            return
        seams = importlib.import_module(row.module).seams()
        _verify(report, seams, f"install {row.fits}; report it if this is one", None if len(rows) == 1 else row.name)
    if package == "megatron-core":
        _transformer_engine(report)


def _is_apex(report: Findings) -> bool:
    """Return True if the apex that is found has apex.parallel."""
    from flash_allreduce_plugin.integrations import apex

    missing = apex.missing()
    if missing is not None:
        report.ok("apex", f"{missing[0].value}, nothing to attach")
    return missing is None


def _transformer_engine(report: Findings) -> None:
    """Verify the seams of Transformer Engine where Megatron runs with it."""
    from flash_allreduce_plugin.config import FlashConfig
    from flash_allreduce_plugin.integrations.megatron import attention, transformer_engine

    report.section("Transformer Engine seams")
    if importlib.util.find_spec("transformer_engine") is None:
        report.ok("transformer_engine", "not installed, nothing to attach")
        return
    report.doing("importing transformer_engine")
    if not transformer_engine.in_use():
        report.note(
            "transformer_engine",
            "installed, but megatron-core does not use it: nothing to attach",
            "python -c 'import transformer_engine.pytorch' shows why, if Megatron should use it",
        )
        return
    seams = transformer_engine.seams(FlashConfig)  # no call is made
    seams += attention.of_transformer_engine(attention.te_module(), FlashConfig)
    _verify(report, seams, "install a Transformer Engine of the supported versions, or do without its layers")


def _imported(report: Findings, module: str, package: str) -> bool:
    """Import a module, and report a failure. A missing module is no problem."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # not even a parent package
        found = None
    except Exception as error:
        report.problem(package, f"looking for {module} failed: {described(error)}", remedy(module))
        return False
    if found is None:
        report.ok(package, "not installed, nothing to attach")
        return False
    report.doing(f"importing {module}")
    try:
        importlib.import_module(module)
    except BaseException as error:  # SystemExit too
        report.problem(package, f"import {module} failed: {described(error)}", remedy(module))
        return False
    return True


def remedy(module: str) -> str:
    """Return the remedy for a framework that cannot be imported."""
    return f"`python -c 'import {module}'` shows the traceback; reinstall the package, or uninstall it if it is unused"


def _verify(report: Findings, seams: Sequence[Seam], mend: str, together: str | None = None) -> None:
    """Write a line for each seam, or one with this name for all that fit."""
    from flash_allreduce_plugin.integrations.patching import Patchset

    fit = 0
    for seam in seams:
        report.doing(f"checking {seam.target}")
        try:
            Patchset("doctor", [seam]).verify()
        except Exception as error:
            report.problem(seam.id, str(error), mend)
        else:
            fit += 1
            if together is None:
                report.ok(seam.id, "would attach")
    if together is not None and fit:
        report.ok(together, f"{fit} of {len(seams)} seams would attach")
