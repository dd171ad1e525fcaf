"""flash-allreduce run: starts a program with the plugin attached, and reports what it did."""
