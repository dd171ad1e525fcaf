"""torch's context parallelism (torch.distributed.tensor.experimental): the exchanges of attention between its ranks.

    fap.context_parallel.enable(fap.FlashConfig(attention_bits=8, backward_bits=8))

    ring, rotated by all-gather (torch's default)     keys and values: one rounding
    ring, rotated by all-to-all                       keys and values: one rounding a hop
    ring, backward                                    keys and values again; their gradients, which each rank adds to:
                                                      one rounding a hop, if backward_bits is not "full"
    flex attention                                    all-gather of keys and values; reduce-scatter of their gradients

A rank's own keys and values stay exact in the ring. In a graph of torch.compile torch's own collectives stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations.contract import Integration
from flash_allreduce_plugin.integrations.optimizer_steps import optimizer_steps
from flash_allreduce_plugin.integrations.patching import Function, Patchset, Seam, names_used, rebound
from flash_allreduce_plugin.integrations.registry import BY_NAME
from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.telemetry import notices
from flash_allreduce_plugin.telemetry.report import Report

FORWARD = Site("context_parallel.forward", Role.ATTENTION)
BACKWARD = Site("context_parallel.backward", Role.ATTENTION_GRADIENT)

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_ROW = BY_NAME["context_parallel"]
_COVERS = {
    FORWARD: "keys and values, in the ring and for flex attention",
    BACKWARD: "gradients of keys and values",
}

_site: ContextVar[Site] = ContextVar("flash_allreduce_context_parallel", default=FORWARD)
_HANDLE = "_flash_allreduce_handle"  # of a tensor that is on its way


def enable(config: FlashConfig | None = None) -> None:
    """Quantize the exchanges of torch's context parallelism from the next call on, the same on every rank.

    config: default `FlashConfig.from_env()`; warmup_steps counts the steps of the optimizer. Enabled already: only the
    configuration changes.
    Raises TypeError where config is no FlashConfig; ConfigError for keys that have no effect here, or if attention_bits
    is "full"; PatchError, changing nothing, if this torch's functions are not as this version knows them.
    """
    integration.enable(config)


def by_environment() -> None:
    """Enable by FLASH_ALLREDUCE_ATTACH, once the program has imported torch's functions. A configuration that is
    refused ends the program. `all` skips one without attention_bits.
    """
    integration.by_environment()


def disable() -> None:
    """Put torch's own functions back. Does nothing if not enabled.

    Raises PatchError, changing nothing, if one of them was replaced again since.
    """
    integration.disable()


def is_enabled() -> bool:
    """Return True between enable and disable."""
    return integration.is_on


def report() -> Report:
    """Return the coverage and the counts of each site since `reset_stats`; empty counts if there were no calls."""
    return integration.report()


class _ContextParallel(Integration):
    def check(self, config: FlashConfig) -> None:
        if config.attention_bits == "full":
            raise ConfigError('attention_bits is "full": context_parallel would quantize nothing; set attention_bits.')
        super().check(config)

    def wanted(self, config: FlashConfig) -> bool:
        return config.attention_bits != "full"

    def started(self, config: FlashConfig) -> None:
        super().started(config)
        self.watch(config)
        back = "exactly" if config.backward_bits == "full" else "too"
        gives = f"keys and values in {config.attention_bits} bits (their gradients {back})"
        notices.say(notices.attached("torch's context parallelism", gives, config, said=self.row.acts))


def seams() -> list[Seam]:
    """Every function of torch's that is replaced; reads nothing of it."""

    def seam(name: str, path: str, signature: tuple[Any, ...], replacement: Function, covers: str) -> Seam:
        return Seam(f"context_parallel.{name}", _MODULE, path, signature, replacement, covers)

    sends, waits = ("self", "curr_buffer"), "waits for the sends"
    return [
        seam("hop", "_AllToAllRotater.exchange_buffers", sends, _hops, "keys, values or gradients to the next rank"),
        seam("hop.end", "_AllToAllRotater.next_buffer", ("self",), _waits, waits),
        seam("gather", "_AllGatherRotater.exchange_buffers", sends, _gathers, "all-gather of keys and values"),
        seam("gather.end", "_AllGatherRotater.next_buffer", ("self",), _waits, waits),
        seam(
            "backward",
            "_templated_ring_attention_backward",
            ("group", "seq_dim", "op", ...),
            lambda original: rebound(original, "_create_rotater", _create_rotater),
            "tells gradients from keys and values",
        ),
        seam(
            "flex",
            "_ContextParallel.flex_input_fn",
            ("self", "module", "args", "kwargs", "mesh"),
            lambda original: rebound(original, "flex_cp_allgather", _flex_gather),
            "all-gather of keys and values for flex attention, reduce-scatter of their gradients",
        ),
    ]


def _patchset() -> Patchset:
    return Patchset("context_parallel", seams(), f"{_ROW.fits} (installed: {torch.__version__})")


integration = _ContextParallel(
    "context_parallel", _patchset, {site.name: (_MODULE, covers) for site, covers in _COVERS.items()}
)


# ---- the ring


def _hops(original: Function) -> Function:
    def permute_tensor(tensor: Tensor, src_dst: list[int], group: dist.ProcessGroup) -> Tensor:
        """Send tensor, 1-D, to this rank's destination in src_dst, as torch's function does."""
        if _in_a_graph(tensor):
            from torch.distributed import _functional_collectives as theirs

            return theirs.permute_tensor(tensor, src_dst, group)
        rank = group.rank()
        going = [len(tensor) if to == src_dst[rank] else 0 for to in range(group.size())]
        coming = [len(tensor) if src_dst[of] == rank else 0 for of in range(group.size())]
        output = torch.empty_like(tensor)
        handle = reductions.all_to_all(output, tensor, coming, going, group, True, **_how(_site.get()))
        return _on_its_way(output, handle)

    return rebound(original, "ft_c.permute_tensor", permute_tensor)


def _gathers(original: Function) -> Function:
    name = "all_gather_single" if "all_gather_single" in names_used(original.__code__) else "all_gather_tensor"

    def all_gather(tensor: Tensor, gather_dim: int, group: dist.ProcessGroup) -> Tensor:
        if _in_a_graph(tensor):
            from torch.distributed import _functional_collectives as theirs

            gathered: Tensor = getattr(theirs, name)(tensor, gather_dim=gather_dim, group=group)
            return gathered
        assert gather_dim == 0 and tensor.dim() == 1
        output = tensor.new_empty(len(tensor) * group.size())
        return _on_its_way(output, reductions.all_gather(output, tensor, group, async_op=True, **_how(_site.get())))

    return rebound(original, f"ft_c.{name}", all_gather)


def _waits(original: Function) -> Function:
    theirs = original.__globals__

    def _maybe_wait(tensor: Tensor) -> Tensor:
        handle = vars(tensor).pop(_HANDLE, None)
        if handle is not None:
            handle.wait()
        waited: Tensor = theirs["_maybe_wait"](tensor)
        return waited

    return rebound(original, "_maybe_wait", _maybe_wait)


def _on_its_way(tensor: Tensor, handle: Any) -> Tensor:
    setattr(tensor, _HANDLE, handle)
    return tensor


class _OfGradients:
    """A rotater of torch's for gradients."""

    def __init__(self, rotater: Any) -> None:
        self._rotater = rotater

    def exchange_buffers(self, curr_buffer: Tensor) -> None:
        token = _site.set(BACKWARD)
        try:
            self._rotater.exchange_buffers(curr_buffer)
        finally:
            _site.reset(token)

    def next_buffer(self) -> Tensor:
        buffer: Tensor = self._rotater.next_buffer()
        return buffer


def _create_rotater(pg: dist.ProcessGroup, seq_dim: int, method: Any = None) -> Any:
    """torch names the method for gradients alone: those cannot be gathered."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    rotater = _attention._create_rotater(pg, seq_dim, method)
    return rotater if method is None else _OfGradients(rotater)


# ---- flex attention


def _flex_gather(key: Tensor, value: Tensor, seq_dim: int, name: str) -> tuple[Tensor, Tensor]:
    if _in_a_graph(key):
        from torch.distributed.tensor.experimental._context_parallel import _attention

        gathered: tuple[Tensor, Tensor] = _attention.flex_cp_allgather(key, value, seq_dim, name)
        return gathered
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return _Gather.apply(key, seq_dim, group), _Gather.apply(value, seq_dim, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        tensor = tensor.contiguous()
        output = tensor.new_empty(group.size(), *tensor.shape)
        reductions.all_gather(output, tensor, group, **_how(FORWARD))
        return torch.cat(output.unbind(), dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        parts: Sequence[Tensor] = gradients[0].chunk(ctx.group.size(), ctx.dim)
        output = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        reductions.reduce_scatter(output, torch.stack(list(parts)), group=ctx.group, **_how(BACKWARD))
        return output, None, None


# ---- both


def _in_a_graph(tensor: Tensor) -> bool:
    """Return True while torch.compile traces: there is nothing to send yet."""
    return type(tensor) is not Tensor or torch.compiler.is_compiling()


def _how(site: Site) -> dict[str, Any]:
    config, first_steps = integration.config, integration.first_steps
    assert config is not None and first_steps is not None, "a seam is in place only between enable and disable"
    first_steps.at(optimizer_steps.finished)
    return {"config": config, "site": site, "step": optimizer_steps.finished}
