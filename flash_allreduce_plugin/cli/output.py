"""The output of a command: results on stdout, progress and notes on stderr, never mixed.

With `--json -` stdout has the JSON alone, and the text is printed to stderr.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

STDOUT = Path("-")
_BLINK = 0.1  # seconds between two drawings of a bar


class Output:
    """The consoles of one command.

    results: the console of the results. notes: the console on stderr. width: their least number of columns.
    soft_wrap: True to keep longer lines whole. silent: True to print nothing, as a launcher's ranks other than 0 do.
    """

    def __init__(
        self, json_file: Path | None = None, *, width: int = 0, soft_wrap: bool = True, silent: bool = False
    ) -> None:
        self.json_file, self.silent, self._soft_wrap = json_file, silent, soft_wrap
        self.results = self._console(stderr=json_file == STDOUT, width=width)
        self.notes = self._console(stderr=True, width=width)

    def _console(self, stderr: bool, width: int) -> Console:
        width = max(Console(stderr=stderr).width, width)
        return Console(stderr=stderr, width=width, highlight=False, soft_wrap=self._soft_wrap, quiet=self.silent)

    def note(self, text: str) -> None:
        """Print a line on stderr."""
        self.notes.print(text, markup=False, soft_wrap=True)

    def write_json(self, content: dict[str, Any]) -> None:
        """Write to the file of --json, if one was given. Raises OSError if it cannot be written."""
        if self.json_file is None or self.silent:
            return
        text = json.dumps(content, indent=1) + "\n"
        if self.json_file == STDOUT:
            sys.stdout.write(text)
        else:
            self.json_file.write_text(text, encoding="utf-8")

    @contextlib.contextmanager
    def progress(self, every: float) -> Iterator[Doing]:
        """Show progress: a bar on a terminal, else a line on stderr after `every` seconds of silence."""
        # On a terminal with the results too, the bar belongs to their console, which keeps the two apart.
        console = self.results if self.results.is_terminal else self.notes
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            auto_refresh=False,  # another thread would take cores from the ranks
            redirect_stdout=False,
        )
        if self.silent or not console.is_terminal:
            yield Doing(None if self.silent else self.notes, None, every)
            return
        with bar:
            yield Doing(None, bar, every)


class Doing:
    """The progress of a command; see Output.progress."""

    def __init__(self, lines: Console | None, bar: Progress | None, every: float) -> None:
        self._lines, self._bar, self._every = lines, bar, every
        self._task = bar.add_task("starting", total=None) if bar else None
        self._doing = ""
        self.heard()

    def heard(self) -> None:
        """Note that a result was printed: no line of progress is needed for a while."""
        self._last = time.monotonic()

    def __call__(self, doing: str, done: float | None = None, of: float | None = None, more: str = "") -> None:
        """Show the progress. more: text for a line, in place of the bar."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=of, description=doing)
            if time.monotonic() - self._last >= _BLINK or doing != self._doing:
                self._bar.refresh()
                self._doing = doing
                self.heard()
        elif self._lines is not None and time.monotonic() - self._last >= self._every:
            self._lines.print(f"# {doing}{': ' * bool(more)}{more}", markup=False)
            self.heard()
