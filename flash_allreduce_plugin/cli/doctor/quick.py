"""The checks of `flash-allreduce doctor` that take a second or two, in one child, without ranks and frameworks.

`flash-allreduce run` uses them before it starts a training.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from flash_allreduce_plugin.cli.doctor import environment, selftest
from flash_allreduce_plugin.cli.doctor.child import OK, PROBLEM, Child, Finding
from flash_allreduce_plugin.cli.doctor.selftest import REPORT_IT

if TYPE_CHECKING:
    from flash_allreduce_plugin.cli.doctor.child import Findings

_SECONDS = 120.0
# Packages whose unsupported version is no problem for a program that does not use them.
_FRAMEWORKS = ("megatron-core", "deepspeed", "apex")


def problems() -> list[Finding]:
    """Return the problems for a program that starts now, in this environment."""
    with tempfile.TemporaryDirectory() as folder, Child(Path(folder), "quick", f"{__name__}:check") as child:
        failure = child.failure(_SECONDS)
        findings = child.findings()
    found = [one for one in findings if _hinders(one)]
    if failure is not None and not found:
        found.append(Finding(selftest.SECTION, "check", PROBLEM, failure, f"`flash-allreduce doctor`; or {REPORT_IT}"))
    return found


def check(report: Findings) -> None:
    """Check versions, libraries, machine, entry point, variables, and the codec, in the child."""
    environment.check(report)
    if "torch" in sys.modules:
        selftest.codec(report)


def _hinders(finding: Finding) -> bool:
    if finding.section == "autoload":  # a note for doctor, which knows other ways to attach; a problem here
        return finding.level != OK
    return finding.level == PROBLEM and finding.name not in _FRAMEWORKS
