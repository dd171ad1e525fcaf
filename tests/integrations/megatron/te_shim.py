"""Transformer Engine's own Python sources on CPU, for a test of the seams on them: no CUDA, nothing compiled.

`install` puts the sources of a folder in place of an installed TE, with a stand-in for its extension module, and does
in torch the parts that Linear and LayerNormLinear need of it: products, layer norm. All other code, with every call of
a collective, every wait and their order, is TE's own code.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import os
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

EXTENSION = "transformer_engine_torch"
NOT_NEEDED = ("onnx", "onnxscript", "triton", "nvdlfw_inspect", "flash_attn", "einops")


class _Anything(types.ModuleType):
    """A module that has every attribute."""

    __version__ = "3.5.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=name))
        return getattr(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        known = name.partition(".")[0] in NOT_NEEDED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(folder: Path) -> types.ModuleType:
    """Return transformer_engine.pytorch of the sources in `folder`. The process cannot be used for another test."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TE loads no library
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.is_available = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(  # type: ignore[assignment]
        major=9, minor=0, multi_processor_count=1, name="cpu"
    )
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]

    sys.meta_path.append(_Finder())
    extension = _Anything(EXTENSION)
    extension.__spec__ = importlib.machinery.ModuleSpec(EXTENSION, None)
    constants = (folder / "transformer_engine/pytorch/constants.py").read_text()
    names = re.findall(r"int\(tex\.DType\.(k\w+)\)", constants)
    extension.DType = enum.IntEnum("DType", names, start=0)  # type: ignore[misc]
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(folder / "transformer_engine")]
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    sys.modules["transformer_engine"] = package  # its __init__ would load libraries
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda _name: None
    sys.modules[EXTENSION] = extension
    engine = importlib.import_module("transformer_engine.pytorch")

    modules = [importlib.import_module(f"{engine.__name__}.module.{name}") for name in ("linear", "layernorm_linear")]
    for module in modules:
        module.general_gemm = _product
    modules[1].apply_normalization = lambda x, _out, weight, bias, eps, *_: torch.native_layer_norm(
        x, x.shape[-1:], weight, bias, eps
    )
    extension.layernorm_bwd = lambda gradient, x, mu, rsigma, weight, *_: torch.ops.aten.native_layer_norm_backward(
        gradient, x, x.shape[-1:], mu, rsigma, weight, torch.zeros_like(weight), [True] * 3
    )
    base = importlib.import_module(f"{engine.__name__}.module.base").TransformerEngineBaseModule
    base.prepare_forward = _ready
    base.end_forward = lambda self: None
    return engine


def _product(a: Any, b: Any, *_: Any, layout: str = "TN", bias: Any = None, grad: bool = False, **__: Any) -> Any:
    """Compute TE's general_gemm: TN is forward, NN the input's gradient, NT the weight's and the bias's."""
    rows_a, rows_b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    if layout == "NT":
        return rows_b.t() @ rows_a, rows_b.sum(0) if bias is not None else None, None, None
    result = rows_b @ (rows_a.t() if layout == "TN" else rows_a)
    if bias is not None and not grad:
        result = result + bias
    return result.view(*b.shape[:-1], result.shape[-1]), None, None, None


def _ready(self: Any, inp: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Do the part of TE's prepare_forward that remains without FP8. TE's own requires CUDA."""
    self.allow_different_data_and_param_types = False
    self.fp8 = self.fp8_calibration = False
    self.fp8_initialized = True
    self.set_activation_dtype(inp)
    return inp
