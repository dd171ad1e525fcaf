"""flash-allreduce report: what a run did, from its log."""
