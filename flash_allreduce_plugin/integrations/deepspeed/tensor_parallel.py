"""DeepSpeed's AutoTP: the all-reduces of the layers that it splits (deepspeed.module_inject.layers).

    bits             RowParallel.forward            g: the output of a row-parallel layer, in training and inference
    backward_bits    ColumnParallel.backward        f: the gradient of a column-parallel layer's input
                     AsyncColumnParallel.backward   the same with tp_overlap_comm, asynchronous
                     ScatterToTensorParallelRegion  the gradient of the input of a row-parallel output head

DeepSpeed's functions run with another all-reduce. They receive no module: hooks on the split layers of a quantized
model record the running layer, and the forward of f leaves it on `ctx` for the backward. Layers of other models stay
DeepSpeed's.

Limits: logits stay in full precision. So does everything outside of these functions: the cross entropy, gathers, and
gradients of replicated parameters. RowParallel and ColumnParallel lose the sum of a tensor that is not contiguous, a
defect of DeepSpeed that we do not change.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.refusals import for_megatron
from flash_allreduce_plugin.integrations.deepspeed.reduction import LOGITS, given_group
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.policy import EVALUATION, Role, Site, unmatched
from flash_allreduce_plugin.runtime.traced import never_trace

FORWARD = Site("deepspeed.tensor.forward", Role.FORWARD)
EMBEDDING = Site("deepspeed.tensor.embedding", Role.EMBEDDING)
BACKWARD = Site("deepspeed.tensor.backward", Role.BACKWARD)
COVERS = {
    FORWARD: ("RowParallel.forward", "outputs of AutoTP's row-parallel layers: all-reduce"),
    EMBEDDING: ("RowParallel.forward, in VocabParallelEmbedding", "output of AutoTP's split embedding: all-reduce"),
    BACKWARD: (
        "backward of ColumnParallel, AsyncColumnParallel and ScatterToTensorParallelRegion",
        "gradients of the inputs of AutoTP's column-parallel layers: all-reduce",
    ),
}

_LAYERS = "deepspeed.module_inject.layers"


class Sums:
    """The tensor-parallel all-reduces of one engine's model. A model that outlives its engine has DeepSpeed's own."""

    def __init__(
        self, engine: Any, config: FlashConfig, site: Callable[[Site], Site], step: Callable[[], int | None]
    ) -> None:
        """Take the configuration of an engine. A preset has different values for activations and gradients.

        site: returns the site of the engine's calls. step: returns the finished steps. Neither may keep the engine
        alive, because hooks on the model keep both.
        """
        self.config = for_megatron(config)
        self.site, self.step = site, step
        self._engine = weakref.ref(engine)
        self.names: list[str] = []
        self._hooks: list[Any] = []

    @property
    def released(self) -> bool:
        """Return True after the model's own sums were restored."""
        return not self._hooks or self._engine() is None

    def own(self, model: torch.nn.Module, *, evaluates: bool = True) -> None:
        """Quantize the sums of the model's split layers. evaluates: True if quantize_evaluation applies to it."""
        for name, layer in layers(model).items():
            self.names.append(name)
            entering = _Entering(self, name, layer, exact_evaluation=evaluates and not self.config.quantize_evaluation)
            self._hooks += [
                layer.register_forward_pre_hook(entering),
                layer.register_forward_hook(_leaves, always_call=True),
            ]

    def disown(self) -> None:
        """Restore the model's own sums."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def unmatched(self) -> list[str]:
        """Return a sentence for each pattern of include and exclude that names no layer of the model."""
        return [
            f"{field} pattern {pattern!r} matches no layer that AutoTP has split; such layers are named like "
            f"{self.names[0]!r}."
            for field, pattern in (unmatched(self.config, self.names) if self.names else ())
        ]

    def all_reduce(
        self, site: Site, full_precision: str | None, tensor: Tensor, group: Any, async_op: bool, theirs: Function
    ) -> Any:
        """Sum `tensor` in place at `site`. theirs: DeepSpeed's own all-reduce of it."""
        return reductions.all_reduce(
            tensor,
            group=given_group(group),
            config=self.config,
            async_op=async_op,
            site=self.site(site),
            step=self.step(),
            plain=theirs,
            full_precision=full_precision,
        )


def layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers of a model that AutoTP has split among several ranks, by name."""
    from deepspeed.module_inject.layers import TensorParallel_Layer

    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, TensorParallel_Layer)
        and layer.mp_group is not None
        and dist.get_world_size(layer.mp_group) > 1
    }


def is_there(engine: Any) -> bool:
    """Return True if AutoTP has split layers of the engine's model."""
    return bool(layers(engine.module))


def is_wanted(deepspeed: Any) -> bool:
    """Return True if a DeepSpeedConfig asks for AutoTP."""
    return int(getattr(getattr(deepspeed, "tensor_parallel_config", None), "autotp_size", 0)) > 1


# ---- the running layer


@dataclass(frozen=True, slots=True)
class _Call:
    """The sums of one forward call of a layer, and the reasons why they stay in full precision, if they do."""

    sums: Sums
    forward: Site
    backward: Site
    forward_reason: str | None
    backward_reason: str | None


_running: ContextVar[_Call | None] = ContextVar("flash_allreduce_tensor_parallel_layer", default=None)
# In a backward: the call of its forward.
_returning: ContextVar[_Call | None] = ContextVar("flash_allreduce_tensor_parallel_gradient", default=None)


class _Entering:
    """A forward pre-hook that records the running layer."""

    def __init__(self, sums: Sums, name: str, layer: torch.nn.Module, *, exact_evaluation: bool) -> None:
        forward = EMBEDDING if _is(layer, "VocabParallelEmbedding") else FORWARD
        module = name if sums.config.include or sums.config.exclude else None
        sites = replace(forward, module=module), replace(BACKWARD, module=module)
        logits = LOGITS if _is(layer, "LinearAllreduceWithReplicatedInput") else None
        self._training = _Call(sums, *sites, logits, None)
        reason = EVALUATION if exact_evaluation else None
        self._evaluating = _Call(sums, *sites, reason or logits, reason)

    def __call__(self, layer: torch.nn.Module, _arguments: Any) -> None:
        _running.set(self._training if layer.training else self._evaluating)


def _is(layer: torch.nn.Module, name: str) -> bool:
    """Return True for a layer of a class of DeepSpeed's, which older releases do not have."""
    from deepspeed.module_inject import layers as theirs

    return isinstance(layer, getattr(theirs, name, ()))


def _leaves(_layer: torch.nn.Module, _arguments: Any, _output: Any) -> None:
    _running.set(None)


never_trace(_Entering.__call__, _leaves)


# ---- seams


def of_process() -> list[Seam]:
    """Return the seams of DeepSpeed's functions that are replaced while an engine with AutoTP is quantized."""
    column = ("ctx", "group", "input")
    kept = "keeps the layer for the backward"

    def seam(path: str, signature: Any, replacement: Function, covers: str, optional: bool = False) -> Seam:
        return Seam(f"deepspeed.tensor.{path}", _LAYERS, path, signature, replacement, covers, optional)

    head = "ScatterToTensorParallelRegion"  # from 0.19.5 on
    return [
        seam(
            "RowParallel.forward",
            ("ctx", "group", "input", "is_inference_mode"),
            _sums_forward,
            "all-reduce of a row-parallel layer's output, forward",
        ),
        seam("ColumnParallel.forward", column, _remembers, kept),
        seam("ColumnParallel.backward", ("ctx", "grad_output"), _sums_backward, "all-reduce of its gradient, backward"),
        seam("AsyncColumnParallel.forward", (*column, "weight", "bias"), _remembers, kept),
        seam(
            "AsyncColumnParallel.backward",
            ("ctx", "grad_output"),
            _sums_backward,
            "asynchronous all-reduce of a column-parallel layer's input gradient, backward",
        ),
        seam(f"{head}.forward", (*column, "partition_sizes", "tp_index"), _remembers, kept, True),
        seam(
            f"{head}.backward",
            ("ctx", "grad_output"),
            _sums_backward,
            "all-reduce of the input gradient of a row-parallel output head, backward",
            True,
        ),
    ]


def _sums_forward(original: Function) -> Function:
    """Return `original` (RowParallel.forward) with our all-reduce in place of DeepSpeed's two."""

    def seen(name: str) -> Function:
        def all_reduce(tensor: Tensor, group: Any = None) -> Any:
            from deepspeed import comm

            call = _running.get()
            theirs = functools.partial(getattr(comm, name), tensor, group=group)
            if call is None or call.sums.released:
                return theirs()
            return call.sums.all_reduce(call.forward, call.forward_reason, tensor, group, False, theirs)

        return all_reduce

    body = original
    for name in ("all_reduce", "inference_all_reduce"):
        body = rebound(body, f"dist.{name}", seen(name))

    @functools.wraps(original)
    def forward(*arguments: Any, **keywords: Any) -> Any:
        return body(*arguments, **keywords)

    never_trace(forward)
    return forward


def _sums_backward(original: Function) -> Function:
    """Return `original`, the backward of an autograd function, with our all-reduce in place of DeepSpeed's."""

    def all_reduce(tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        from deepspeed import comm

        call = _returning.get()
        theirs = functools.partial(comm.all_reduce, tensor, group=group, async_op=async_op)
        if call is None or call.sums.released:
            return theirs()
        return call.sums.all_reduce(call.backward, call.backward_reason, tensor, group, async_op, theirs)

    body = rebound(original, "dist.all_reduce", all_reduce)

    @functools.wraps(original)
    def backward(ctx: Any, *gradients: Any) -> Any:
        token = _returning.set(getattr(ctx, "flash_allreduce_call", None))
        try:
            return body(ctx, *gradients)
        finally:
            _returning.reset(token)

    never_trace(backward)
    return backward


def _remembers(original: Function) -> Function:
    """Return `original`, the forward of an autograd function, that keeps the running layer for its backward."""

    @functools.wraps(original)
    def forward(ctx: Any, *arguments: Any, **keywords: Any) -> Any:
        ctx.flash_allreduce_call = _running.get()
        return original(ctx, *arguments, **keywords)

    never_trace(forward)
    return forward
