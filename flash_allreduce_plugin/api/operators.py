"""torch.ops.flash_allreduce: the operators of saved graphs, there from `import flash_allreduce_plugin` on.

1. The package places the namespace in torch.ops as soon as torch has one, and loads nothing else.
2. The first access to an operator imports the module that defines the operator.

A graph of torch.export or torch.compile names its operators. A program that loads the graph need not have called a
function of this package before. Limit: C++ that asks torch's dispatcher by name does not pass here.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch._ops import _OpNamespace, ops

NAMESPACE = "flash_allreduce"
CODEC = "flash_allreduce_plugin.codec.ops"  # loads the compiled library, which defines all other operators
#: Operator -> the module that defines it, of those that are written in Python.
DEFINED_IN = {
    **dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), "flash_allreduce_plugin.api.reductions"),
    **dict.fromkeys(("encode_tensor", "decode_payload"), "flash_allreduce_plugin.api.tensors"),
}


class Operators(_OpNamespace):
    """The namespace, which keeps every operator that was found: __getattr__ runs once for each."""

    __module__ = _OpNamespace.__module__  # becomes the operators', and torch.fx prints it into the code of a graph

    def __getattr__(self, op_name: str) -> Any:
        if not op_name.startswith("__"):
            importlib.import_module(DEFINED_IN.get(op_name, CODEC))
        return super().__getattr__(op_name)


def attach() -> None:
    """Place the namespace in torch.ops."""
    setattr(ops, NAMESPACE, Operators(NAMESPACE))
