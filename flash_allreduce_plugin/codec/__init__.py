"""The codec: the format of a payload, the compiled operators, and the specification in plain PyTorch."""
