"""What Megatron-Bridge needs on a CPU besides tests/integrations/megatron/cuda_shim.py. Knows nothing of the plugin.

test_programs_bridge.py copies this file as sitecustomize.py, beside cuda_shim.py, into a folder on PYTHONPATH: Python
runs it in every rank before the program. Packages that need CUDA become modules in which every name is an empty class.
Groups that the program asks NCCL for are gloo's.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any

# Not installed here. megatron-core asks for the second list too, and must find that it is not there.
EVERYWHERE = ("nvidia_resiliency_ext", "modelopt", "megatron.energon")
FOR_BRIDGE = ("transformer_engine", "mamba_ssm", "causal_conv1d", "fla")


class AnyName(type):
    """A class that has every attribute, and every parameter of a generic class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return empty(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls


def empty(name: str) -> Any:
    return AnyName(name, (), {"__init__": lambda self, *args, **kwargs: None})


class Fake(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return empty(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        found = any(f"{name}.".startswith(f"{one}.") for one in self.names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: Any) -> Fake:
        return Fake(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def for_bridge(names: tuple[str, ...]) -> None:
    """Let modules of megatron.bridge alone import these packages."""
    own = builtins.__import__

    def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        whole, _, _ = name.partition(".")
        importer = (globals or {}).get("__name__", "")
        if level or whole not in names or not importer.startswith("megatron.bridge."):
            return own(name, globals, locals, fromlist, level)
        return Fake(name) if fromlist else Fake(whole)

    builtins.__import__ = import_


def by_gloo() -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    def of(name: str) -> Any:
        own = getattr(dist, name)

        @functools.wraps(own)
        def made(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("backend") == "nccl":
                kwargs = {**kwargs, "backend": "gloo", "pg_options": None}
            return own(*args, **kwargs)

        return made

    for name in ("new_group", "new_subgroups_by_enumeration"):
        made = of(name)
        setattr(dist, name, made)
        setattr(distributed_c10d, name, made)
    barrier = dist.barrier
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)


def norms() -> None:
    """Mark the parameters of layer norms as apex does: Megatron's local layers refuse sequence parallelism else."""
    import torch

    def made(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        norm = torch.nn.LayerNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    sys.modules["megatron.core.transformer.torch_norm"].WrappedTorchNorm.__new__ = made  # type: ignore[attr-defined]


def experts() -> None:
    """What megatron-core 0.16.1 takes from Transformer Engine, and from the GPU, in layers of experts."""
    utils: Any = sys.modules["megatron.core.transformer.moe.moe_utils"]
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None


def tokens() -> None:
    dispatcher: Any = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and tensor is not None else tensor
    )


if "RANK" in os.environ:
    import cuda_shim  # noqa: F401 - before anything of Megatron's

    from flash_allreduce_plugin.autoload import AfterImport

    sys.meta_path.insert(0, Finder(EVERYWHERE))
    # Bridge asks it in every step.
    distillation: Any = importlib.import_module("modelopt.torch.distill.plugins.megatron")
    distillation.get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **kwargs: None
    for_bridge(FOR_BRIDGE)
    by_gloo()
    for module, action in {
        "megatron.core.transformer.torch_norm": norms,
        "megatron.core.transformer.moe.moe_utils": experts,
        "megatron.core.transformer.moe.token_dispatcher": tokens,
    }.items():
        AfterImport([module], action).install()
