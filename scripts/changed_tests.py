"""Names the tests of the files that differ from main, and the gates: `make test-changed` runs them.

python -m scripts.changed_tests            one path a line
python -m scripts.changed_tests --base v1  against another commit
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GATES = ("tests/test_layering.py", "tests/test_house.py", "tests/test_docs.py")
#: The tests of files that no test is named for.
OF_FOLDERS = {
    "csrc/cuda/": ("tests/codec/test_codec_warp.py", "tests/collectives/test_two_shot.py"),
    "csrc/": ("tests/codec",),
    "examples/": ("tests/test_examples.py",),
    "patches/": (
        "tests/integrations/megatron/test_patches.py",
        "tests/integrations/deepspeed/test_deepspeed_patches.py",
    ),
    "flash_allreduce_plugin/cli/": ("tests/cli/test_main.py",),
    "flash_allreduce_plugin/integrations/": ("tests/integrations/test_registry.py", "tests/integrations/test_undo.py"),
}


def changed(base: str) -> list[str]:
    """Return the files that differ from where this branch left `base`, uncommitted and untracked ones too."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
        return done.stdout.split()

    try:
        [left] = git("merge-base", "HEAD", base)
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"{base} is no commit of this repository; fetch it, or name another one. git says: {error.stderr.strip()}"
        )
    return sorted({*git("diff", "--name-only", left), *git("ls-files", "--others", "--exclude-standard")})


def tests_of(path: str, tests: Iterable[str]) -> set[str]:
    """Return the tests of one file: those of its name, else of its folder. tests: all files of tests."""
    if Path(path).name.startswith("test_") and path.endswith(".py"):
        return {path} & set(tests)
    parts = Path(path).with_suffix("").parts
    found = {test for test in tests if Path(test).stem in {f"test_{part}" for part in parts[1:]}}
    folder = Path("tests", *parts[1:-1])
    if not found and parts[0] == "flash_allreduce_plugin" and folder != Path("tests"):
        found = {str(folder)} if (ROOT / folder).is_dir() else set()
    for folder, its in OF_FOLDERS.items():
        if path.startswith(folder):
            found.update(its)
            break
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the tests, the gates first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main", help="a branch or commit (default main)")
    base = parser.parse_args(arguments).base
    tests = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    found = set().union(*(tests_of(path, tests) for path in changed(base)))
    print("\n".join([*GATES, *sorted(found - set(GATES))]))


if __name__ == "__main__":
    main()
