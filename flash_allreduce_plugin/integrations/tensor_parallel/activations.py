"""Tell the redistributions of DTensors that move an activation from all others, and name the module.

torch's parallel styles call `DTensor.from_local` and `.redistribute`. So do state dicts, optimizers and norms, which
must stay exact. A redistribution moves an activation if its tensor

- is no parameter, and
- takes part in a graph that autograd records (it needs a gradient and was computed); or a module is running: under
  no_grad, with frozen weights and in the forward pass of a reentrant checkpoint there is no graph.

The module is read from the stack: the innermost call of torch.nn.Module that nothing of autograd's engine is between.
The backward pass has no modules. It uses the `Activation` that the forward pass kept on ctx.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.patching import Function
from flash_allreduce_plugin.policy import EVALUATION

CurrentConfig = Callable[[], FlashConfig]

#: Why an activation stays exact in a graph of torch.compile if patterns ask for its module.
IN_A_GRAPH = "module unknown in a graph"
_KEPT = "flash_allreduce_activation"  # on ctx
_CALL = nn.Module._call_impl.__code__
_ENGINE = "_engine_run_backward"  # torch.autograd.graph: code inside of it belongs to the backward pass
# Parts of a module's name that wrappers add.
_WRAPPERS = re.compile(r"(?:(?<=^)|(?<=\.))(?:module|_orig_mod|_checkpoint_wrapped_module)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Activation:
    """A redistribution of an activation that is running now.

    module: qualified name, "" outside of any; None if no pattern asks for it. full_precision: the reason, or None.
    evaluates: the module is in evaluation mode. backward: it moves the gradient. embedding: it sums the rows of a
    vocabulary-parallel embedding. async_op: the caller waits later.
    """

    module: str | None = None
    full_precision: str | None = None
    evaluates: bool = False
    backward: bool = False
    embedding: bool = False
    async_op: bool = False


_moving: ContextVar[Activation | None] = ContextVar("flash_allreduce_activation", default=None)
_exactly: ContextVar[bool] = ContextVar("flash_allreduce_exactly", default=False)
_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
#: Names of the modules that moved an activation, while patterns are compared with them.
seen: set[str] = set()


def moving() -> Activation | None:
    """Return the activation that a redistribution moves now, or None: then the tensor is another one."""
    return _moving.get()


def tracing() -> bool:
    """Return True while torch.compile traces: tensors have no values then."""
    from torch.distributed._functional_collectives import _are_we_tracing

    return _are_we_tracing()


def forwards(config: CurrentConfig, asynchronous: bool) -> Callable[[Function], Function]:
    """Return a wrapper of the forward of a DTensor autograd function, which sets the activation and keeps it on ctx.

    asynchronous: the fourth argument after ctx is async_op.
    """

    def wrap(original: Function) -> Function:
        @functools.wraps(original)
        def forward(ctx: Any, input: Tensor, *arguments: Any, **keywords: Any) -> Any:
            activation = _found(input, ctx.needs_input_grad[0], config())
            setattr(ctx, _KEPT, activation)
            if activation is not None and asynchronous and arguments[2]:
                activation = replace(activation, async_op=True)
            with _while_moving(activation):
                return original(ctx, input, *arguments, **keywords)

        return forward

    return wrap


def backwards(original: Function) -> Function:
    """Wrap the backward of a DTensor autograd function: the gradient of its forward's activation."""

    @functools.wraps(original)
    def backward(ctx: Any, *gradients: Any) -> Any:
        activation = getattr(ctx, _KEPT, None)
        if activation is not None:
            later = bool(getattr(ctx, "async_op", False))
            activation = replace(activation, backward=True, async_op=later)
        with _while_moving(activation):
            return original(ctx, *gradients)

    return backward


def embeds(original: Function) -> Function:
    """Wrap the reduction of a vocabulary-parallel embedding (_MaskPartial)."""

    @functools.wraps(original)
    def reduce(*arguments: Any, **keywords: Any) -> Any:
        activation = _moving.get()
        with _while_moving(activation and replace(activation, embedding=True)):
            return original(*arguments, **keywords)

    return reduce


def exactly(original: Function) -> Function:
    """Wrap a function with redistributions in full precision: DTensor.full_tensor."""

    @functools.wraps(original)
    def function(*arguments: Any, **keywords: Any) -> Any:
        before = _exactly.set(True)
        try:
            return original(*arguments, **keywords)
        finally:
            _exactly.reset(before)

    return function


def _found(tensor: Tensor, needs_gradient: bool, config: FlashConfig) -> Activation | None:
    if isinstance(tensor, nn.Parameter) or _exactly.get():
        return None
    in_a_graph = needs_gradient and not tensor.is_leaf
    by_name = bool(config.include or config.exclude)
    if tracing():
        return Activation(full_precision=IN_A_GRAPH if by_name else None) if in_a_graph else None
    if in_a_graph and not by_name and config.quantize_evaluation:
        return Activation()
    calls = _running()
    return _of(calls, config) if calls is not None or in_a_graph else None


def here(config: FlashConfig) -> Activation:
    """Return the activation of the module that is running."""
    return _of(_running(), config)


def _of(calls: tuple[nn.Module, nn.Module] | None, config: FlashConfig) -> Activation:
    """calls: the innermost and the outermost module."""
    by_name = bool(config.include or config.exclude)
    if calls is None:
        return Activation("" if by_name else None)
    evaluates = not calls[0].training
    reason = EVALUATION if evaluates and not config.quantize_evaluation else None
    return Activation(_name(*calls) if by_name else None, reason, evaluates)


def _running() -> tuple[nn.Module, nn.Module] | None:
    """Return the innermost module that is running and the outermost; None if a backward pass is inside, or none is."""
    frame: FrameType | None = sys._getframe(2)
    inner: nn.Module | None = None
    outer: nn.Module | None = None
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            outer = frame.f_locals["self"]
            inner = inner or outer
        elif inner is None and code.co_name == _ENGINE:
            return None
        frame = frame.f_back
    return None if inner is None or outer is None else (inner, outer)


def _name(inner: nn.Module, outer: nn.Module) -> str:
    if inner not in _names:
        for name, module in outer.named_modules():
            _names[module] = _WRAPPERS.sub("", name).removesuffix(".")
    name = _names.get(inner, "")
    seen.add(name)
    return name


@contextmanager
def _while_moving(activation: Activation | None) -> Iterator[None]:
    before = _moving.set(activation)
    try:
        yield
    finally:
        _moving.reset(before)
