"""Releases of other packages, for the checks of seams against them: what pip lists and downloads, never installs."""

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
    """environment: variables for pip beside those of this process."""
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, **(environment or {})},
    )


def final(package: str, supported: Callable[[Number], bool]) -> list[str]:
    """The final releases of a package that are supported, oldest first. Raises Unavailable."""
    listing = pip("index", "versions", package, "--ignore-requires-python")
    line = re.search(r"^Available versions: (.*)$", listing.stdout, re.MULTILINE)
    if line is None:
        raise Unavailable(f"pip does not list the releases of {package}: {listing.stderr.strip()}")
    numbers = [tuple(map(int, n.split("."))) for n in line[1].split(", ") if re.fullmatch(r"[\d.]+", n)]
    return [".".join(map(str, number)) for number in sorted(numbers) if supported(number)]


def check(names: Callable[[], Iterable[str]], problems: Callable[[str], list[str]], total: int, things: str) -> int:
    """Print what does not fit each release or folder. Returns the exit status: 0, 1, or 2 if one is unavailable.

    problems: one line for each of the `total` things that does not fit.
    """
    status = 0
    try:
        for name in names():
            found = problems(name)
            print(f"{name:>8}  {total - len(found)} of {total} {things}", flush=True)
            for problem in found:
                print(f"          {problem}", flush=True)
            status = status or int(bool(found))
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 2
    return status
