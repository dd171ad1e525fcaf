"""The gather of parameters after a step, if every rank keeps them: ZeRO stages 1 and 2, BF16_Optimizer.

DeepSpeed writes the exact values of this rank's parts over the rounded values that all ranks hold, and gathers. Here
the two stay separate. While DeepSpeed's function runs, the parts that it writes to are meta tensors, into which a copy
does nothing. Its gather takes the exact values from the optimizer and the held ones from the flat weights
(collectives/weight_differences.py). There is no copy of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.collectives.weight_differences import HeldWeights
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.patching import Function
from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.telemetry.other_traffic import counted_at

_DIGEST = "weights."  # prefix of a checkpoint's numbers, before the number of a flat tensor


def parameters(stage: int) -> Site:
    """Return the site of an engine's gathers of parameters."""
    return Site(f"deepspeed.stage{stage}.parameters", Role.PARAMETER_DIFFERENCE)


class Parameters:
    """The gathers of one engine's parameters, with its configuration."""

    def __init__(
        self,
        config: FlashConfig,
        site: Site,
        step: Callable[[], int],
        tensor_parallel: bool,
        tied: Sequence[Tensor] = (),
    ) -> None:
        """step: returns the finished steps. tensor_parallel: True if some parameters are split over other ranks.

        tied: parameters that other stages of a pipeline have too.
        """
        self._config, self._site, self._step, self._tensor_parallel = config, site, step, tensor_parallel
        self._tied = tied
        self._held: dict[int, HeldWeights] = {}  # by the number of the flat tensor
        self._masters: Sequence[Tensor] = ()
        self._groups: Sequence[Sequence[Tensor]] = ()

    def apart(self, original: Function, parts: str, masters: str, groups: str) -> Function:
        """Return `original`, a method of an optimizer, that does not write this rank's exact values.

        parts, masters, groups: names of the optimizer's attributes with, for each flat tensor, the ranks' parts, this
        rank's exact values, and the parameters.
        """

        @functools.wraps(original)
        def steps(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            lists: list[list[Tensor]] = getattr(optimizer, parts)
            own = [dist.get_rank(group=group) for group in optimizer.real_dp_process_group]
            kept = [ranks[rank] for ranks, rank in zip(lists, own, strict=True)]
            self._masters, self._groups = getattr(optimizer, masters), getattr(optimizer, groups)
            for ranks, rank, part in zip(lists, own, kept, strict=True):
                ranks[rank] = torch.empty_like(part, device="meta")
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                for ranks, rank, part in zip(lists, own, kept, strict=True):
                    ranks[rank] = part
                self._masters = self._groups = ()

        return steps

    def gather(
        self,
        groups_flat: Sequence[Tensor],
        partitioned_param_groups: Sequence[Sequence[Tensor]],
        dp_process_group: Sequence[dist.ProcessGroup],
        start_alignment_factor: int,
        allgather_bucket_size: int,
    ) -> None:
        """Replace DeepSpeed's all_gather_dp_groups, for one flat tensor after another."""
        for number, (weights, master, group) in enumerate(
            zip(groups_flat, self._masters, dp_process_group, strict=True)
        ):
            reductions.all_gather(
                weights,
                master.detach().to(weights.device),  # from the device of an offloaded optimizer
                group,
                self._config,
                site=self._site,
                step=self._step(),
                plain=functools.partial(_theirs, weights, group, start_alignment_factor, allgather_bucket_size),
                held=self._held.setdefault(number, HeldWeights()),
                exact=self._copies(number, weights),
            )

    def numbers(self) -> dict[str, int]:
        """Return the digests of the held weights for a checkpoint."""
        known = {number: held.digest for number, held in self._held.items()}
        return {f"{_DIGEST}{number}": digest for number, digest in known.items() if digest is not None}

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        self._held = {}
        for name, digest in numbers.items():
            if name.startswith(_DIGEST):
                held = self._held[int(name.removeprefix(_DIGEST))] = HeldWeights()
                held.digest = int(digest)

    def _copies(self, number: int, weights: Tensor) -> list[replicated_params.Range]:
        """Return the ranges of parameters with a copy on every tensor-parallel rank, or on another stage."""
        if not self._tensor_parallel and not self._tied:
            return []
        from deepspeed.runtime.utils import is_model_parallel_parameter

        def has_copies(one: Tensor) -> bool:
            whole = self._tensor_parallel and not is_model_parallel_parameter(one)
            return whole or any(one is weight for weight in self._tied)

        return replicated_params.within((one.data for one in self._groups[number] if has_copies(one)), weights)


def counted(site: Site, config: FlashConfig) -> Function:
    """Return DeepSpeed's all_gather_dp_groups with its gathers counted at `site`: param_bits would quantize them."""

    def all_gather_dp_groups(*args: Any, **kwargs: Any) -> None:
        from deepspeed.runtime import utils

        with counted_at(site, config):
            utils.all_gather_dp_groups(*args, **kwargs)

    return all_gather_dp_groups


def _theirs(weights: Tensor, group: dist.ProcessGroup, start_alignment_factor: int, allgather_bucket_size: int) -> None:
    from deepspeed.runtime.utils import all_gather_dp_groups

    parts = list(weights.split(weights.numel() // group.size()))
    all_gather_dp_groups([weights], [parts], [group], start_alignment_factor, allgather_bucket_size)
