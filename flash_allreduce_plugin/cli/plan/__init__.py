"""flash-allreduce plan: what quantizing would bring on a cluster that is not there yet."""
