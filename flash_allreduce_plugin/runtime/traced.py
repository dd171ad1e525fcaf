"""The operators of torch.compile's graphs. Their arguments fit a graph, and they run the eager code.

Under Dynamo api/reductions.py and codec call this module. A call becomes one node, whose arguments are strings and
numbers (FlashConfig.text for a configuration, the name of a group). The nodes are functional, as those of
torch.distributed._functional_collectives are. The collectives among them are marked as effects: no pass removes one,
runs it twice or reorders two, even if its result is not used. A call with other arguments breaks the graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.policy import Role, Site

Eager = Callable[..., Any]

_CALL = "str group, str config, str site, str role, str? module, int? layer, SymInt? step"
_SCHEMAS = {
    "all_reduce": f"(Tensor tensor, str op, {_CALL}) -> Tensor",
    "reduce_scatter": f"(Tensor output, Tensor input, str op, {_CALL}) -> Tensor",
    "all_gather": f"(Tensor output, Tensor input, {_CALL}) -> Tensor",
    "encode_tensor": "(Tensor tensor, str config, SymInt call) -> Tensor",
    "decode_payload": "(Tensor payload, SymInt[] shape, ScalarType dtype, str config) -> Tensor",
}
# An operator decides and counts on the host in every call: it must not be captured into a CUDA graph.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_OPERATORS = torch.ops.flash_allreduce
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_plainly: dict[str, Eager] = {}  # the functions that run after a graph break


# ---- traced functions ----


def all_reduce(tensor: Any, op: Any, group: Any, config: Any, async_op: bool, site: Any, step: Any, **more: Any) -> Any:
    """Run reductions.all_reduce under Dynamo. more: arguments that a graph cannot hold."""
    if not (_is_tensor(tensor) and _can_be_said(op, group, config, async_op, site, step, more)):
        torch._dynamo.graph_break("a call of flash_allreduce that no graph can hold: async_op, feedback, operator ...")
        return _plainly["all_reduce"](tensor, op, group, config, async_op, site=site, step=step, **more)
    _put(tensor, _OPERATORS.all_reduce(tensor.detach(), op.name, *_said(group, config, site, step)))
    return None


def reduce_scatter(
    output: Any, input: Any, op: Any, group: Any, config: Any, async_op: bool, site: Any, step: Any, **more: Any
) -> Any:
    """Run reductions.reduce_scatter under Dynamo. A list of inputs breaks the graph, as torch's does."""
    tensors = _is_tensor(output) and _is_tensor(input)
    if not (tensors and _can_be_said(op, group, config, async_op, site, step, more)):
        torch._dynamo.graph_break("a call of flash_allreduce that no graph can hold: async_op, feedback, operator ...")
        return _plainly["reduce_scatter"](output, input, op, group, config, async_op, site=site, step=step, **more)
    call = _said(group, config, site, step)
    _put(output, _OPERATORS.reduce_scatter(output.detach(), input.detach(), op.name, *call))
    return None


def all_gather(
    output: Any, input: Any, group: Any, config: Any, async_op: bool, site: Any, step: Any, **more: Any
) -> Any:
    """Run reductions.all_gather under Dynamo."""
    tensors = _is_tensor(output) and _is_tensor(input)
    if not (tensors and _can_be_said(dist.ReduceOp.SUM, group, config, async_op, site, step, more)):
        torch._dynamo.graph_break("a call of flash_allreduce that no graph can hold: async_op ...")
        return _plainly["all_gather"](output, input, group, config, async_op, site=site, step=step, **more)
    _put(output, _OPERATORS.all_gather(output.detach(), input.detach(), *_said(group, config, site, step)))
    return None


def encode(tensor: Any, config: Any, call: Any) -> Any:
    """Run codec.encode under Dynamo."""
    if not (_is_tensor(tensor) and tensor.dtype in _DTYPES and isinstance(config, FlashConfig)):
        torch._dynamo.graph_break("flash_allreduce_plugin.encode refuses this")
        return _plainly["encode_tensor"](tensor, config, call)
    return _OPERATORS.encode_tensor(tensor.detach(), config.text, call)


def decode(payload: Any, shape: Any, dtype: Any, config: Any) -> Any:
    """Run codec.decode under Dynamo."""
    if not (_is_tensor(payload) and dtype in _DTYPES and isinstance(config, FlashConfig)):
        torch._dynamo.graph_break("flash_allreduce_plugin.decode refuses this")
        return _plainly["decode_payload"](payload, shape, dtype, config)
    return _OPERATORS.decode_payload(payload, list(shape), dtype, config.text)


def _is_tensor(tensor: Any) -> bool:
    """Return True for a Tensor that is no subclass.

    Dynamo allows no other check, such as the layout, in the backward of an autograd.Function.
    """
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _can_be_said(op: Any, group: Any, config: Any, async_op: bool, site: Any, step: Any, more: dict[str, Any]) -> bool:
    """Return True if a graph can hold the arguments. more: arguments that it cannot hold, if they are given."""
    group = dist.group.WORLD if group is None else group
    return (
        isinstance(op, dist.ReduceOp.RedOpType)
        and isinstance(group, dist.ProcessGroup)
        and (config is None or isinstance(config, FlashConfig))
        and not async_op
        and isinstance(site, Site)
        and (step is None or isinstance(step, int))
        and not any(more.values())
    )


def _said(group: Any, config: Any, site: Any, step: Any) -> tuple[Any, ...]:
    group = dist.group.WORLD if group is None else group
    text = "" if config is None else config.text
    return group.group_name, text, site.name, site.role.value, site.module, site.layer, step


def _put(tensor: Tensor, result: Tensor) -> None:
    """Copy result into tensor, unseen by autograd, as a collective's output is."""
    with torch.no_grad():
        tensor.copy_(result)


# ---- operators of a graph ----


def serve(name: str, eager: Eager, operator: Eager, fake: Eager) -> None:
    """Define the operator `name`, which runs the public function `eager` in a graph."""
    torch.library.define(f"flash_allreduce::{name}", _SCHEMAS[name], tags=_TAGS)
    torch.library.impl(f"flash_allreduce::{name}", "CompositeExplicitAutograd", operator)
    torch.library.register_fake(f"flash_allreduce::{name}", fake)

    def plainly(*arguments: Any, **keywords: Any) -> Any:
        return eager(*arguments, **keywords)

    never_compile(eager)
    never_trace(plainly)
    _plainly[name] = plainly


def never_compile(*functions: Eager) -> None:
    """Keep Dynamo from compiling the functions and their callees: after a graph break they run eagerly."""
    skip = eval_frame._FrameAction.SKIP
    for function in functions:
        assert isinstance(function, FunctionType)
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def never_trace(*functions: Eager, reason: str = "flash_allreduce runs this without a graph") -> None:
    """Break the graph before the functions too, as torch.compiler.disable does, without its cost a call and import."""
    never_compile(*functions)
    for function in functions:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


def serve_collectives(all_reduce: Eager, reduce_scatter: Eager, all_gather: Eager) -> None:
    """Define the operators of api/reductions.py's functions."""

    def reduced(tensor: Tensor, op: str, *call: Any) -> Tensor:
        result = tensor.clone()
        all_reduce(result, getattr(dist.ReduceOp, op), **_heard(*call))
        return result

    def scattered(output: Tensor, input: Tensor, op: str, *call: Any) -> Tensor:
        result = torch.empty_like(output)
        reduce_scatter(result, input, getattr(dist.ReduceOp, op), **_heard(*call))
        return result

    def gathered(output: Tensor, input: Tensor, *call: Any) -> Tensor:
        result = torch.empty_like(output)
        all_gather(result, input, **_heard(*call))
        return result

    def fake(tensor: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(tensor)

    serve("all_reduce", all_reduce, reduced, fake)
    serve("reduce_scatter", reduce_scatter, scattered, fake)
    serve("all_gather", all_gather, gathered, fake)
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        _register_effectful_op(getattr(_OPERATORS, name).default, _EffectType.ORDERED)


def serve_codec(encode: Eager, decode: Eager) -> None:
    """Define the operators of codec's functions."""

    def encoded(tensor: Tensor, config: str, call: int) -> Tensor:
        return encode(tensor, config_of(config), call)

    def decoded(payload: Tensor, shape: Sequence[int], dtype: torch.dtype, config: str) -> Tensor:
        return decode(payload, shape, dtype, config_of(config))

    def fake_payload(tensor: Tensor, config: str, call: int) -> Tensor:
        given = config_of(config)
        assert given is not None
        return tensor.new_empty(given.format().payload_bytes(tensor.numel()), dtype=torch.uint8)

    def fake_tensor(payload: Tensor, shape: Sequence[int], dtype: torch.dtype, config: str) -> Tensor:
        return payload.new_empty(shape, dtype=dtype)

    serve("encode_tensor", encode, encoded, fake_payload)
    serve("decode_payload", decode, decoded, fake_tensor)


def _heard(
    group: str, config: str, site: str, role: str, module: str | None, layer: int | None, step: int | None
) -> dict[str, Any]:
    return {
        "group": dist.distributed_c10d._resolve_process_group(group),  # type: ignore[arg-type]
        "config": config_of(config),
        "site": _site(site, role, module, layer),
        "step": step,
    }


@lru_cache(256)
def config_of(text: str) -> FlashConfig | None:
    """Return the configuration of a text, one object a text: api/reductions.py caches plans by the object."""
    return FlashConfig.from_dict(json.loads(text)) if text else None


@lru_cache(4096)
def _site(name: str, role: str, module: str | None, layer: int | None) -> Site:
    return Site(name, Role(role), module, layer)
