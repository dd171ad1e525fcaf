"""The child processes of `flash-allreduce doctor`: an import that fails, hangs or crashes becomes a line of the report.

A child writes its findings to a file, one line of JSON each, as it runs. Its output is kept in another file.

    python -c BOOTSTRAP <sys.path> <results> <module:function> [argument ...]
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OK, NOTE, PROBLEM = "ok", "note", "problem"

# A child has the sys.path of this process, for any working folder.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from flash_allreduce_plugin.cli.doctor.child import serve; serve(*sys.argv[1:])"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. remedy: how to mend a problem; every problem has one."""

    section: str
    name: str
    level: str
    text: str
    remedy: str = ""


class Findings:
    """The file in which a check, in its child, writes its findings and its present step."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._section = ""

    def section(self, name: str) -> None:
        """Start a section: later findings belong to it."""
        self._section = name

    def doing(self, what: str) -> None:
        """Name the present step. The report has the name if the child does not survive the step."""
        self._write({"doing": what})

    def ok(self, name: str, text: str) -> None:
        self._find(name, OK, text)

    def note(self, name: str, text: str, remedy: str = "") -> None:
        self._find(name, NOTE, text, remedy)

    def problem(self, name: str, text: str, remedy: str) -> None:
        self._find(name, PROBLEM, text, remedy)

    def result(self, **values: Any) -> None:
        """Send values to the parent."""
        self._write({"result": values})

    def failed(self, error: BaseException) -> None:
        """Write the exception that ended the check."""
        self._write({"error": described(error)})

    def _find(self, name: str, level: str, text: str, remedy: str = "") -> None:
        found = Finding(self._section, name, level, " ".join(text.split()), remedy)
        self._write({"finding": asdict(found)})

    def _write(self, line: Mapping[str, Any]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def described(error: BaseException) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class Child:
    """A check in a child process; a context manager that leaves no process behind."""

    def __init__(
        self, folder: Path, name: str, check: str, *arguments: str, environment: Mapping[str, str | None] | None = None
    ) -> None:
        """Start the child. folder: of its files. check: "module:function", called with a Findings and the arguments.

        environment: changes of this process's environment; None removes a variable.
        """
        self._results, self._printed = folder / f"{name}.results", folder / f"{name}.output"
        changed = {**os.environ, **(environment or {})}
        with self._printed.open("wb") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), str(self._results), check, *arguments],
                stdin=subprocess.PIPE,  # closed when this process ends, which the child notices
                stdout=printed,
                stderr=printed,
                env={key: value for key, value in changed.items() if value is not None},
                start_new_session=True,  # Ctrl-C reaches this process only; the child's processes end with it
            )
        self._started = time.monotonic()

    def failure(self, seconds: float) -> str | None:
        """Wait up to `seconds` for the child's end, and return its failure or None."""
        try:
            status = self._process.wait(max(0.0, self._started + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"not finished after {seconds:g} s ({self.doing()})"
        return self._ending(status)

    def failure_so_far(self) -> str | None:
        """Return the failure of a child that has ended, or None."""
        status = self._process.poll()
        return None if status is None else self._ending(status)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def findings(self) -> list[Finding]:
        return [Finding(**line["finding"]) for line in self._lines() if "finding" in line]

    def results(self) -> list[dict[str, Any]]:
        return [line["result"] for line in self._lines() if "result" in line]

    def stop(self) -> None:
        """Kill the child and its processes."""
        if self.running:  # not reaped, so its process number is not reused
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ending(self, status: int) -> str | None:
        if status == 0:
            return None
        error = next((line["error"] for line in self._lines() if "error" in line), None)
        if error is not None:
            return f"failed ({self.doing()}): {error}"
        how = f"exit status {status}"
        if status < 0:
            known = {number.value: number.name for number in signal.Signals}
            how = f"signal {known.get(-status, -status)}"
        said = self._printed.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = f": {said[-1].strip()}" if said else ""
        return f"ended with {how} ({self.doing()}){last}"

    def doing(self) -> str:
        """Return the child's last step."""
        return next((line["doing"] for line in reversed(self._lines()) if "doing" in line), "starting")

    def _lines(self) -> list[dict[str, Any]]:
        if not self._results.exists():
            return []
        whole = self._results.read_text(encoding="utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


@contextlib.contextmanager
def children(started: Sequence[Child]) -> Iterator[Sequence[Child]]:
    """Stop all children at the end of the block, with those that the block has added."""
    with contextlib.ExitStack() as stack:
        try:
            yield started
        finally:
            for child in started:
                stack.callback(child.stop)


def serve(results: str, check: str, *arguments: str) -> None:
    """Run a check in the child."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    module, _, function = check.partition(":")
    report = Findings(results)
    status = 0
    try:
        getattr(importlib.import_module(module), function)(report, *arguments)
    except BaseException as error:
        traceback.print_exc()
        report.failed(error)
        status = 1
    sys.stdout.flush()
    os._exit(status)  # frameworks have threads and exit handlers


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.killpg(os.getpid(), signal.SIGKILL)
