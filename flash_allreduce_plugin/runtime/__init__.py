"""One call: the state of its group, the decision, its three stages, torch.compile, and the state of a checkpoint."""
