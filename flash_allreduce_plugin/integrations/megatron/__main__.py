"""`torchrun -m flash_allreduce_plugin.megatron pretrain_gpt.py ...`: the launch flags where autoload is off.

Runs a Megatron-LM script, unmodified, as `python script.py ...` would.
"""

from __future__ import annotations

import os
import runpy
import sys

from flash_allreduce_plugin import autoload

USAGE = "usage: torchrun ... -m flash_allreduce_plugin.megatron SCRIPT [its arguments] [--flash-allreduce ...]"


def main() -> None:
    """Run the script that sys.argv names, with the flags of `flash_allreduce_plugin.megatron.arguments`."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(USAGE)
    script = sys.argv[1]
    if not os.path.isfile(script):
        sys.exit(f"{script}: no such file; {USAGE}")
    sys.argv = sys.argv[1:]
    # First on the path, as Python itself does it: `megatron` is a namespace package, and an installed megatron-core
    # would otherwise be taken instead of the checkout's.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    autoload.install()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
