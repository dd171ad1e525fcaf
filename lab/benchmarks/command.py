"""The command line of a benchmark: its options with --json, and the facts about the run in the results."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flash_allreduce_plugin.cli import machine
from lab.benchmarks.results import write_json

#: Writes the results to the file of --json, if there is one. Results that are an object also get `about`.
Keep = Callable[[Any], None]


def main(
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    measure: Callable[[argparse.Namespace, Keep], int | None],
) -> int:
    """Parse the options, and measure, print and keep the results. Return the exit status.

    Args:
        description: the docstring of the benchmark.
        measure: is called with the options and a function that keeps the results, as often as there are new ones.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--json", type=Path, help="where the results go")
    arguments = parser.parse_args()

    def keep(found: Any) -> None:
        write_json(arguments.json, {"about": about(arguments), **found} if isinstance(found, dict) else found)

    return measure(arguments, keep) or 0


def module() -> str:
    """Return the name of the module that `python -m` runs."""
    spec = sys.modules["__main__"].__spec__
    return "__main__" if spec is None else spec.name.removesuffix(".__main__")


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the machine, the command and its options."""
    kept = {key: value for key, value in vars(arguments).items() if key != "json"}
    command = shlex.join(["python", "-m", module(), *sys.argv[1:]])
    return {**machine.about(), "command": command, "arguments": kept}
