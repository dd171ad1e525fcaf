"""flash-allreduce run: runs a program with the plugin attached, and prints a report."""
