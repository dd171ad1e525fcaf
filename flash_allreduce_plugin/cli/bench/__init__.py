"""flash-allreduce bench: times the collectives against torch.distributed's own."""
