"""Check every function that is replaced against the published sources of DeepSpeed.

    python -m scripts.check_deepspeed_versions                    # every release of the supported window
    python -m scripts.check_deepspeed_versions 0.17.6 0.19.8      # these releases
    python -m scripts.check_deepspeed_versions path/to/folder     # a checkout or site-packages that holds deepspeed/

Sources are downloaded with pip, which asks their setup.py for the release's name, and are then read, never installed.
The checks are those of attaching in a running process: the symbol, its parameters, and the call that is replaced.

Exit status: 0 if every release fits, 1 if one does not, 2 if a release could not be had.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

from flash_allreduce_plugin.integrations.deepspeed import engine
from flash_allreduce_plugin.integrations.patching import Seam
from scripts import check_megatron_versions as sources
from scripts.releases import Read, Unavailable, check, final, pip

HIDING = re.compile(r"@(instrument_w_nvtx|compiler\.(lazy_)?disable)$", re.MULTILINE)
FIRST, BELOW = (0, 17, 6), (0, 20)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", nargs="*", help="releases, or folders that hold deepspeed/; default: the window")
    parser.add_argument("--archives", type=Path, help="folder where downloaded sources are kept and looked for")
    options = parser.parse_args(arguments)
    seams = engine.seams()
    with tempfile.TemporaryDirectory() as scratch:
        archives = options.archives or Path(scratch)
        return check(
            lambda: options.what or releases(),
            lambda what: problems(reader(what, archives), seams),
            len(seams),
            "functions",
            lambda what: sources.texts(reader(what, archives), spelled(seams)),
        )


def problems(read: Read, seams: list[Seam]) -> list[str]:
    """One line for each function that does not fit the sources."""
    # Without decorators, which hide the function.
    return sources.problems(lambda path: HIDING.sub("", read(path)), spelled(seams))


def spelled(seams: list[Seam]) -> list[Seam]:
    """The seams with their names as the source spells them: not mangled yet."""
    return [replace(seam, attribute=re.sub(r"\._[A-Za-z]\w*?(?=__)", ".", seam.attribute)) for seam in seams]


def reader(what: str, archives: Path) -> Read:
    """How to read a file of a release (downloaded if it is not in `archives`) or of a folder."""
    if not re.fullmatch(r"\d+(\.\d+)+\w*", what):
        if not (Path(what) / "deepspeed").is_dir():
            raise Unavailable(f"{what} is neither a release nor a folder that holds deepspeed/")
        return lambda path: (Path(what) / path).read_text(encoding="utf-8")
    archive = tarfile.open(source(what, archives))  # noqa: SIM115

    def read(path: str) -> str:
        file = archive.extractfile(f"deepspeed-{what}/{path}")
        assert file is not None
        return file.read().decode()

    return read


def source(release: str, archives: Path) -> Path:
    """The source archive of a release."""
    path = archives / f"deepspeed-{release}.tar.gz"
    if not path.exists():
        command = ["download", "--quiet", "--no-deps", "--no-binary=:all:", "--no-build-isolation"]
        output = pip(*command, "--dest", str(archives), f"deepspeed=={release}", environment={"DS_BUILD_OPS": "0"})
        if not path.exists():
            raise Unavailable(f"deepspeed {release}: pip finds no source ({output.stderr.strip().splitlines()[-1:]})")
    return path


def releases() -> list[str]:
    """Every final release of the window, oldest first."""
    return final("deepspeed", lambda number: FIRST <= number < BELOW, BELOW)


if __name__ == "__main__":
    sys.exit(main())
