"""The gather of parameters after a step, where every rank keeps them: ZeRO stages 1 and 2, BF16_Optimizer.

DeepSpeed writes the exact values of this rank's parts over the rounded ones that all ranks hold, and gathers. Here they
stay apart: while DeepSpeed's function runs, the parts that it writes to are meta tensors, into which a copy does
nothing, and what it calls to gather takes the exact values from where the optimizer has them and the held ones from the
flat weights (collectives/weight_differences.py). There is no copy of the weights.
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

_DIGEST = "weights."  # of a checkpoint's numbers: this and the number of a flat tensor


def parameters(stage: int) -> Site:
    """The site of an engine's gathers of parameters."""
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
        """step: gives the finished steps. tensor_parallel: some parameters are split over other ranks. tied: those that
        other stages of a pipeline have too.
        """
        self._config, self._site, self._step, self._tensor_parallel = config, site, step, tensor_parallel
        self._tied = tied
        self._held: dict[int, HeldWeights] = {}  # by the number of the flat tensor
        self._masters: Sequence[Tensor] = ()
        self._groups: Sequence[Sequence[Tensor]] = ()

    def apart(self, original: Function, parts: str, masters: str, groups: str) -> Function:
        """`original`, a method of an optimizer, writing this rank's exact values nowhere.

        parts: its attribute with the ranks' parts of each flat tensor; masters: with this rank's exact values of each;
        groups: with the parameters of each.
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
        """For DeepSpeed's all_gather_dp_groups, of one flat tensor after the other."""
        for number, (weights, master, group) in enumerate(
            zip(groups_flat, self._masters, dp_process_group, strict=True)
        ):
            reductions.all_gather(
                weights,
                master.detach().to(weights.device),  # from where the optimizer is offloaded to
                group,
                self._config,
                site=self._site,
                step=self._step(),
                plain=functools.partial(_theirs, weights, group, start_alignment_factor, allgather_bucket_size),
                held=self._held.setdefault(number, HeldWeights()),
                exact=self._copies(number, weights),
            )

    def numbers(self) -> dict[str, int]:
        """For a checkpoint: how to know again the weights that all ranks hold."""
        known = {number: held.digest for number, held in self._held.items()}
        return {f"{_DIGEST}{number}": digest for number, digest in known.items() if digest is not None}

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        self._held = {}
        for name, digest in numbers.items():
            if name.startswith(_DIGEST):
                held = self._held[int(name.removeprefix(_DIGEST))] = HeldWeights()
                held.digest = int(digest)

    def _copies(self, number: int, weights: Tensor) -> list[replicated_params.Range]:
        """Where the weights have parameters that every tensor-parallel rank, or another stage, has a copy of."""
        if not self._tensor_parallel and not self._tied:
            return []
        from deepspeed.runtime.utils import is_model_parallel_parameter

        def has_copies(one: Tensor) -> bool:
            whole = self._tensor_parallel and not is_model_parallel_parameter(one)
            return whole or any(one is weight for weight in self._tied)

        return replicated_params.within((one.data for one in self._groups[number] if has_copies(one)), weights)


def counted(site: Site, config: FlashConfig) -> Function:
    """DeepSpeed's all_gather_dp_groups, whose gathers count at `site`: param_bits would quantize them."""

    def all_gather_dp_groups(*args: Any, **kwargs: Any) -> None:
        from deepspeed.runtime import utils

        with counted_at(site, config):
            utils.all_gather_dp_groups(*args, **kwargs)

    return all_gather_dp_groups


def _theirs(weights: Tensor, group: dist.ProcessGroup, start_alignment_factor: int, allgather_bucket_size: int) -> None:
    from deepspeed.runtime.utils import all_gather_dp_groups

    parts = list(weights.split(weights.numel() // group.size()))
    all_gather_dp_groups([weights], [parts], [group], start_alignment_factor, allgather_bucket_size)
