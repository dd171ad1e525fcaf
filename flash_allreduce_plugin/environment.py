"""Every FLASH_ALLREDUCE_* variable that is not a field of the configuration.

A field `bits` of FlashConfig is FLASH_ALLREDUCE_BITS (config/fields.py); these act where they are read.
"""

from __future__ import annotations

import os

from flash_allreduce_plugin.errors import ConfigError

PREFIX = "FLASH_ALLREDUCE_"

ATTACH = f"{PREFIX}ATTACH"  # names of integrations/registry.py, or all: programs that are not edited
AUTOLOAD = f"{PREFIX}AUTOLOAD"  # 0: `import torch` attaches nothing; autoload.py
AUTOSAVE = f"{PREFIX}AUTOSAVE"  # FOLDER:STEPS, for the state of attached models; integrations/autosave.py
BUILD = f"{PREFIX}BUILD"  # which compiled libraries are built; setup.py
CONFIG = f"{PREFIX}CONFIG"  # the name of a JSON file, below the variables of fields; config/fields.py
COUNT_BESIDE = f"{PREFIX}COUNT_BESIDE"  # 0: torch.distributed's own traffic is not counted; telemetry/other_traffic.py
DISABLE = f"{PREFIX}DISABLE"  # 1: every call runs in full precision; runtime/decision.py
LOG = f"{PREFIX}LOG"  # the name of a file; telemetry/run_log.py
NCCL_WINDOWS = f"{PREFIX}NCCL_WINDOWS"  # 1: buffers that NCCL's copy engines can serve; collectives/windows.py
NVLS = f"{PREFIX}NVLS"  # 1: the two-shot kernel stores by a multicast address; collectives/two_shot.py
ONE_SHOT_BYTES = f"{PREFIX}ONE_SHOT_BYTES"  # the largest tensor in one shot; collectives/two_shot.py
REFERENCE = f"{PREFIX}REFERENCE"  # 1: the codec in plain PyTorch; codec/rows.py
TWO_SHOT_BYTES = f"{PREFIX}TWO_SHOT_BYTES"  # the largest tensor of the two-shot kernel; collectives/two_shot.py

VARIABLES = (
    *(ATTACH, AUTOLOAD, AUTOSAVE, BUILD, CONFIG, COUNT_BESIDE, DISABLE, LOG, NCCL_WINDOWS, NVLS, ONE_SHOT_BYTES),
    *(REFERENCE, TWO_SHOT_BYTES),
)


def is_on(variable: str, *, unset: bool = False) -> bool:
    """Return True for a switch with 1, true, yes or on, False for 0, false, no or off, `unset` if unset or empty.

    Raises ConfigError for anything else.
    """
    if variable not in os.environ:  # asked for in every call: get() is four times slower
        return unset
    value = os.environ.get(variable, "").strip().lower()
    if not value:
        return unset
    if value in ("0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise ConfigError(f"{variable}={value!r} is not valid; expected 1 or 0.")
