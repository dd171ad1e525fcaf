"""flash-allreduce bench: times the collectives beside torch.distributed's own."""
