from types import SimpleNamespace

import torch

from . import distributed as distributed
from . import fp8 as fp8
from .module.layernorm_linear import LayerNormLinear as LayerNormLinear
from .module.layernorm_mlp import LayerNormMLP as LayerNormMLP
from .module.linear import Linear as Linear

ops = SimpleNamespace(Sequential=object, FusibleOperation=object)  # Megatron names them in annotations


class GroupedLinear(torch.nn.Module):
    """A base class of Megatron's experts. This class communicates nothing."""


class DotProductAttention(torch.nn.Module):
    pass


class LayerNorm(torch.nn.Module):
    pass


class RMSNorm(torch.nn.Module):
    pass
