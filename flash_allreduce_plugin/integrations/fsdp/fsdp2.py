"""torch's FSDP2 (`fully_shard`): gradients, and parameters on request, through its custom communication.

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(fap.FlashReduceScatter(fap.FlashConfig(bits=8)))

Each module needs the setting; a module without it reduces in full precision. A reduce-scatter rounds once. With
replicated shards (HSDP on a mesh of two dimensions) the all-reduce between the replicas is torch's own and stays in
full precision. To quantize it too, shard over one dimension and reduce over the other by FlashAllReduce.

With tensor parallelism (DTensors on a mesh of more dimensions) a module has split parameters, and others with a copy on
every tensor-parallel rank, which stay equal (replicated_params.py).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

# torch exports these two only here; they are in the signatures of public methods.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from flash_allreduce_plugin.api import checks, reductions
from flash_allreduce_plugin.collectives import messages, replicated_params
from flash_allreduce_plugin.collectives.error_feedback import Feedback, Slot
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.config import FlashConfig, refusals
from flash_allreduce_plugin.errors import PatchError
from flash_allreduce_plugin.integrations import patching
from flash_allreduce_plugin.policy import Site, widths_follow_errors
from flash_allreduce_plugin.runtime import checkpoint
from flash_allreduce_plugin.telemetry import notices, other_traffic, run_log, unreduced
from flash_allreduce_plugin.telemetry.notices import FirstPasses
from flash_allreduce_plugin.telemetry.passes import Passes
from flash_allreduce_plugin.telemetry.unreduced import Reductions

GRADIENTS = Site("fsdp.gradients")
REPLICAS = Site("fsdp.replicas")
PARAMETERS = Site("fsdp.parameters")


LACKS = {
    "include": "which torch does not tell the module",
    "exclude": "which torch does not tell the module",
    "warmup_steps": "which torch does not tell the step",
    **dict.fromkeys(
        ("param_bits", "param_backward_bits", "quantize_frozen"), "where FlashAllGather gathers parameters at `bits`"
    ),
}
# Variables of FSDP2's foreach_reduce, which passes little to its hooks.
_READ = {
    "fsdp_params",
    "padded_unsharded_sizes",
    "reduce_scatter_group",
    "all_reduce_group",
    "force_sum_reduction_for_comms",
    "all_reduce_grads",
}
# By comm_ctx, which the groups of parameters of a model share.
_models: WeakKeyDictionary[Any, _Model] = WeakKeyDictionary()
# One for each model, by the comm_ctx of its groups of parameters.
_first_passes: WeakKeyDictionary[Any, FirstPasses] = WeakKeyDictionary()


def first_passes(config: FlashConfig, attached_to: str | None) -> FirstPasses:
    """Return the FirstPasses of the model in FSDP2's present reduction or gather."""
    calls = patching.locals_of("post_backward", "unshard") or {}
    model = getattr(calls.get("self"), "comm_ctx", FirstPasses)
    found = _first_passes.get(model)
    if found is None:
        found = _first_passes[model] = FirstPasses(config, attached_to)
    return found


class _Model:
    """The reductions of one model, and the first parameter of each module that was reduced."""

    def __init__(self) -> None:
        self._first: WeakSet[Any] = WeakSet()
        self._reductions = Reductions("FSDP2", self._with_gradients)
        self._all_reduced: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # the step of the optimizers
        self._said = False

    def noted(self, calls: Mapping[str, Any]) -> None:
        """Note that the gradient of a module is reduced. calls: variables of foreach_reduce."""
        self._first.add(calls["fsdp_params"][0])
        self._reductions.noted()

    def all_reduced(self, calls: Mapping[str, Any]) -> None:
        """Note a reduction between replicas, and print a line if it happens in every micro-batch."""
        first = calls["fsdp_params"][0]
        again = first.sharded_param.grad is not None and self._all_reduced.get(first) == unreduced.steps
        self._all_reduced[first] = unreduced.steps
        if again and not self._said:
            self._said = True
            notices.say(
                "FSDP2: gradients are reduced between the replicas more than once in a step of the optimizer; to send "
                "them once, call model.set_requires_all_reduce(False) before all micro-batches but the last one, and "
                "set_requires_all_reduce(True) before that one."
            )

    def _with_gradients(self) -> list[torch.Tensor]:
        """Return the shards with gradients that wait for a reduction."""
        return [
            one.sharded_param
            for one in self._first
            if one.unsharded_accumulated_grad is not None
            or getattr(getattr(one, "_unsharded_param", None), "grad", None) is not None
        ]


class _Configured:
    """The base of every class here."""

    _lacks: Mapping[str, str] = LACKS
    _serves: Container[str] = ()  # allowed keys of other integrations
    _attached_to: str | None = "FSDP2"  # None: the line was printed

    def __init__(self, config: FlashConfig | None = None) -> None:
        """config: FlashConfig.from_env() if None.

        Raises TypeError if it is no FlashConfig; ConfigError for `include`, `exclude`, `warmup_steps` and the keys of
        Megatron.
        """
        self.config = refusals.serve(config, type(self).__name__, self._lacks, self._serves)
        run_log.start(self.config)
        other_traffic.attach(self)

    def _step(self) -> int | None:
        """Return the finished training steps, for warmup_steps; None: not counted."""
        return None


class _Allocates:
    """The part of torch's interface that allocates buffers."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gradients(_Configured):
    """A reduction of gradients, and an owner of residuals (checkpoint.Owner)."""

    def __init__(self, config: FlashConfig | None = None) -> None:
        """config: FlashConfig.from_env() if None."""
        super().__init__(config)
        self.feedback = Feedback.from_config(self.config) if self.config.error_feedback else None
        self._passes = Passes()
        # Modules by their first parameter, numbered in the order of their first reductions.
        self._modules: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._numbers = itertools.count()
        checkpoint.register("fsdp", self)

    def _begin(self, site: Site, calls: Mapping[str, Any]) -> Site:
        """Note that a module's gradient will be reduced. Return the site of its model.

        calls: variables of foreach_reduce.
        """
        passes = first_passes(self.config, self._attached_to)
        passes.at(self.config, (id(self), self._number(calls)))
        note(calls)
        return passes.of(site)

    def numbers(self) -> dict[str, float]:
        return {}

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        pass

    def _slot(self, calls: Mapping[str, Any]) -> Slot | None:
        """Return the slot of a module's residual. calls: variables of foreach_reduce."""
        if self.feedback is None:
            return None
        number = self._number(calls)
        if self._passes.begins(number):
            self.feedback.begin()
        return self.feedback.slot(number)

    def _number(self, calls: Mapping[str, Any]) -> int:
        """Return the number of the module in reduction."""
        first = calls["fsdp_params"][0]
        if first not in self._modules:
            self._modules[first] = next(self._numbers)
        return self._modules[first]


class FlashReduceScatter(Gradients, _Allocates, ReduceScatter):
    """For `FSDPModule.set_custom_reduce_scatter`: gradients at `bits` (`reduce_bits`). Counters: "fsdp.gradients".

    All operators of FSDP work: SUM, AVG, and PREMUL_SUM, its operator for a custom divisor.

    feedback: with `error_feedback`, the residuals, else None. fap.state_dict has them: save it next to the model on
    every rank. An object that several modules share, of one model or of several, keeps a residual for each module,
    numbered in the order of their first reductions.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce-scatter input_tensor [world * numel] into output_tensor [numel], in FSDP's dtype of reduction.

        Raises PatchError if the caller is not FSDP2, or in an unknown form.
        """
        calls = _reduction("FlashReduceScatter")
        site = self._begin(GRADIENTS, calls)
        numel, found = output_tensor.numel(), copies_in(calls, self.config)
        return reductions.reduce_scatter(
            output_tensor,
            input_tensor,
            op,
            group,
            self.config,
            async_op=async_op,
            site=site,
            step=self._step(),
            feedback=self._slot(calls),
            exact=in_parts(found, numel, group.size()),
        )


class FlashAllReduce(Gradients):
    """For `FSDPModule.set_all_reduce_hook`: averages reduce-scattered gradients over the replicas of their shards.

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(module, mesh=mesh["shard"])
        module.set_all_reduce_hook(fap.FlashAllReduce(mesh["replicate"].get_group(), fap.FlashConfig(bits=4)))

    At `bits` (`reduce_bits`, `gather_bits`). Counters: "fsdp.replicas". The hook always averages: the divisor of
    `set_gradient_divide_factor` must not count the replicas. In full precision the result equals that of torch's HSDP,
    with the same bits if NCCL averages, or if the number of replicas or shards is a power of two.

    feedback: with `error_feedback`, the residuals, else None. fap.state_dict has them: save it next to the model on
    every rank. A hook that several modules share keeps a residual for each, as FlashReduceScatter does.
    """

    def __init__(self, group: dist.ProcessGroup, config: FlashConfig | None = None) -> None:
        """group: the ranks with the same shard as this one. config: FlashConfig.from_env() if None.

        Raises TypeError if group is no ProcessGroup, or config no FlashConfig; ValueError if this rank is not a member
        of the group; ConfigError as every class here.
        """
        if not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(
                f"group is {type(group).__name__}; expected the ProcessGroup of the replicas, for example "
                'mesh["replicate"].get_group().'
            )
        self.group = checks.group_of(group)
        super().__init__(config)
        self._sharded_over: dist.ProcessGroup | None = None  # the last group that was checked
        self._partial: dict[tuple[Any, ...], torch.Tensor] = {}  # sums of micro-batches, by the parameters

    def __call__(self, reduce_output: torch.Tensor) -> None:
        """Average reduce_output [numel], this rank's output of FSDP's reduce-scatter, in FSDP's dtype of reduction.

        Raises PatchError if the caller is not FSDP2, or in an unknown form; ValueError if torch reduces over replicas
        itself, or if the group has ranks of other shards.
        """
        calls = _reduction("FlashAllReduce")
        site = self._begin(REPLICAS, calls)
        self._check(calls, reduce_output.device)
        if not self._is_last(reduce_output, calls):
            return
        all_reduced(calls)
        if reduce_output.is_cuda:
            # The tensor belongs to the reduce-scatter's stream. torch keeps it until its own all-reduce is done, but
            # not for a hook: the next module's reduce-scatter could reuse the memory of a call in flight.
            reduce_output.record_stream(torch.cuda.current_stream())
        reductions.all_reduce(
            reduce_output,
            dist.ReduceOp.AVG,
            self.group,
            self.config,
            site=site,
            feedback=self._slot(calls),
            exact=copies_in(calls, self.config),
            plain=lambda: self._in_full_precision(reduce_output, calls["force_sum_reduction_for_comms"]),
        )

    def _is_last(self, gradient: torch.Tensor, calls: Mapping[str, Any]) -> bool:
        """Add the sum of the earlier micro-batches to `gradient`. Return False if set_requires_all_reduce is False.

        Then the gradient is added to the sum, as in torch's HSDP, and torch accumulates zeros.
        """
        parameters = tuple(calls["fsdp_params"])
        partial = self._partial.pop(parameters, None)
        if any(not set(others).isdisjoint(parameters) for others in self._partial):
            raise ValueError(
                "the micro-batches of a step give gradients to different parameters of a module; FlashAllReduce and "
                "set_requires_all_reduce(False) need the same ones; leave set_requires_all_reduce at True."
            )
        if calls["all_reduce_grads"]:
            if partial is not None:
                gradient += partial
            return True
        self._partial[parameters] = gradient.clone() if partial is None else partial.add_(gradient)
        gradient.zero_()
        return False

    def _in_full_precision(self, gradient: torch.Tensor, only_sums: bool) -> None:
        """Average in full precision by the operator of torch's HSDP."""
        has_average = self.group._get_backend(gradient.device).name() != "gloo"
        if has_average and not only_sums and gradient.dtype in (torch.float32, torch.bfloat16):
            dist.all_reduce(gradient, dist.ReduceOp.AVG, group=self.group)
        else:
            dist.all_reduce(gradient, group=self.group)
            gradient.div_(self.group.size())

    def _check(self, calls: Mapping[str, Any], device: torch.device) -> None:
        if calls["all_reduce_group"] is not None:
            raise ValueError(
                "FlashAllReduce is the hook of a module whose replicas torch reduces itself; shard it over one "
                'dimension of the mesh: fully_shard(module, mesh=mesh["shard"]).'
            )
        shards = calls["reduce_scatter_group"]
        if self._sharded_over is shards:
            return
        both = set(dist.get_process_group_ranks(self.group)) & set(dist.get_process_group_ranks(shards))
        if both != {dist.get_rank()}:
            raise ValueError(
                f"the group of FlashAllReduce has ranks {sorted(both)} of one group of shards; expected this rank "
                "alone, and those of other groups that have the same shard."
            )
        held = messages.gather(
            struct.pack("<qq", shards.rank(), shards.size()),
            Label("all_reduce", REPLICAS.name, self.group),
            device,
            "comparing the shards of the replicas",
        )
        if len(set(held)) > 1:
            ranks = dist.get_process_group_ranks(self.group)
            which = [struct.unpack("<qq", one)[0] for one in held]
            raise ValueError(
                f"the ranks {ranks} of FlashAllReduce's group hold the shards {which}; expected ranks of one shard, "
                'for example mesh["replicate"].get_group().'
            )
        self._sharded_over = shards


def note(calls: Mapping[str, Any]) -> None:
    """Note that the gradient of a module is reduced."""
    model = _model()
    if model is not None:
        model.noted(calls)


def all_reduced(calls: Mapping[str, Any]) -> None:
    """Note that the gradient of a module is reduced between replicas."""
    model = _model()
    if model is not None:
        model.all_reduced(calls)


def _model() -> _Model | None:
    """Return the model of the module that FSDP2 reduces; None if its post_backward is not the caller."""
    common = getattr((patching.locals_of("post_backward") or {}).get("self"), "comm_ctx", None)
    if common is None:
        return None
    if common not in _models:
        _models[common] = _Model()
    return _models[common]


def _reduction(who: str) -> Mapping[str, Any]:
    """Return the variables of the calling function."""
    calls = patching.locals_of("foreach_reduce") or {}
    if not calls.keys() >= _READ:
        raise PatchError(
            f"{who} was not called by foreach_reduce of FSDP2 as torch 2.11 to 2.13 have it, and does not see which "
            "parameters are copies on tensor-parallel ranks."
        )
    return calls


def copies_in(calls: Mapping[str, Any], config: FlashConfig) -> list[replicated_params.Copy]:
    """Return the copies, on tensor-parallel ranks, in a rank's part of the gradients.

    The shard of a copy is whole here: the first dimension is cut at the same rows on all tensor-parallel ranks.
    """
    sharded = [parameter.sharded_param for parameter in calls["fsdp_params"]]
    found = replicated_params.among(
        [replicated_params.sharding(one.device_mesh, one.placements) for one in sharded],
        widths_follow_errors(config),
    )
    shards = 1 if calls["reduce_scatter_group"] is None else calls["reduce_scatter_group"].size()
    whole, first = [], 0
    for size, one, parameter in zip(calls["padded_unsharded_sizes"], found, calls["fsdp_params"], strict=True):
        end = first + size.numel() // shards
        if one and first < end:
            whole.append(
                replicated_params.Copy(replicated_params.number_of(parameter), ((first, end),), cut_alike=True)
            )
        first = end
    return whole


def in_parts(found: Sequence[replicated_params.Copy], numel: int, world: int) -> list[replicated_params.Copy]:
    """Return the same for the input of the reduce-scatter, which has each rank's parts of all parameters in turn."""
    starts = range(0, world * numel, numel) if numel else ()
    return [
        replace(one, pieces=tuple((start + first, start + end) for start in starts for first, end in one.pieces))
        for one in found
    ]


class FlashAllGather(_Configured, _Allocates, AllGather):
    """For `FSDPModule.set_custom_all_gather`: parameters at `bits` (`gather_bits`). Counters: "fsdp.parameters".

    The optimizer's shards stay exact; forward and backward passes compute with rounded values. Use 8 bits, and measure.
    """

    _said = False
    _exactly: str | None = None  # the reason for full precision

    def _begin(self, site: Site, calls: Mapping[str, Any]) -> Site:
        """Note that parameters will be gathered. Return the site of their model."""
        if self._attached_to is not None and not FlashAllGather._said:
            FlashAllGather._said = True
            notices.say(notices.attached(self._attached_to, f"parameters in {self.config.bits} bits", self.config))
        return first_passes(self.config, self._attached_to).of(site)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather input_tensor [numel] of every rank into output_tensor [world * numel]. Done on return, even async."""
        site = self._begin(PARAMETERS, {})
        # FSDP waits only for handles of torch's type.
        reductions.all_gather(
            output_tensor,
            input_tensor,
            group,
            self.config,
            site=site,
            step=self._step(),
            full_precision=self._exactly,
        )
