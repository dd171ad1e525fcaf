"""The command line: `flash-allreduce`, one folder or file a command. No other part of the package imports it."""

from __future__ import annotations

import sys

from flash_allreduce_plugin.errors import install_command


def run() -> None:
    """Run the entry point. Prints one sentence if the packages of the `cli` extra are missing."""
    try:
        from flash_allreduce_plugin.cli.main import app

        app()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.exit(f"flash-allreduce: {package} is not installed: {install_command('cli')}")
