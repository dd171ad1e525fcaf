"""torch.ops.flash_allreduce has the collectives after a plain import, and importing loads none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flash_allreduce_plugin.api import operators
from flash_allreduce_plugin.runtime import traced

# The package before torch, then, imported once more, after it.
SCRIPT = """
import sys
import flash_allreduce_plugin
assert "torch" not in sys.modules
import torch

def is_there():
    namespace = vars(torch.ops)["flash_allreduce"]
    loaded = {name for name in sys.modules if name.startswith("flash_allreduce_plugin.")}
    assert type(namespace).__name__ == "Operators" and "flash_allreduce_plugin.api.operators" in loaded
    assert not loaded & {f"flash_allreduce_plugin.{name}" for name in ("api.reductions", "codec", "config", "runtime")}
    return loaded

for name in ("flash_allreduce_plugin", *is_there()):
    del sys.modules[name]
del torch.ops.flash_allreduce
import flash_allreduce_plugin
is_there()
print(torch.ops.flash_allreduce.all_reduce.default, torch.ops.flash_allreduce.encode_tensor.default)
"""


def test_a_plain_import_places_the_namespace_before_torch_and_after() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout == "flash_allreduce.all_reduce.default flash_allreduce.encode_tensor.default\n"
    assert not done.stderr


def test_it_finds_every_operator_and_no_other() -> None:
    assert set(operators.DEFINED_IN) == set(traced._SCHEMAS)
    fresh = operators.Operators(operators.NAMESPACE)
    for name in (*operators.DEFINED_IN, "encode"):
        assert str(getattr(fresh, name).default) == str(getattr(torch.ops.flash_allreduce, name).default)
        assert name in vars(fresh)  # the next access is an attribute
        # torch.fx prints torch.ops for torch._ops, and imports any other module by the printed name.
        assert getattr(fresh, name).__module__ == "torch._ops.flash_allreduce"
    with pytest.raises(AttributeError, match="no_such_operator"):
        _ = fresh.no_such_operator
