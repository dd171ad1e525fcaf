"""flash-allreduce tune: measures the best settings of this cluster."""
