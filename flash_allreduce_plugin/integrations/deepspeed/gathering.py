"""ZeRO stage 3: quantized gathers of parameter values for the forward and backward pass of an engine.

The optimizer's shard stays exact, and every rank computes with the same rounded bits. The gathers of the engine's
coordinator are quantized. Other gathers are in full precision: GatheredParameters, a checkpoint's consolidated weights,
external parameters at their first use, and parameters below stage3_param_persistence_threshold, which DeepSpeed keeps
for several passes.

A replaced function of the coordinator, on the engine only, sets the pass that gathers. Functions of the process call
the collective, and are unchanged outside such a pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.fields import Hierarchy
from flash_allreduce_plugin.config.wording import shown
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations.deepspeed import replicated
from flash_allreduce_plugin.integrations.deepspeed.reduction import Reduction, given_group
from flash_allreduce_plugin.integrations.deepspeed.section import SECTION
from flash_allreduce_plugin.integrations.patching import Function, Seam
from flash_allreduce_plugin.policy import FROZEN, SMALL, Role, Site
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.runtime.decision import ring_bytes
from flash_allreduce_plugin.runtime.stages import Plain
from flash_allreduce_plugin.telemetry import counters, notices
from flash_allreduce_plugin.telemetry.other_traffic import counted_at, ours

PARAMETERS = Site("deepspeed.stage3.parameters", Role.PARAMETER)
# A site a pass with param_backward_bits, because measurements and decisions of a site are for one width.
BACKWARD = Site("deepspeed.stage3.parameters.backward", Role.PARAMETER_BACKWARD)

PERSISTENT = "below stage3_param_persistence_threshold"
OUTSIDE = "gathered outside forward and backward"

_PARTITIONING = "deepspeed.runtime.zero.partition_parameters"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"


@dataclass(frozen=True, slots=True)
class _Pass:
    """The engine of a gather, its site, the reason for full precision or None, and DeepSpeed's parameter ids."""

    gathering: Gathering
    site: Site
    full_precision: str | None
    numbers: tuple[int, ...]


_pass: ContextVar[_Pass | None] = ContextVar("flash_allreduce_pass_that_gathers", default=None)
# By DeepSpeed's id of a parameter, which is unique in a process.
_owners: WeakValueDictionary[int, Gathering] = WeakValueDictionary()


def wanted(engine: Any, config: FlashConfig) -> bool:
    """Return True if an engine gathers parameters that the configuration quantizes."""
    full = config.param_bits == "full" and config.param_backward_bits in (None, "full")
    return int(engine.zero_optimization_stage()) == 3 and not full


def counts(engine: Any, config: FlashConfig) -> bool:
    """Return True if an engine gathers parameters in full precision that the configuration could quantize."""
    if int(engine.zero_optimization_stage()) != 3 or wanted(engine, config):
        return False
    zero = engine._config.zero_config  # section.refuse_gathers refuses these
    from_disk = zero.offload_param is not None and zero.offload_param.device == "nvme"
    return not zero.use_all_reduce_for_fetch_params and not from_disk


def coordinator_of(engine: Any) -> Any:
    """Return DeepSpeed's PartitionedParameterCoordinator of a stage-3 engine, with or without an optimizer."""
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    return offload.get_param_coordinator()


def doubts(engine: Any, config: FlashConfig) -> list[str]:
    """Return a warning if values have so few bits that the loss rises."""
    lines = []
    for key in ("param_bits", "param_backward_bits") if wanted(engine, config) else ():
        bits = getattr(config, key)
        if bits in (None, "full"):
            continue
        if config.gather_bits is not None:  # overrides the other two
            key, bits = "gather_bits", config.gather_bits
        elif isinstance(config.hierarchical, Hierarchy):
            key, bits = "hierarchical.inter_bits", config.hierarchical.inter_bits
        line = notices.few_bits(key, bits)
        if line is not None and line not in lines:
            lines.append(line)
    return lines


class Gathering:
    """The gathers of one engine's parameters, with its configuration."""

    def __init__(self, engine: Any, reduction: Reduction) -> None:
        self.config = reduction.config
        self._reduction, self._module = reduction, engine.module
        self._tensor_parallel = replicated.is_tensor_parallel(engine)
        self._rounded: set[int] = set()  # ids of parameters with values that may be rounded
        self._own(self._module.parameters())

    def sites(self) -> set[str]:
        return {PARAMETERS.name} | ({BACKWARD.name} if self.config.param_backward_bits is not None else set())

    def batches(self, parameters: Iterable[Any], forward: bool) -> Iterator[tuple[list[Any], _Pass]]:
        """Yield the parameters to gather in batches, each with its pass.

        A parameter is rounded the same in every batch: recomputed activations and resumed runs need that, and DeepSpeed
        prefetches different batches in each pass. So min_bytes is compared with each parameter, and a parameter with
        shards that end within a quantization group is a separate batch.
        """
        site = PARAMETERS if forward or self.config.param_backward_bits is None else BACKWARD
        batches: dict[tuple[str | None, int | None], list[Any]] = {}
        missing = [one for one in parameters if one.ds_status.name == "NOT_AVAILABLE"]
        for one in sorted(missing, key=lambda one: one.ds_id):  # the same order on every rank
            shard, group = shard_and_group(one)
            small = self.config.enabled and shard.nbytes * dist.get_world_size(group) < self.config.min_bytes
            frozen = not (one.requires_grad or self.config.quantize_frozen)
            reason = PERSISTENT if one.ds_persist else FROZEN if frozen else self._is_copy(one)
            reason = reason or (SMALL if small else None)
            alone = reason is None and shard.numel() % self.config.group_size != 0
            batches.setdefault((reason, one.ds_id if alone else None), []).append(one)
        for (reason, _), batch in batches.items():
            self._own(batch)
            if reason is None:
                self._rounded.update(one.ds_id for one in batch)
            yield batch, _Pass(self, site, reason, tuple(one.ds_id for one in batch))

    def all_gather(self, output: Tensor, input: Tensor, group: Any, how: _Pass, theirs: Plain) -> Any:
        """Gather `input` of every rank into `output`, 1-D. Returns a handle; DeepSpeed calls its wait()."""
        if how.full_precision == SMALL:  # not on a rank with another min_bytes
            label = Label("all_gather", how.site.name, given_group(group))
            groups.agree(label, self.config, environment.is_on(environment.DISABLE), output.device)
        return reductions.all_gather(
            output,
            input,
            group,
            self.config,
            async_op=True,
            site=self._reduction.site(how.site),
            step=self._reduction.finished_steps(),
            plain=theirs,
            full_precision=how.full_precision,
            which=how.numbers,
        )

    def exactly(self, parameter: Any) -> None:
        """Prepare a gather by other code, which may read a parameter or write it back: it gets exact values."""
        if parameter.ds_id in self._rounded and parameter.ds_status.name == "AVAILABLE":
            parameter.ds_status = type(parameter.ds_status).NOT_AVAILABLE  # else DeepSpeed keeps the rounded values
        self._rounded.discard(parameter.ds_id)
        if parameter.ds_status.name == "NOT_AVAILABLE":
            shard, world = parameter.ds_tensor, dist.get_world_size(parameter.ds_process_group)
            sent = ring_bytes("all_gather", shard.numel() * shard.element_size() * world, world)
            reason = PERSISTENT if parameter.ds_persist else OUTSIDE
            counters.record_full_precision(self._reduction.site(PARAMETERS), reason, sent)

    def refuse_recomputation(self) -> None:
        """Raise ConfigError if the backward pass has another width and recomputes activations.

        The recomputation would use the weights gathered for the backward pass, which differ from the forward pass's.
        """
        config = self.config
        others = config.gather_bits is not None or isinstance(config.hierarchical, Hierarchy)  # override both
        off = not config.enabled or environment.is_on(environment.DISABLE)
        if off or others or config.param_backward_bits in (None, config.param_bits):
            return
        raise ConfigError(
            f"{SECTION}.param_backward_bits={shown(config.param_backward_bits)} and activation checkpointing exclude "
            "each other: activations would be computed a second time with other weights than those of the forward "
            f"pass, at param_bits={shown(config.param_bits)}; leave param_backward_bits out."
        )

    def close(self) -> None:
        """Stop quantizing the engine's gathers: drop the rounded values that it holds and does not use."""
        for parameter in self._module.parameters():
            number = getattr(parameter, "ds_id", -1)
            if _owners.get(number) is not self:
                continue
            del _owners[number]
            held = number in self._rounded and parameter.ds_status.name == "AVAILABLE"
            if held and not parameter.ds_active_sub_modules:
                parameter.partition()
            if parameter.requires_grad:  # hpZ's shards are cut from gathered values; DeepSpeed creates them again
                parameter.ds_secondary_tensor = None
        self._rounded.clear()

    def _is_copy(self, parameter: Any) -> str | None:
        """Return why a parameter with a copy on every tensor-parallel rank is gathered in full precision, or None.

        The ranks would compute with different roundings of it, and the copies would drift apart.
        """
        from deepspeed.runtime.utils import is_model_parallel_parameter

        return (
            replicated_params.REASON if self._tensor_parallel and not is_model_parallel_parameter(parameter) else None
        )

    def _own(self, parameters: Iterable[Any]) -> None:
        _owners.update({one.ds_id: self for one in parameters if hasattr(one, "ds_id")})


def shard_and_group(parameter: Any) -> tuple[Tensor, Any]:
    """Return the shard of the next gather, and the group of its ranks: a node's with hpZ's secondary shards."""
    if parameter.ds_secondary_tensor is not None:
        return parameter.ds_secondary_tensor, parameter.ds_zero_param_process_group
    return parameter.ds_tensor, parameter.ds_process_group


def clear_padding(parameter: Any) -> None:
    """Write zeros behind the last element of the shard of the next gather.

    DeepSpeed leaves uninitialized memory there in the shards of the last ranks; a NaN there would spoil a group.
    """
    shard, group = shard_and_group(parameter)
    held = parameter.ds_numel - dist.get_rank(group) * shard.numel()
    if held < shard.numel() and shard.is_floating_point():
        shard[max(held, 0) :].zero_()


# ---- seams


def of_engine(gathering: Gathering | Reduction | None) -> list[Seam]:
    """Return the seam on an engine's coordinator. None: only to verify the function.

    A Reduction: for an engine with gathers in full precision, which are counted.
    """
    if not isinstance(gathering, Reduction):
        replacement: Function = functools.partial(_in_a_pass, gathering=gathering)
        watched: Function = functools.partial(_watched, gathering=gathering)
    else:
        replacement = functools.partial(_counted, site=gathering.site(PARAMETERS), config=gathering.config)
        watched = _unwatched
    return [
        Seam(
            "deepspeed.stage3.pass",
            _COORDINATOR,
            "PartitionedParameterCoordinator._PartitionedParameterCoordinator__all_gather_params_",
            ("self", "params", "forward", "quantize"),
            replacement,
            "tells which gathers are of a forward or a backward pass",
        ),
        Seam(
            "deepspeed.stage3.fetch",
            _COORDINATOR,
            "PartitionedParameterCoordinator.fetch_sub_module",
            (("args", "kwargs"), ("self", "current_submodule", "forward")),
            watched,
            "notices a forward pass inside a backward pass: activation checkpointing",
        ),
    ]


def of_process() -> list[Seam]:
    """Return the seams of DeepSpeed's functions in the process that are replaced while an engine gathers quantized."""
    return [
        Seam(
            "deepspeed.stage3.gather",
            _PARTITIONING,
            "_dist_allgather_fn",
            ("input_tensor", "output_tensor", "group"),
            _gathered,
            "all-gather of parameters at stage 3, for the forward and the backward pass",
        ),
        Seam(
            "deepspeed.stage3.outside",
            _PARTITIONING,
            "Init._all_gather",
            (("args", "kwargs"), ("self", "param_list", "async_op", "hierarchy")),
            _gathered_exactly,
            "gives all but the two passes exact parameters, and counts them",
        ),
    ]


def _counted(original: Function, site: Site, config: FlashConfig) -> Function:
    @functools.wraps(original)
    def __all_gather_params_(self: Any, params: Any, forward: bool, quantize: bool = False) -> None:
        with counted_at(site, config):
            original(self, params, forward, quantize)

    return __all_gather_params_


def _in_a_pass(original: Function, gathering: Gathering | None) -> Function:
    @functools.wraps(original)
    def __all_gather_params_(self: Any, params: Any, forward: bool, quantize: bool = False) -> None:
        assert gathering is not None
        from deepspeed.accelerator import get_accelerator

        for batch, how in gathering.batches(params, forward):
            # The stream on which DeepSpeed reads them.
            with get_accelerator().stream(self._PartitionedParameterCoordinator__allgather_stream):
                for one in batch:
                    clear_padding(one)
            with _gathers(how):
                original(self, batch, forward, quantize)

    return __all_gather_params_


def _watched(original: Function, gathering: Gathering | None) -> Function:
    @functools.wraps(original)
    def fetch_sub_module(self: Any, current_submodule: Any, forward: bool) -> None:
        assert gathering is not None
        if forward and torch._C._current_graph_task_id() != -1:
            gathering.refuse_recomputation()
        original(self, current_submodule, forward)

    return fetch_sub_module


def _unwatched(original: Function) -> Function:
    """Return the function itself: parameters in full precision are the same in every pass."""
    return original


@contextmanager
def _gathers(how: _Pass) -> Iterator[None]:
    token = _pass.set(how)
    try:
        yield
    finally:
        _pass.reset(token)


def _gathered(original: Function) -> Function:
    @functools.wraps(original)
    def _dist_allgather_fn(input_tensor: Tensor, output_tensor: Tensor, group: Any = None) -> Any:
        how = _pass.get()
        if how is None:
            return original(input_tensor, output_tensor, group)
        theirs = functools.partial(original, input_tensor, output_tensor, group)
        return how.gathering.all_gather(output_tensor, input_tensor, group, how, theirs)

    return _dist_allgather_fn


def _gathered_exactly(original: Function) -> Function:
    @functools.wraps(original)
    def _all_gather(self: Any, param_list: Any, *args: Any, **kwargs: Any) -> Any:
        owned = [(owner, one) for one in param_list if (owner := _owners.get(one.ds_id)) is not None]
        if not owned:
            return original(self, param_list, *args, **kwargs)
        for owner, one in owned:
            owner.exactly(one)
        with ours:
            return original(self, param_list, *args, **kwargs)

    return _all_gather
