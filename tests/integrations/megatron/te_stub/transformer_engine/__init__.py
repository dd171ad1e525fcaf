"""A stand-in for Transformer Engine 2.18 on CPU, for the tests of its seams.

Files, names, parameters, return values and the order of GEMMs and collectives are those of TE's Python sources (which
need CUDA to run); the arithmetic is torch's. Only the parts that megatron-core's layers and the seams use are here.
"""

from . import common as common
from . import pytorch as pytorch

__version__ = "2.18.0"
