"""torch's FSDP2 (`fully_shard`): gradients, and parameters on request, through its custom communication.

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(fap.FlashReduceScatter(fap.FlashConfig(bits=8)))

The setting is a module's own: one that is not given it reduces in full precision. A reduce-scatter rounds once. Where
shards are replicated (HSDP), the all-reduce between the replicas is torch's own and stays in full precision.

Beside tensor parallelism (DTensors on a mesh of more dimensions) a module has parameters that are split and others that
every tensor-parallel rank has a copy of; these are reduced exactly (copies.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

# torch has no other place for these two; they are in the signatures of the public methods that take them.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from flash_allreduce_plugin import checkpoint, dispatch, patching
from flash_allreduce_plugin.collectives import copies
from flash_allreduce_plugin.collectives.error_feedback import Feedback, Slot
from flash_allreduce_plugin.config import FlashConfig, refusals
from flash_allreduce_plugin.errors import PatchError
from flash_allreduce_plugin.policy import Site
from flash_allreduce_plugin.telemetry import beside, notices, run_log
from flash_allreduce_plugin.telemetry.notices import FirstPasses

GRADIENTS = Site("fsdp.gradients")
PARAMETERS = Site("fsdp.parameters")


_LACKS = {
    "include": "which torch does not tell the module",
    "exclude": "which torch does not tell the module",
    "warmup_steps": "which torch does not tell the step",
    **dict.fromkeys(("param_bits", "param_backward_bits"), "where FlashAllGather gathers parameters at `bits`"),
}
_first_passes = FirstPasses("fsdp", "FSDP2")


class _Allocates:
    """The half of torch's interface that makes buffers."""

    def __init__(self, config: FlashConfig | None = None) -> None:
        """config: FlashConfig.from_env() if None.

        Raises TypeError where it is no FlashConfig; ConfigError for `include`, `exclude`, `warmup_steps` and the keys
        of Megatron's.
        """
        self.config = refusals.serve(config, type(self).__name__, _LACKS)
        run_log.start(self.config)
        beside.attach(self)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class FlashReduceScatter(_Allocates, ReduceScatter):
    """For `FSDPModule.set_custom_reduce_scatter`: gradients at `bits` (`reduce_bits`). Counters: "fsdp.gradients".

    Whatever FSDP asks for is done: SUM, AVG, and PREMUL_SUM, its operator for a divisor of one's own.

    feedback: with `error_feedback`, the residuals, else None; fap.state_dict has them, to be saved beside the model on
    every rank. In an object that several modules share they go by the order of the modules in the backward pass.
    """

    def __init__(self, config: FlashConfig | None = None) -> None:
        """config: as of every class here; FlashConfig.from_env() if None."""
        super().__init__(config)
        self.feedback = Feedback.from_config(self.config) if self.config.error_feedback else None
        self._in_pass = False
        checkpoint.register("fsdp", self)

    def numbers(self) -> dict[str, float]:
        return {}

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        pass

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """input_tensor [world * numel] -> output_tensor [numel], in the dtype that FSDP reduces in.

        Raises PatchError where it is not FSDP2 that calls, or not as this version knows it.
        """
        _first_passes.at(self.config)
        return dispatch.reduce_scatter(
            output_tensor,
            input_tensor,
            op,
            group,
            self.config,
            async_op=async_op,
            site=GRADIENTS,
            feedback=self._slot(),
            exact=_copies(input_tensor, group.size(), self.config),
        )

    def _slot(self) -> Slot | None:
        if self.feedback is None:
            return None
        if not self._in_pass:
            self.feedback.begin()
        self._in_pass = True
        # Asked again by every call: a backward pass that fails calls nobody back.
        torch.autograd.Variable._execution_engine.queue_callback(self._pass_ended)
        return self.feedback.slot()

    def _pass_ended(self) -> None:
        self._in_pass = False


def _copies(input: torch.Tensor, world_size: int, config: FlashConfig) -> list[copies.Range]:
    """Where the input of a reduce-scatter has gradients of parameters that tensor-parallel ranks have copies of.

    FSDP puts rank after rank what it gets of one parameter after the other, and tells a custom reduce-scatter nothing
    about it: read in the function that calls.
    """
    calls = patching.locals_of("foreach_reduce") or {}
    parameters, sizes = calls.get("fsdp_params"), calls.get("padded_unsharded_sizes")
    if parameters is None or sizes is None:
        raise PatchError(
            "FlashReduceScatter was not called by foreach_reduce of FSDP2 as torch 2.11 to 2.13 have it, and does not "
            "see which parameters are copies on tensor-parallel ranks."
        )
    sharded = [parameter.sharded_param for parameter in parameters]
    found = copies.among([copies.sharding(one.device_mesh, one.placements) for one in sharded], config)
    ranges = []
    for rank in range(world_size):
        first = rank * (input.numel() // world_size)
        for size, one in zip(sizes, found, strict=True):
            last = first + size.numel() // world_size
            if one and first < last:
                ranges.append((first, last))
            first = last
    return ranges


class FlashAllGather(_Allocates, AllGather):
    """For `FSDPModule.set_custom_all_gather`: parameters at `bits` (`gather_bits`). Counters: "fsdp.parameters".

    The shards that the optimizer steps on stay exact; what a forward and a backward pass compute with is rounded. Use
    8 bits, and measure.
    """

    _said = False

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """input_tensor [numel] of every rank -> output_tensor [world * numel]; done on return, async_op or not."""
        if not FlashAllGather._said:
            FlashAllGather._said = True
            notices.say(notices.attached("FSDP2", f"parameters in {self.config.bits} bits", self.config))
        # FSDP waits only on handles of torch's own type.
        dispatch.all_gather(output_tensor, input_tensor, group, self.config, site=PARAMETERS)
