"""flash-allreduce tune: the settings that measured best on this cluster."""
