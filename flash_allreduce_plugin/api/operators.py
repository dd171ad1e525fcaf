"""torch.ops.flash_allreduce: the operators of saved graphs, available after `import flash_allreduce_plugin`.

1. The package places the namespace in torch.ops as soon as torch has one, and loads nothing else.
2. The first access to an operator imports the module that defines the operator.

A graph of torch.export or torch.compile names its operators. A program that loads the graph need not have called a
function of this package before. Limit: C++ code that asks torch's dispatcher by name does not load them.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch._ops import _OpNamespace, ops

NAMESPACE = "flash_allreduce"
CODEC = "flash_allreduce_plugin.codec.ops"  # loads the compiled library, which defines all other operators
#: The operators in Python, and the modules that define them.
DEFINED_IN = {
    **dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), "flash_allreduce_plugin.api.reductions"),
    **dict.fromkeys(("encode_tensor", "decode_payload"), "flash_allreduce_plugin.api.tensors"),
}


class Operators(_OpNamespace):
    """The namespace. It keeps every loaded operator: __getattr__ runs once for each."""

    __module__ = _OpNamespace.__module__  # also of the operators; torch.fx prints it into the code of a graph

    def __getattr__(self, op_name: str) -> Any:
        if not op_name.startswith("__"):
            importlib.import_module(DEFINED_IN.get(op_name, CODEC))
        return super().__getattr__(op_name)


def attach() -> None:
    """Place the namespace in torch.ops."""
    setattr(ops, NAMESPACE, Operators(NAMESPACE))
