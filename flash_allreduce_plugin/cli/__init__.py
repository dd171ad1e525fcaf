"""The command line: `flash-allreduce`, one file per command. Nothing else in the package imports it."""

from __future__ import annotations

import sys

from flash_allreduce_plugin.errors import install_command


def run() -> None:
    """The entry point; without the packages of the `cli` extra one sentence that says so."""
    try:
        from flash_allreduce_plugin.cli.main import app

        app()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.exit(f"flash-allreduce: {package} is not installed: {install_command('cli')}")
