"""flash-allreduce report: shows a run from its log."""
