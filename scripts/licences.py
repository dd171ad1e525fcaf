"""The licences of what the package depends on, from the installed metadata: the table of docs/trust/releases.md.

    python -m scripts.licences            # print it
    python -m scripts.licences --write    # put it into docs/trust/releases.md

Of a package that is not installed the row that the document has is kept, and those of what it brings.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from scripts.environments import canonical, closure, found

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # mypy, of the dev extra, brings it there

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "trust" / "releases.md"
BEGIN, END = "<!-- licences -->", "<!-- end of licences -->"
HEADER = ("package", "of", "licence, as its metadata say", "version")
BROUGHT = ("licence", "packages that these bring (by which)")


def declared() -> dict[str, str]:
    """What pyproject.toml asks for: package -> where it does, "always", the name of an extra, or "build"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras: dict[str, list[str]] = project["project"]["optional-dependencies"]
    groups = {"always": project["project"]["dependencies"], **extras, "build": project["build-system"]["requires"]}
    places: dict[str, str] = {}
    for group, requirements in groups.items():
        for requirement in requirements:
            places.setdefault(canonical(Requirement(requirement).name), group)
    return places


def licence(metadata: Any) -> str:
    """SPDX where the package says so, else its classifiers and the field of old."""
    if metadata["License-Expression"]:
        return str(metadata["License-Expression"])
    classifiers = [c.split(" :: ")[-1] for c in metadata.get_all("Classifier") or [] if c.startswith("License :: OSI")]
    field = " ".join((metadata["License"] or "").split())
    short = [field] if field and len(field) <= 40 else []
    said = list(dict.fromkeys([*classifiers, *(text for text in short if text not in " ".join(classifiers))]))
    return "; ".join(said) or "not said"


def rows(kept: dict[str, list[str]]) -> list[list[str]]:
    """A row a package: ours first, then what they bring. kept: rows for packages that are not installed here."""
    places = declared()
    needed = closure(places)
    before = {name: set(row[1].removeprefix("of ").split(", ")) for name, row in kept.items() if name not in places}
    for _ in before:  # what brings it may itself be brought by one that is not here
        absent = {name for name in needed if found(name) is None}
        for name, askers in before.items():
            if askers & absent:
                needed.setdefault(name, set()).update(askers & absent)
    table = []
    for name in sorted(needed, key=lambda name: (list(places).index(name) if name in places else len(places), name)):
        installed = found(name)
        place = places.get(name) or f"of {', '.join(sorted(needed[name]))}"
        if installed is not None:
            table.append([name, place, licence(installed.metadata), installed.version])
        else:
            table.append(kept.get(name, [name, place, "not installed here", ""]))
    return table


def read(document: str) -> dict[str, list[str]]:
    """The rows that a document has, by package; of what the dependencies bring it has no versions."""
    block = document.partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in block.splitlines() if line[:1] == "|" and not line.startswith("| ---")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    table = [row for row in cells if len(row) == len(HEADER)][1:]
    for said, packages in [row for row in cells if len(row) == len(BROUGHT)][1:]:
        table += [[name, f"of {askers}", said, ""] for name, askers in re.findall(r"(\S+) \((.*?)\)", packages)]
    return {row[0]: row for row in table}


def text(table: list[list[str]]) -> str:
    """Two tables: a row a dependency, and a row a licence with the packages that the dependencies bring."""
    ours = [row for row in table if not row[1].startswith("of ")]
    brought: dict[str, list[str]] = {}
    for name, place, said, _ in table:
        if place.startswith("of "):
            brought.setdefault(said, []).append(f"{name} ({place.removeprefix('of ')})")
    theirs = [[said, ", ".join(packages)] for said, packages in sorted(brought.items())]
    parts = ([HEADER, ("---",) * len(HEADER), *ours], [BROUGHT, ("---",) * len(BROUGHT), *theirs])
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in part) for part in parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"into {DOCUMENT.relative_to(ROOT)}")
    arguments = parser.parse_args()
    document = DOCUMENT.read_text(encoding="utf-8")
    table = text(rows(read(document)))
    if arguments.write:
        pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
        DOCUMENT.write_text(pattern.sub(lambda _: f"{BEGIN}\n{table}\n{END}", document), encoding="utf-8")
    else:
        print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
