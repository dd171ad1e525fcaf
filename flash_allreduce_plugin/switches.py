"""Environment variables that are of the package and no fields of the configuration."""

from __future__ import annotations

import os

from flash_allreduce_plugin.errors import ConfigError

DISABLE = "FLASH_ALLREDUCE_DISABLE"
REFERENCE = "FLASH_ALLREDUCE_REFERENCE"
LOG = "FLASH_ALLREDUCE_LOG"  # the name of a file; run_log.py
COUNT_BESIDE = "FLASH_ALLREDUCE_COUNT_BESIDE"  # on where it is not set; beside.py


def is_on(variable: str, *, unset: bool = False) -> bool:
    """Whether a switch is on: 1, true, yes or on; off: 0, false, no or off; `unset` if it is not set, or empty.

    Raises ConfigError for anything else.
    """
    value = os.environ.get(variable)
    if not value or not value.strip():
        return unset
    value = value.strip().lower()
    if value in ("0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise ConfigError(f"{variable}={value!r} is not valid; expected 1 or 0.")
