"""torch's pipelines (torch.distributed.pipelining): the sends of stages.

    fap.pipelining.enable(fap.FlashConfig(pipeline_bits=8, pipeline_backward_bits=8))

    activations to the next stage        pipeline_bits             one rounding
    gradients to the stage before        pipeline_backward_bits    one rounding

Every schedule of torch sends the tensors that a stage's four methods list, and starts the sends in one function. The
methods tell activations from gradients. Shapes are sent elsewhere, before the first batch.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin import environment, policy
from flash_allreduce_plugin.api import sends
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError, PatchError
from flash_allreduce_plugin.integrations.contract import Integration
from flash_allreduce_plugin.integrations.optimizer_steps import optimizer_steps
from flash_allreduce_plugin.integrations.patching import Function, Patchset, Seam
from flash_allreduce_plugin.integrations.registry import BY_NAME
from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.telemetry import counters, notices
from flash_allreduce_plugin.telemetry.other_traffic import ours
from flash_allreduce_plugin.telemetry.report import Report

FORWARD = Site("pipelining.forward", Role.PIPELINE)
BACKWARD = Site("pipelining.backward", Role.PIPELINE_BACKWARD)

_STAGE, _SCHEDULES = "torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules"
_ROW = BY_NAME["pipelining"]
_COVERS = {FORWARD: "activations to the next stage", BACKWARD: "gradients to the stage before"}
_METHODS = {
    "get_fwd_recv_ops": ("fwd_chunk_id", FORWARD),
    "get_fwd_send_ops": ("fwd_chunk_id", FORWARD),
    "get_bwd_recv_ops": ("bwd_chunk_id", BACKWARD),
    "get_bwd_send_ops": ("bwd_chunk_id", BACKWARD),
}
_SITE = "_flash_allreduce_site"  # of a P2POp


def enable(config: FlashConfig | None = None) -> None:
    """Quantize the sends of torch's pipelines from the next call on, the same on every rank.

    config: default `FlashConfig.from_env()`; warmup_steps counts the steps of the optimizer. Enabled already: only the
    configuration changes.
    Raises TypeError where config is no FlashConfig; ConfigError for keys that have no effect here, or if both widths
    are "full"; PatchError, changing nothing, if this torch's functions are not as this version knows them.
    """
    integration.enable(config)


def by_environment() -> None:
    """Enable by FLASH_ALLREDUCE_ATTACH, once the program has imported torch's functions. A configuration that is
    refused ends the program. `all` counts the sends of a configuration without these widths, in full precision.
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


class _Pipelining(Integration):
    def check(self, config: FlashConfig) -> None:
        if not self.wanted(config):
            raise ConfigError(
                'pipeline_bits and pipeline_backward_bits are "full": pipelining would quantize nothing; '
                "set one of them."
            )
        super().check(config)

    def wanted(self, config: FlashConfig) -> bool:
        return {config.pipeline_bits, config.pipeline_backward_bits} != {"full"}

    def by_environment(self) -> None:
        super().by_environment()
        if not self.is_on:
            config = FlashConfig.from_env()
            if config.enabled and not environment.is_on(environment.DISABLE):
                with suppress(PatchError):  # a torch that differs: nothing was asked for
                    self.apply()
                    self.watch(config)

    def started(self, config: FlashConfig) -> None:
        super().started(config)
        self.watch(config)
        widths = (config.pipeline_bits, config.pipeline_backward_bits)
        there, back = ("exactly" if bits == "full" else f"in {bits} bits" for bits in widths)
        gives = f"activations {there}, their gradients {back}"
        notices.say(
            notices.attached("torch's pipelining", gives, config, said=("pipeline_bits", "pipeline_backward_bits"))
        )


def seams() -> list[Seam]:
    """Every function of torch's that is replaced; reads nothing of it."""

    def lists(name: str) -> Seam:
        argument, site = _METHODS[name]
        path = f"_PipelineStageBase.{name}"
        return Seam(
            f"pipelining.{name}",
            _STAGE,
            path,
            ("self", argument),
            lambda original: _named(original, site),
            f"tells {_COVERS[site]} from others",
        )

    start = Seam(
        "pipelining.start", _SCHEDULES, "_batch_p2p", ("p2p_ops", "desc"), _started, "sends and receives between stages"
    )
    return [*map(lists, _METHODS), start]


def _patchset() -> Patchset:
    return Patchset("pipelining", seams(), f"{_ROW.fits} (installed: {torch.__version__})")


integration = _Pipelining(
    "pipelining", _patchset, {site.name: (f"{_SCHEDULES}._batch_p2p", covers) for site, covers in _COVERS.items()}
)


def _named(original: Function, site: Site) -> Function:
    @functools.wraps(original)
    def operations(self: Any, chunk: int) -> list[dist.P2POp]:
        found: list[dist.P2POp] = original(self, chunk)
        for one in found:
            one.tensor = _arrived(one.tensor)
            setattr(one, _SITE, site)
        return found

    return operations


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """An output that tensor parallelism is still reducing (RowwiseParallel), once it is there: the receiver has an
    ordinary tensor, and both ends must see the same.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _started(original: Function) -> Function:
    @functools.wraps(original)
    def _batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:
        if not p2p_ops or not all(hasattr(one, _SITE) for one in p2p_ops):
            return list(original(p2p_ops, desc))
        config, first_steps = integration.config, integration.first_steps
        assert first_steps is not None, "a seam is in place only between enable and disable"
        first_steps.at(optimizer_steps.finished)
        if config is not None:
            _agree(p2p_ops[0], config)
        reason = _plain(config)
        if config is None or reason is not None:
            _count(p2p_ops, reason)
            with ours:
                return list(original(p2p_ops, desc))
        evaluation = not torch.is_grad_enabled() and not config.quantize_evaluation
        return sends.batch_isend_irecv(
            p2p_ops,
            config=config,
            site=[getattr(one, _SITE) for one in p2p_ops],
            step=optimizer_steps.finished,
            full_precision=policy.EVALUATION if evaluation else None,
        )

    return _batch_p2p


def _agree(operation: dist.P2POp, config: FlashConfig) -> None:
    """No rank but its two ends knows of a send: the stages compare their configurations before their first one. None
    of them waits for another before it comes here.
    """
    group = operation.group if operation.group is not None else dist.group.WORLD
    assert group is not None
    disabled = environment.is_on(environment.DISABLE)
    groups.agree(Label("send", FORWARD.name, group), config, disabled, operation.tensor.device)


def _plain(config: FlashConfig | None) -> str | None:
    """Why torch's own function is to send, the same on all ranks; None: a width decides."""
    if environment.is_on(environment.DISABLE):
        return environment.DISABLE
    return None if config is None or config.enabled else policy.DISABLED


def _count(operations: list[dist.P2POp], why: str | None) -> None:
    """why: None: the width of each operation is "full"."""
    widths = {FORWARD: policy.is_full("pipeline_bits"), BACKWARD: policy.is_full("pipeline_backward_bits")}
    for one in operations:
        reason = why or widths[getattr(one, _SITE)]
        nbytes = one.tensor.numel() * one.tensor.element_size()
        sent = nbytes if one.op is dist.isend else 0
        counters.record_full_precision(getattr(one, _SITE), reason, sent, message=nbytes)
