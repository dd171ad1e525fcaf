"""Releases of other packages, for the checks of seams: pip lists and downloads them, and never installs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping

#: The text of a file of a release, by its path.
Read = Callable[[str], str]
Number = tuple[int, ...]


class Unavailable(Exception):
    """A release that pip does not give us."""


def pip(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """environment: variables for pip besides those of this process."""
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, **(environment or {})},
    )


def final(package: str, supported: Callable[[Number], bool], below: Number) -> list[str]:
    """Return the final releases of a package that are supported, oldest first. Raises Unavailable.

    below: the end of the window. Newer releases are printed in a line.
    """
    listing = pip("index", "versions", package, "--ignore-requires-python")
    line = re.search(r"^Available versions: (.*)$", listing.stdout, re.MULTILINE)
    if line is None:
        raise Unavailable(f"pip does not list the releases of {package}: {listing.stderr.strip()}")
    numbers = [tuple(map(int, n.split("."))) for n in line[1].split(", ") if re.fullmatch(r"[\d.]+", n)]
    newer = [".".join(map(str, number)) for number in sorted(numbers) if number >= below]
    if newer:
        print(f"{package} {', '.join(newer)}: newer than the window, which ends below {'.'.join(map(str, below))}")
    return [".".join(map(str, number)) for number in sorted(numbers) if supported(number)]


def check(
    names: Callable[[], Iterable[str]],
    problems: Callable[[str], list[str]],
    total: int,
    things: str,
    sources: Callable[[str], dict[str, str]] | None = None,
) -> int:
    """Print the problems of each release or folder. Return the exit status: 0, 1, or 2 if one is unavailable.

    Args:
        problems: one line for each of the `total` things that does not fit.
        sources: the text of each thing by its name. A line has the names of those that differ from the last release.
    """
    status = 0
    last: tuple[str, dict[str, str]] | None = None
    try:
        for name in names():
            found = problems(name)
            print(f"{name:>8}  {total - len(found)} of {total} {things}", flush=True)
            for problem in found:
                print(f"          {problem}", flush=True)
            if sources is not None:
                last = name, _moved(sources(name), last)
            status = status or int(bool(found))
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 2
    return status


def _moved(now: dict[str, str], last: tuple[str, dict[str, str]] | None) -> dict[str, str]:
    """Print the names of the texts that differ from the last release, in a line. Return `now`."""
    if last is not None:
        moved = [name for name, text in now.items() if text != last[1].get(name)]
        print(f"          moved since {last[0]}: {', '.join(moved) or 'nothing'}", flush=True)
    return now
