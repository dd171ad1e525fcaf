"""The checks of `flash-allreduce doctor` that take a second or two, in one child: no ranks, no framework is imported.

For `flash-allreduce run`, before it starts a training.
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
# Of another version than is supported, which says nothing about a program that does not use them.
_FRAMEWORKS = ("megatron-core", "deepspeed", "apex")


def problems() -> list[Finding]:
    """What keeps a program that is started now, in this environment, from being served."""
    with tempfile.TemporaryDirectory() as folder, Child(Path(folder), "quick", f"{__name__}:check") as child:
        failure = child.failure(_SECONDS)
        findings = child.findings()
    found = [one for one in findings if _hinders(one)]
    if failure is not None and not found:
        found.append(Finding(selftest.SECTION, "check", PROBLEM, failure, f"`flash-allreduce doctor`; or {REPORT_IT}"))
    return found


def check(report: Findings) -> None:
    """In the child: versions, libraries, machine, entry point, variables, and the codec."""
    environment.check(report)
    if "torch" in sys.modules:
        selftest.codec(report)


def _hinders(finding: Finding) -> bool:
    if finding.section == "autoload":  # for doctor a note: there are other ways to attach, but not here
        return finding.level != OK
    return finding.level == PROBLEM and finding.name not in _FRAMEWORKS
