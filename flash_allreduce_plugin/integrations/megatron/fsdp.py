"""Megatron-FSDP (`--use-megatron-fsdp`, and the package megatron-fsdp): its buckets, and its version 2.

    data_parallel_sharding_strategy    gradients                                  parameters
    no_shard                           all-reduce                                 no gather
    optim (ZeRO 1)                     reduce-scatter of a step                   differences, once a step
    optim_grads (ZeRO 2)               reduce-scatter of every micro-batch        differences, once a step
    optim_grads_params (ZeRO 3)        reduce-scatter of every micro-batch        values, in both passes

With several instances of the optimizer (HSDP), gradients are then all-reduced between the instances. With
outer_dp_sharding_strategy "optim" they are reduce-scattered, and parameters are gathered between the instances by
differences. fsdp_gradients.py and fsdp_parameters.py have the seams.

A bucket has padding, which Megatron-FSDP leaves uninitialized. A NaN there would spoil a group that parameters share
with the padding: the seams write zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.collectives.replicated_params import Range
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.refusals import by_hand
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations.megatron import replicated
from flash_allreduce_plugin.integrations.megatron.data_parallel import Residuals
from flash_allreduce_plugin.integrations.patching import Function, Seam
from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.telemetry import notices

VERSION_2 = (
    "version 2 of Megatron-FSDP (megatron_fsdp.experimental) is not supported yet; shard with version 1 "
    "(megatron_fsdp.fully_shard, --use-megatron-fsdp), or leave grad_bits and param_bits at full"
)
_said: set[str] = set()


@dataclass(frozen=True)
class Host:
    """The integration that the seams belong to.

    package: the module of Megatron-FSDP. name: the first part of the names of sites.
    config, step, full_precision: asked at every call. reduces: called when gradients are reduced, which a training
    step begins with. residuals: of error_feedback.
    """

    package: str
    name: str
    config: Callable[[], FlashConfig]
    step: Callable[[], int]
    full_precision: Callable[[], str | None]
    reduces: Callable[[], object]
    residuals: Residuals

    @property
    def module(self) -> str:
        return f"{self.package}.param_and_grad_buffer"

    @property
    def gradients(self) -> Site:
        """The site of reductions."""
        return Site(f"{self.name}.gradients", Role.GRADIENT)

    @property
    def parameters(self) -> Site:
        """The site of gathers by values."""
        return Site(f"{self.name}.parameters", Role.PARAMETER)

    @property
    def differences(self) -> Site:
        """The site of gathers by differences."""
        return Site(f"{self.name}.parameter_differences", Role.PARAMETER_DIFFERENCE)


def version_2(host: Host) -> list[Seam]:
    """Return the seam that refuses version 2, which releases from 0.19 of megatron-core on have."""
    return [
        Seam(
            f"{host.name}.version_2",
            f"{host.package}.experimental.module",
            "FsdpModule.__init__",
            ("self", "mesh", ...),
            lambda original: _refused(original, host),
            "refuses version 2 of Megatron-FSDP",
            optional=True,
        )
    ]


def _refused(original: Function, host: Host) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, *positional: Any, **keywords: Any) -> None:
        config = host.config()
        if by_hand(config, "grad_bits", "param_bits"):
            raise ConfigError(f"{VERSION_2}.")
        if config.grad_bits != "full" and VERSION_2 not in _said:
            _said.add(VERSION_2)
            notices.say(f"in full precision: {VERSION_2}.")
        original(self, *positional, **keywords)

    return __init__


def places(buffer: Any) -> list[tuple[Range, Any]]:
    """Return the parameters of a bucket and their elements, ascending. buffer: a DataParallelBuffer."""
    start = buffer.bucket_index.global_data_index
    found = []
    for parameter, number in buffer.param_idx.items():
        item = buffer.item_index_map[number]
        first = item.global_data_index - start
        found.append(((first, first + item.size), parameter))
    return sorted(found, key=lambda place: place[0])


def window(buffer: Any) -> Range:
    """Return the elements of the bucket that `buffer.data` has."""
    if not buffer.is_data_distributed:
        return (0, buffer.bucket_index.size)
    index = buffer.shard_bucket_index
    return (index.bucket_data_index, index.bucket_data_index + index.size)


def clipped(ranges: Iterable[Range], to: Range) -> list[Range]:
    """Return the parts of the ranges inside of `to`, counted from its start."""
    first, last = to
    inside = ((max(start, first) - first, min(end, last) - first) for start, end in ranges)
    return [(start, end) for start, end in inside if start < end]


def clear_padding(buffer: Any, tensor: Tensor, to: Range) -> None:
    """Write zeros where `tensor`, the elements `to` of the bucket, has no parameter."""
    used = [place for place, _ in places(buffer)]
    for start, end in clipped(replicated_params.between(used, buffer.bucket_index.size), to):
        tensor[start:end].zero_()


def copies(dist_index: Any, group: Any, buffer: Any, is_copy: Callable[[Any], bool]) -> list[tuple[Range, Any]]:
    """Return the places of parameters that tensor-parallel ranks have copies of, and that `is_copy` accepts.

    dist_index, group: the FSDPDistributedIndex and the ParameterGroup.
    """
    if tensor_parallel_ranks(dist_index, bool(group.is_expert_param)) == 1:
        return []
    return [(place, one) for place, one in places(buffer) if not _is_split(one) and is_copy(one)]


def tensor_parallel_ranks(dist_index: Any, is_expert: bool) -> int:
    """Return how many ranks the parameters of a model are split among."""
    if dist_index.tp_dim is None:
        return 1
    return int(dist_index.get_submesh(dist_index.tp_dim, is_expert_parallel=is_expert).size())


def has_copied_gradient(parameter: Any) -> bool:
    """Return True if ranks reduce the gradient of a copy, and do not add up parts of it afterwards."""
    return replicated.is_replicated(parameter)


def _is_split(parameter: Any) -> bool:
    if isinstance(parameter, DTensor):
        return not all(placement.is_replicate() for placement in parameter.placements)
    if getattr(parameter, "_tp_duplicated", False):
        return False
    return bool(getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "_mcore_tp", False))
