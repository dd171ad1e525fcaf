"""`python -m flash_allreduce_plugin`: the same as `flash-allreduce`."""

from flash_allreduce_plugin.cli import run

run()
