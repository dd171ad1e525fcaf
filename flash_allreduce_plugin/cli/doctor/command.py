"""`flash-allreduce doctor`: runs the checks, prints their findings and writes them to a file."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.cli import launch
from flash_allreduce_plugin.cli.doctor import frameworks, selftest, versions
from flash_allreduce_plugin.cli.doctor.child import NOTE, OK, PROBLEM, Child, Finding, children
from flash_allreduce_plugin.cli.doctor.selftest import REPORT_IT
from flash_allreduce_plugin.cli.output import Output

WIDTH = 100
_INDENT = 11
_STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}
_HERE = "flash_allreduce_plugin.cli"
_BEGIN = (
    "FLASH_ALLREDUCE_ATTACH=all FLASH_ALLREDUCE_PRESET=int8 FLASH_ALLREDUCE_ENABLED=auto torchrun ... ; with flags, "
    '--flash-allreduce-preset int8 --flash-allreduce-enabled auto; in JSON, {"preset": "int8", "enabled": "auto"}'
)
_UNEXPECTED = f"mend the problems above first; if there are none, {REPORT_IT}"


def run_doctor(*, ranks: int, seconds: float, json_file: Path | None) -> bool:
    """Check everything, print the findings and write them to json_file. Return True without a problem.

    ranks: of the self-test. seconds: time limit of each check.
    """
    output = Output(json_file)
    when = datetime.now(timezone.utc)
    output.results.print(f"flash-allreduce doctor, {when:%Y-%m-%d %H:%M} UTC")
    found: list[Finding] = []
    with (
        launch.ending_on_signals(),
        output.progress(every=0) as progress,
        tempfile.TemporaryDirectory() as scratch,
    ):
        for doing, findings in _checks(Path(scratch), ranks, seconds):
            if findings:
                found += findings
                _show(output.results, findings)
            if doing:
                progress(doing)
    problems, notes = (sum(finding.level == level for finding in found) for level in (PROBLEM, NOTE))
    output.results.print(f"\n{_counted(problems, 'problem')}, {_counted(notes, 'note')}")
    if not problems:
        output.results.print("\n".join(_wrapped(_BEGIN, "To begin: ", 10)))
    output.write_json(
        {
            "version": versions.ours().__version__,
            "time": when.isoformat(timespec="seconds"),
            "problems": problems,
            "notes": notes,
            "findings": [asdict(finding) for finding in found],
        }
    )
    return problems == 0


def _checks(folder: Path, ranks: int, seconds: float) -> Iterator[tuple[str, list[Finding]]]:
    """Yield the next step and the findings so far."""
    yield "importing torch", []
    with Child(folder, "environment", f"{_HERE}.doctor.environment:check") as checked:
        findings = _outcome(checked, "versions", seconds)
    has_torch = not any((finding.section, finding.name) == ("torch", "import") for finding in findings)
    yield "importing the frameworks", findings
    if not has_torch:
        return
    # The entry point would replace DeepSpeed's constructor, which doctor checks.
    off: dict[str, str | None] = {environment.AUTOLOAD: "0"}
    packages = frameworks.packages()
    attached = [
        Child(folder, package, f"{_HERE}.doctor.frameworks:check", package, environment=off) for package in packages
    ]
    with children(attached):
        for package, child in zip(packages, attached, strict=True):
            remedy = frameworks.remedy(packages[package][0].probe)
            findings = _outcome(child, frameworks.section(package), seconds, remedy)
            yield "importing the frameworks", findings
    yield "testing the codec", []
    plain = selftest.plain_environment()
    with Child(folder, "codec", f"{_HERE}.doctor.selftest:codec", environment=plain) as codec:
        findings = _outcome(codec, selftest.SECTION, seconds)
    yield f"reducing over {ranks} ranks", []
    yield "", [*findings, *selftest.all_reduce(folder, ranks, seconds)]


def _outcome(child: Child, section: str, seconds: float, remedy: str = _UNEXPECTED) -> list[Finding]:
    """Return the findings of a check, with a problem if it did not finish."""
    failure = child.failure(seconds)
    findings = child.findings()
    if failure is not None:
        section = findings[-1].section if findings else section
        if child.running:
            remedy += "; on a slow machine or file system raise --timeout SECONDS"
        findings.append(Finding(section, "check", PROBLEM, failure, remedy))
    return findings


def _show(console: Console, findings: list[Finding]) -> None:
    for section in dict.fromkeys(finding.section for finding in findings):
        lines = [finding for finding in findings if finding.section == section]
        width = min(max(len(finding.name) for finding in lines), 44)
        hang = width + 2 if width <= 30 else 0
        console.print(f"\n{section}", markup=False)
        for finding in lines:
            first, *rest = _wrapped(f"{finding.name:<{width}}  {finding.text}", "", hang)
            if finding.remedy:
                rest += _wrapped(f"-> {finding.remedy}", " " * hang, hang + 3)
            console.print(Text.assemble((f"  {finding.level:<{_INDENT - 2}}", _STYLES[finding.level]), first))
            for line in rest:
                console.print(" " * _INDENT + line, markup=False)


def _wrapped(text: str, first: str, hang: int) -> list[str]:
    """Return lines that fit the width. Lines after the first are indented by `hang` more."""
    # A path is not broken.
    wrapper = textwrap.TextWrapper(WIDTH - _INDENT, first, " " * hang, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
