"""Environment variables that are of the package and no fields of the configuration."""

from __future__ import annotations

import os

from flash_allreduce_plugin.errors import ConfigError

DISABLE = "FLASH_ALLREDUCE_DISABLE"
REFERENCE = "FLASH_ALLREDUCE_REFERENCE"
LOG = "FLASH_ALLREDUCE_LOG"  # the name of a file; run_log.py


def is_on(variable: str) -> bool:
    """Whether a switch is on: 1, true, yes or on; off: unset, empty, 0, false, no or off.

    Raises ConfigError for anything else.
    """
    value = os.environ.get(variable)
    if not value:
        return False
    value = value.strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise ConfigError(f"{variable}={value!r} is not valid; expected 1 or 0.")
