"""Tensors and bytes: the format of a payload, the compiled operators, the specification in plain PyTorch."""
