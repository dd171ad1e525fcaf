"""Activations and gradients between the stages of DeepSpeed's PipelineModule, and the gradients of tied weights.

PipelineEngine sends a tensor, or the tensors of a tuple one by one, with `p2p.send`, and waits for each. Inside its
four functions these are the sends of this package. Shapes, which are sent first, and masks stay in full precision.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.api import sends
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.deepspeed.reduction import TIED, Reduction
from flash_allreduce_plugin.integrations.deepspeed.section import SENDS
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.policy import DISABLED, Role, Site, is_full
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.other_traffic import counted_at

FORWARD = Site("deepspeed.pipeline.forward", Role.PIPELINE)
BACKWARD = Site("deepspeed.pipeline.backward", Role.PIPELINE_BACKWARD)
MASK = "mask"

_MODULE = "deepspeed.runtime.pipe.engine"
_FUNCTIONS = {
    "_exec_send_activations": ("p2p.send", FORWARD),
    "_exec_recv_activations": ("p2p.recv", FORWARD),
    "_exec_send_grads": ("p2p.send", BACKWARD),
    "_exec_recv_grads": ("p2p.recv", BACKWARD),
}
COVERS = {
    FORWARD: ("_exec_send_activations and _exec_recv_activations of PipelineEngine", "activations to the next stage"),
    BACKWARD: ("_exec_send_grads and _exec_recv_grads of PipelineEngine", "gradients to the stage before"),
}
TIED_COVERS = (
    "_exec_reduce_tied_grads of PipelineEngine",
    "gradients of weights that stages share: all-reduce",
)


def has_stages(engine: Any) -> bool:
    """Return True if an engine, even one under construction, has a pipeline."""
    from deepspeed.pipe import PipelineModule

    module = getattr(engine, "module", None)
    return isinstance(module, PipelineModule) and module.num_stages > 1


def widths(config: FlashConfig) -> dict[str, Any]:
    """Return the widths of sends that a configuration quantizes."""
    return {key: bits for key in SENDS if (bits := getattr(config, key)) != "full"}


def places(reduction: Reduction | None) -> list[Seam]:
    """Return the seams of the functions, for one engine. None: only to verify them."""

    def seam(name: str) -> Seam:
        path, site = _FUNCTIONS[name]
        return Seam(
            f"deepspeed.pipeline.{name.removeprefix('_exec_')}",
            _MODULE,
            f"PipelineEngine.{name}",
            ("self", "buffer_id"),
            lambda original: _served(original, name, reduction),
            f"{COVERS[site][1]}: {path}",
        )

    all_reduce = None if reduction is None else reduction.all_reduce_tied
    tied = Seam(
        TIED.name,
        _MODULE,
        "PipelineEngine._exec_reduce_tied_grads",
        ("self",),
        lambda original: rebound(original, "dist.all_reduce", all_reduce),
        TIED_COVERS[1],
    )
    return [*map(seam, _FUNCTIONS), tied]


def instructions(engine: Any) -> dict[Any, Function]:
    """Return PipelineEngine's table of functions with those of this engine."""
    return {one: getattr(engine, theirs.__name__).__func__ for one, theirs in engine._INSTRUCTION_MAP.items()}


class _Batch:
    """The tensors that one call of the four functions sends or receives."""

    def __init__(self, engine: Any, sent: Any) -> None:
        """sent: activations; None: other tensors, to or from this stage."""
        self.engine, self.sent, self.moved = engine, sent, 0

    def next_is_a_mask(self) -> bool:
        """Return True for a mask, the last activation of a tuple, which DeepSpeed sends as float16."""
        self.moved += 1
        if not (self.engine.has_attention_mask or self.engine.has_bool_tensors):
            return False
        tensors = self.engine.pipe_recv_buf if self.sent is None else self.sent
        return isinstance(tensors, tuple) and self.moved == len(tensors)


_running: ContextVar[_Batch] = ContextVar("flash_allreduce_tensors_of_a_stage")


def _counted(original: Function, site: Site, config: FlashConfig, *, sends_it: bool) -> Function:
    """Return DeepSpeed's own sends, or receives, counted at `site`: a width would quantize them."""
    reason = is_full(site.role.widths[0])

    @functools.wraps(original)
    def exchange(self: Any, buffer_id: int) -> None:
        if not sends_it:
            counters.record_full_precision(site, reason if config.enabled else DISABLED, 0)
        with counted_at(site, config):
            original(self, buffer_id)

    return exchange


def _served(original: Function, name: str, reduction: Reduction | None) -> Function:
    path, site = _FUNCTIONS[name]
    if reduction is not None:
        site = reduction.site(site)
        if not widths(reduction.config):
            return _counted(original, site, reduction.config, sends_it=path == "p2p.send")

    def one(tensor: Tensor, stage: int) -> None:
        assert reduction is not None
        running = _running.get()
        engine = running.engine
        mask = running.next_is_a_mask() and site.role is Role.PIPELINE  # a mask has no gradient
        how: dict[str, Any] = {"config": reduction.config, "site": site, "step": reduction.finished_steps()}
        how["full_precision"] = MASK if mask else None
        peer = engine.grid.stage_to_global(stage_id=stage)
        if path == "p2p.send":
            sends.send(tensor, peer, drawn_as=engine.stage_id, **how)
        else:
            sends.recv(tensor, peer, **how)

    body = rebound(original, path, one)

    @functools.wraps(original)
    def exchange(self: Any, buffer_id: int) -> None:
        assert reduction is not None
        # A send has two ranks only: the stages compare their configurations before the first send, and before a stage
        # waits for the shapes of another one that waits here.
        label = Label("send", site.name, self.grid.get_pipe_parallel_group())
        groups.agree(label, reduction.config, environment.is_on(environment.DISABLE), torch.device(self.device))
        sent = self.pipe_buffers["outputs"][buffer_id] if name == "_exec_send_activations" else None
        token = _running.set(_Batch(self, sent))
        try:
            body(self, buffer_id)
        finally:
            _running.reset(token)

    return exchange
