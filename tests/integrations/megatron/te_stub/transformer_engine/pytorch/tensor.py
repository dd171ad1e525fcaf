"""Stand-ins for FP8 tensors: bytes with one scale, and no torch.Tensor (TE's storages are none either)."""

import torch


class QuantizedTensor(torch.Tensor):
    """A type that Megatron tests its parameters for."""


class Float8Quantizer:
    def __call__(self, tensor):
        scale = tensor.abs().max().clamp(min=1e-6) / 127
        return Float8TensorStorage((tensor / scale).round().clamp(-127, 127).add(128).to(torch.uint8), scale)


class Float8TensorStorage:
    def __init__(self, data, scale):
        self._data, self._scale = data, scale

    def dequantize(self):
        return (self._data.float() - 128) * self._scale
