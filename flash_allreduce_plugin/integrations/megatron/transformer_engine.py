"""Tensor-parallel collectives of Transformer Engine's layers, which do not pass through megatron-core's functions.

TE's modules import `allreduce`, `reduce_scatter_along_first_dim` and `gather_along_first_dim` by name, each for
itself, and call them in the autograd functions of their layers. A seam replaces one such name in one module: TE's
code keeps running, starts its collectives where it does and waits on our handle where it waits on its own. Which
function of the module makes the call differs between TE's versions and does not matter: forward is told from backward
by the half of the layer's autograd function that is running. A call from outside both (2.20 under torch.compile) is
left to TE.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.errors import ConfigError, PatchError
from flash_allreduce_plugin.integrations.megatron import scopes
from flash_allreduce_plugin.integrations.megatron.scopes import (
    CurrentConfig,
    recalls,
    record_original,
    remembers,
    site_of,
)
from flash_allreduce_plugin.integrations.patching import Function, Patchset, Seam
from flash_allreduce_plugin.policy import ONE_RANK, Collective, Role, Site
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.other_traffic import ours

TE_MODULES = "transformer_engine.pytorch.module"
WINDOW = ((1, 13), (2, 20))
AUTOGRAD = {"linear": "_Linear", "layernorm_linear": "_LayerNormLinear", "layernorm_mlp": "_LayerNormMLP"}
OUTSIDE = "outside of the layer's autograd function"
TE_FORMAT = "in a format of Transformer Engine's"

_NAME = "megatron.transformer_engine"
G_FORWARD = Site(f"{_NAME}.g.forward", Role.FORWARD)
DGRAD = Site(f"{_NAME}.dgrad", Role.BACKWARD)
SP_G_FORWARD = Site(f"{_NAME}.sequence_parallel.g.forward", Role.FORWARD)
SP_G_BACKWARD = Site(f"{_NAME}.sequence_parallel.g.backward", Role.SEQUENCE_PARALLEL_GRADIENT)
SP_GATHER = Site(f"{_NAME}.sequence_parallel.gather", Role.SEQUENCE_PARALLEL_GATHER)
SP_REGATHER = Site(f"{_NAME}.sequence_parallel.regather", Role.SEQUENCE_PARALLEL_GATHER)
SP_DGRAD = Site(f"{_NAME}.sequence_parallel.dgrad", Role.BACKWARD)

Handle = reductions.Work | None


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, **call: Any) -> tuple[torch.Tensor, Handle]:
    return tensor, reductions.all_reduce(tensor, group=group, **call)


def _reduce_scatter(tensor: torch.Tensor, group: dist.ProcessGroup, **call: Any) -> tuple[torch.Tensor, Handle]:
    rows, rest = divmod(tensor.shape[0], group.size())
    if rest:
        raise ValueError(
            f"{call['site'].name}: the first dimension, {tensor.shape[0]}, is no multiple of {group.size()} ranks"
        )
    output = tensor.new_empty((rows, *tensor.shape[1:]))
    return output, reductions.reduce_scatter(output, tensor.contiguous(), group=group, **call)


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup, **call: Any) -> tuple[torch.Tensor, Handle]:
    output = tensor.new_empty((tensor.shape[0] * group.size(), *tensor.shape[1:]))
    return output, reductions.all_gather(output, tensor.contiguous(), group=group, **call)


@dataclass(frozen=True, slots=True)
class _Collective:
    """A function of transformer_engine.pytorch.distributed, the site of its calls, and its replacement."""

    name: str
    signature: tuple[tuple[str, ...], ...]
    forward: Site
    backward: Site
    serve: Callable[..., tuple[torch.Tensor, Handle]]


_INPUTS = ("inp", "input_")  # input_ until 2.1
_ALL_REDUCE = tuple((tensor, "tp_group", "async_op") for tensor in _INPUTS)
_REDUCE_SCATTER = (*_ALL_REDUCE, ("inp", "tp_group", "async_op", "output"))  # output from 2.19 on
_GATHER = (
    *((tensor, "process_group", "async_op", "quantizer") for tensor in _INPUTS),
    ("input_", "process_group", "async_op"),  # 1.13
    ("inp", "process_group", "async_op", "quantizer", "output_tensor", "external_coalescing"),  # 2.19 and later
)

ALL_REDUCE = _Collective("allreduce", _ALL_REDUCE, G_FORWARD, DGRAD, _all_reduce)
REDUCE_SCATTER = _Collective("reduce_scatter_along_first_dim", _REDUCE_SCATTER, SP_G_FORWARD, SP_DGRAD, _reduce_scatter)
GATHER = _Collective("gather_along_first_dim", _GATHER, SP_GATHER, SP_REGATHER, _gather)
GATHER_GRADIENT = _Collective("gather_along_first_dim", _GATHER, SP_G_BACKWARD, SP_G_BACKWARD, _gather)

# Which modules call it.
CALLERS = {
    ALL_REDUCE: tuple(AUTOGRAD),
    REDUCE_SCATTER: tuple(AUTOGRAD),
    GATHER: tuple(AUTOGRAD),
    GATHER_GRADIENT: ("base",),
}

COVERS = {
    G_FORWARD: "all-reduce of a row-parallel Transformer Engine layer's output, forward",
    DGRAD: "asynchronous all-reduce of a column-parallel Transformer Engine layer's input gradient, backward",
    SP_G_FORWARD: "reduce-scatter of a row-parallel Transformer Engine layer's output, forward",
    SP_G_BACKWARD: "all-gather of the gradient of a row-parallel Transformer Engine layer's output, backward",
    SP_GATHER: "all-gather of a column-parallel Transformer Engine layer's input, forward",
    SP_REGATHER: "asynchronous all-gather of the same input for the weight's gradient, backward",
    SP_DGRAD: "asynchronous reduce-scatter of a column-parallel Transformer Engine layer's input gradient, backward",
}


def in_use() -> bool:
    """Return True if Megatron runs with a Transformer Engine. Imports nothing if none is installed."""
    if "transformer_engine" not in sys.modules and importlib.util.find_spec("transformer_engine") is None:
        return False
    try:
        extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    except ImportError:
        return False
    return bool(extension.HAVE_TE)


def misfit(seams: list[Seam]) -> str | None:
    """Why these seams do not fit the Transformer Engine that is here, or None."""
    version = getattr(sys.modules.get("transformer_engine"), "__version__", "of unknown version")
    try:
        Patchset("transformer engine", seams, f"Transformer Engine 1.13 to 2.20 (installed: {version})").verify()
    except PatchError as error:
        return str(error)
    return None


def refuse_userbuffers() -> None:
    """ConfigError if TE has been told to overlap its GEMMs with collectives of their own (tp_comm_overlap).

    A model may be older than `enable`, and its configuration with it; TE's buffers are made once a process.
    """
    if getattr(sys.modules.get(f"{TE_MODULES}.base"), "_ub_communicators", None):
        raise ConfigError(
            "Transformer Engine's userbuffers are initialized (tp_comm_overlap): its overlapped GEMMs communicate "
            "inside their own kernels, past flash_allreduce_plugin; drop one of the two."
        )


def seams(config: CurrentConfig) -> list[Seam]:
    """The seams of this file; `config` is asked at every call."""
    found = [_seam(layer, collective, config) for collective, layers in CALLERS.items() for layer in layers]
    note = "remembers the module for the backward"
    for layer, function in AUTOGRAD.items():
        module, path = f"{TE_MODULES}.{layer}", f"{_NAME}.{layer}"
        found += [
            Seam(f"{path}.forward", module, f"{function}.forward", ("ctx", ...), remembers, note),
            Seam(f"{path}.backward", module, f"{function}.backward", ("ctx", ...), recalls, note),
        ]
    return found


def rows(report: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The sites of this file for `report()`: functions of several modules serve one site, and one serves two.

    report: of a Patchset; nothing comes back if the seams are not in it.
    """
    sites = {}
    for collective, layers in CALLERS.items():
        seams = [report[_id(layer, collective)] for layer in layers if _id(layer, collective) in report]
        where = layers[0] if len(layers) == 1 else "{" + ",".join(layers) + "}"
        for site in {collective.forward, collective.backward} if seams else ():
            sites[site.name] = {
                "target": f"{TE_MODULES}.{where}.{collective.name}",
                "covers": COVERS[site],
                "in_place": all(seam["in_place"] for seam in seams),
            }
    return {site.name: sites[site.name] for site in COVERS if site.name in sites}


def _id(layer: str, collective: _Collective) -> str:
    return f"{_NAME}.{layer}.{collective.name}"


def _seam(layer: str, collective: _Collective, config: CurrentConfig) -> Seam:
    module = f"{TE_MODULES}.{layer}"

    def replacement(original: Function) -> Function:
        _check_called(module, collective.name)
        return _served(collective, config, original)

    return Seam(
        _id(layer, collective),
        module,
        collective.name,
        collective.signature,
        replacement,
        COVERS[collective.forward],
    )


def _served(collective: _Collective, config: CurrentConfig, original: Function) -> Function:
    """Stands in for one of TE's functions in one of its modules; TE passes tensor and group by position."""

    def function(
        tensor: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False, quantizer: Any = None
    ) -> tuple[Any, Any]:
        scope = scopes.current()
        running = scopes.running_pass()
        here = site_of(collective.backward if running == "backward" else collective.forward, scope)
        # FP8 and its relatives: TE encodes, moves and decodes those itself. Their storages need not be tensors.
        plain = quantizer is None and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        # TE passes the group of its layer. Its layers of experts do not communicate: the dispatcher does.
        reason = scope.full_precision if plain and tensor.is_floating_point() else TE_FORMAT
        if reason is None and running is None:
            reason = OUTSIDE  # which width applies is not known
        if reason is None and dist.get_world_size(group) == 1:
            reason = ONE_RANK  # TE hands the tensor itself back
        if reason is None:
            assert group is not None
            return collective.serve(tensor, group, config=config(), async_op=async_op, site=here, step=scope.step)
        if plain:
            kind: Collective = "all_gather" if collective.serve is _gather else "reduce_scatter"
            record_original(here, reason, "all_reduce" if collective is ALL_REDUCE else kind, tensor, group)
        else:
            counters.record_full_precision(here, reason, 0)  # how many bytes is TE's affair
        more = {} if quantizer is None else {"quantizer": quantizer}
        with ours if plain else nullcontext():
            answer: tuple[Any, Any] = original(tensor, group, async_op=async_op, **more)
        return answer

    return function


def _check_called(module_name: str, name: str) -> None:
    """PatchError if no function of an imported TE module uses `name`: a seam there would silently never fire."""
    module = sys.modules.get(module_name)
    if module is not None and not any(name in code.co_names for code in _codes(module)):
        raise PatchError(f"nothing in {module_name} calls it")


def _codes(owner: Any) -> Iterator[types.CodeType]:
    """The code of every function of a module or class, nested ones included."""
    for value in list(vars(owner).values()):
        if isinstance(value, type) and inspect.ismodule(owner) and value.__module__ == owner.__name__:
            yield from _codes(value)
        function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
        if isinstance(function, types.FunctionType):
            waiting = [function.__code__]
            while waiting:
                code = waiting.pop()
                yield code
                waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
