"""Checks of `flash-allreduce doctor`: whether each seam would attach. Nothing is replaced."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flash_allreduce_plugin.cli.doctor.child import described

if TYPE_CHECKING:
    from flash_allreduce_plugin.cli.doctor.child import Findings
    from flash_allreduce_plugin.integrations.patching import Seam


def megatron(report: Findings) -> None:
    """megatron-core's functions and, where Megatron runs with it, Transformer Engine's."""
    report.section("Megatron seams")
    if not _imported(report, "megatron.core", "megatron-core"):
        return
    from flash_allreduce_plugin.config import FlashConfig
    from flash_allreduce_plugin.integrations import megatron as ours
    from flash_allreduce_plugin.integrations.megatron import attention, transformer_engine

    _verify(report, ours.seams(), "pip install a megatron-core of the supported versions; report it if this is one")
    report.section("Transformer Engine seams")
    if importlib.util.find_spec("transformer_engine") is None:
        report.ok("transformer_engine", "not installed, nothing to attach")
        return
    report.doing("importing transformer_engine")
    if not transformer_engine.in_use():
        report.note(
            "transformer_engine",
            "installed, but megatron-core does not use it: nothing to attach",
            "python -c 'import transformer_engine.pytorch' says why, if it should",
        )
        return
    seams = transformer_engine.seams(FlashConfig)  # no call is made
    seams += attention.of_transformer_engine(attention.te_module(), FlashConfig)
    _verify(report, seams, "install a Transformer Engine of the supported versions, or do without its layers")


def deepspeed(report: Findings) -> None:
    report.section("DeepSpeed seams")
    if not _imported(report, "deepspeed", "deepspeed"):
        return
    from flash_allreduce_plugin.integrations.deepspeed import engine

    _verify(report, engine.seams(), "pip install a deepspeed of the supported versions; report it if this is one")


def apex(report: Findings) -> None:
    from flash_allreduce_plugin.integrations import apex as ours

    report.section("apex seams")
    missing = ours.missing()
    if missing is not None:
        report.ok("apex", f"{missing[0].value}, nothing to attach")
    elif _imported(report, "apex", "apex"):
        _verify(report, ours.seams(), "install NVIDIA's apex 23.05 to 25.05, or AMD's")


def _imported(report: Findings, module: str, package: str) -> bool:
    """Import it; says why not. One that is not there is no problem."""
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
    """For a framework that cannot be imported."""
    return f"`python -c 'import {module}'` shows all of it; install it again, or uninstall it if it is not used"


def _verify(report: Findings, seams: Iterable[Seam], mend: str) -> None:
    from flash_allreduce_plugin.integrations.patching import Patchset

    for seam in seams:
        report.doing(f"checking {seam.target}")
        try:
            Patchset("doctor", [seam]).verify()
        except Exception as error:
            report.problem(seam.id, str(error), mend)
        else:
            report.ok(seam.id, "would attach")
