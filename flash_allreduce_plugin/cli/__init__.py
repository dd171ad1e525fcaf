"""The command line: `flash-allreduce`, one file per command. Nothing else in the package imports it."""
