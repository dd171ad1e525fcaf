"""flash-allreduce doctor: what an installation lacks."""
