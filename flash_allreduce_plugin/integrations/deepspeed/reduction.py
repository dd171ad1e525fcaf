"""The collectives that an engine's reductions call in place of DeepSpeed's own.

A call in full precision is DeepSpeed's own collective, and is counted. Divisors, dtypes, streams and copies stay
DeepSpeed's, because its functions call these collectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, groupby
from typing import Any

import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.collectives.error_feedback import LOADED, Feedback, Slot
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.deepspeed import replicated
from flash_allreduce_plugin.integrations.deepspeed.parameters import Parameters, parameters
from flash_allreduce_plugin.integrations.deepspeed.section import SECTION
from flash_allreduce_plugin.policy import SPARSE, Site
from flash_allreduce_plugin.runtime import checkpoint
from flash_allreduce_plugin.runtime.decision import ring_bytes
from flash_allreduce_plugin.runtime.stages import Plain
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.notices import FirstSteps
from flash_allreduce_plugin.telemetry.tensorboard import Scalars
from flash_allreduce_plugin.telemetry.unreduced import Reductions

EXPERTS = Site("deepspeed.experts")
TIED = Site("deepspeed.pipeline.tied_gradients")

# Reasons why residuals were dropped, besides those of error_feedback.py.
SKIPPED = "step skipped"
SCALED = "loss scale changed"
# Reason why a tensor-parallel sum stays in full precision.
LOGITS = "logits"

Slices = Sequence[tuple[int, int]]  # (owner, elements) of a flat tensor, in order


def gradients(stage: int) -> Site:
    """Return the site of an engine's dense gradients."""
    return Site(f"deepspeed.stage{stage}.gradients")


# During a call that sends buckets to their owners: the owners of the flat tensor's slices.
_owners: ContextVar[Slices | None] = ContextVar("flash_allreduce_owners_of_slices", default=None)


# During the reduction of a bucket: the ranges of its flat tensor with copies on tensor-parallel ranks or other stages.
_exact: ContextVar[replicated_params.Copied] = ContextVar("flash_allreduce_exact_ranges_of_bucket", default=())


@contextmanager
def owned(slices: Slices | None) -> Iterator[None]:
    """Make `Reduction.all_reduce` send each slice to its owner only, in the block."""
    token = _owners.set(slices)
    try:
        yield
    finally:
        _owners.reset(token)


class Reduction:
    """The collectives of one engine, with its configuration."""

    def __init__(self, engine: Any, config: FlashConfig) -> None:
        self.config = config
        self.stage = int(engine.zero_optimization_stage())
        self.feedback = Feedback.from_config(config) if config.error_feedback else None
        self._engine = engine
        self._tensor_parallel = replicated.is_tensor_parallel(engine)
        self._tied = replicated.tied(engine)
        self.sums: Any = None  # of tensor_parallel.py, if AutoTP has split the model
        self.released = False  # True after the engine's functions were restored
        self._first_steps = FirstSteps(config, lambda key: f'"{key}" in the section "{SECTION}"', known=(LOGITS,))
        #: of stages 1 and 2 and BF16_Optimizer; None: DeepSpeed sends them
        self.parameters: Parameters | None = None
        if config.param_bits != "full" and self.stage < 3:
            site = self.site(parameters(self.stage))
            self.parameters = Parameters(config, site, self.finished_steps, self._tensor_parallel, self._tied)
        self.reductions = Reductions("DeepSpeed's engine", self._with_gradients, lambda: int(engine.global_steps))
        self._scalars, self._told_at = Scalars(), engine.global_steps
        self._pass: tuple[int, ...] | None = None  # the last backward pass with a quantized reduction
        self._scale: tuple[Any, ...] | None = None  # its count of skipped steps and its loss scale

    def site(self, site: Site) -> Site:
        """Return the site whose calls count for this engine."""
        return self._first_steps.of(site)

    def has_tied_weights(self) -> bool:
        return bool(self._tied)

    @contextmanager
    def of(self, bucket: Sequence[Tensor]) -> Iterator[None]:
        """Mark the gradients that the collectives in the block reduce, so that copies stay equal."""
        ranges: replicated_params.Copied = ()
        if self._tensor_parallel or self._tied:
            ranges = replicated.ranges(self._engine, bucket, tensor_parallel=self._tensor_parallel, tied=self._tied)
        token = _exact.set(ranges)
        try:
            yield
        finally:
            _exact.reset(token)

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Replace `dist.all_reduce(tensor, group)`, in place. Inside `owned` only its owner gets a slice."""
        slices, group = _owners.get(), given_group(group)

        def theirs() -> None:
            from deepspeed import comm

            comm.all_reduce(tensor, group=group)

        if slices is None:
            reductions.all_reduce(tensor, group=group, exact=_exact.get(), plain=theirs, **self._how(group))
        else:
            self._to_owners(tensor, slices, group, theirs, _volume("all_reduce", tensor, tensor.numel(), group))

    def all_reduce_tied(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Replace `dist.all_reduce(tensor, group)` for a gradient of weights that stages share."""
        group = given_group(group)

        def theirs() -> None:
            from deepspeed import comm

            comm.all_reduce(tensor, group=group)

        reductions.all_reduce(tensor, group=group, plain=theirs, **{**self._how(group), "site": self.site(TIED)})

    def reduce(self, tensor: Tensor, dst: int, group: dist.ProcessGroup | None = None) -> None:
        """Replace `dist.reduce(tensor, dst, group)`: the sum, in place, on global rank `dst` only."""
        group = given_group(group)

        def theirs() -> None:
            from deepspeed import comm

            comm.reduce(tensor, dst, group=group)

        owner = (dist.get_group_rank(group, dst), tensor.numel())
        self._to_owners(tensor, [owner], group, theirs, _volume("reduce", tensor, tensor.numel(), group))

    def reduce_scatter_coalesced(self, tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
        """Replace stage 3's function of that name: return this rank's part of the average of each tensor, 1-D.

        Rank r's part of a tensor is the r-th piece of ceil(numel / world) elements. The last pieces may be shorter or
        empty; there is no padding.
        """
        group = given_group(group)
        world = group.size()
        sizes = [math.ceil(tensor.numel() / world) for tensor in tensors]
        pieces = []
        for tensor, size in zip(tensors, sizes, strict=True):
            flat = tensor.detach().reshape(-1)
            pieces.append([flat[r * size : (r + 1) * size] for r in range(world)])
        parts = [[piece[r] for piece in pieces] for r in range(world)]
        results = parts[group.rank()]

        def theirs() -> None:
            from deepspeed.runtime.comm import coalesced_collectives

            nonlocal results
            results = coalesced_collectives.reduce_scatter_coalesced(tensors, group)

        volume = _volume("reduce_scatter", tensors[0], world * sum(sizes), group)  # DeepSpeed pads the last pieces
        self._reduce_scatter(parts, dist.ReduceOp.AVG, group, _of_ranks(pieces, world), theirs, volume, cut_alike=True)
        return list(results)

    def record_sparse(self, values: Tensor, group: dist.ProcessGroup | None) -> None:
        """Count a sparse gradient, whose values DeepSpeed gathers from all ranks."""
        group = given_group(group)
        sent = _volume("all_gather", values, values.numel() * group.size(), group)
        counters.record_full_precision(self._site(group), SPARSE, sent, message=0)

    def events(self) -> list[tuple[str, float, int]]:
        """Return (tag, value, samples) of the counts since the last call, for the engine's monitor, after each step."""
        if self._engine.global_steps == self._told_at:
            return []
        self._told_at = self._engine.global_steps
        return [(tag, value, int(self._engine.global_samples)) for tag, value in self._scalars.take()]

    def _to_owners(
        self, tensor: Tensor, slices: Slices, group: dist.ProcessGroup, theirs: Plain, instead_of: int
    ) -> None:
        """Reduce a 1-D tensor to the owners of its slices. Slices of other owners are unchanged."""
        runs: list[list[Tensor]] = [[] for _ in range(group.size())]
        segments: list[list[replicated_params.Range]] = [[] for _ in runs]
        start = 0
        for owner, neighbours in groupby(slices, key=lambda piece: piece[0]):
            numel = sum(count for _, count in neighbours)
            runs[owner].append(tensor[start : start + numel])
            segments[owner].append((start, start + numel))
            start += numel
        parts = [run or [tensor[:0]] for run in runs]
        self._reduce_scatter(
            parts, dist.ReduceOp.SUM, group, list(chain(*segments)), theirs, instead_of, cut_alike=False
        )

    def _reduce_scatter(
        self,
        parts: list[list[Tensor]],
        op: Any,
        group: dist.ProcessGroup,
        segments: Sequence[replicated_params.Range],
        theirs: Plain,
        instead_of: int,
        *,
        cut_alike: bool,
    ) -> None:
        """Reduce-scatter parts, 1-D tensors for each rank, in place of this rank's own.

        segments: their ranges in the bucket, in order. theirs: DeepSpeed's own collective, which sends `instead_of`
        bytes. cut_alike: as in replicated_params.Copy.
        """
        exact = replicated_params.moved(_exact.get(), segments, cut_alike) if _exact.get() else ()
        how = {"exact": exact, "plain": theirs, "instead_of": instead_of, **self._how(group)}
        reductions.reduce_scatter(parts[group.rank()], parts, op, group, **how)

    def _how(self, group: dist.ProcessGroup) -> dict[str, Any]:
        """Return the arguments of every collective of the engine."""
        step = self.finished_steps()
        self._first_steps.at(step)
        self.reductions.noted()
        return {"config": self.config, "site": self._site(group), "step": step, "feedback": self._slot()}

    def _with_gradients(self) -> list[Tensor]:
        """Return the parameters of the optimizer inside of DeepSpeed's that have gradients now."""
        optimizer = getattr(self._engine, "basic_optimizer", None)
        groups = getattr(optimizer, "param_groups", ())
        return [one for group in groups for one in group["params"] if one.grad is not None]

    def _slot(self) -> Slot | None:
        """Return the slot of the next reduction's residual in this backward pass."""
        if self.feedback is None:
            return None
        engine = self._engine
        now = (int(engine.micro_steps), int(engine.global_steps))
        if now != self._pass:
            self._pass = now
            scale = (int(engine.skipped_steps), _loss_scale(engine))
            if self._scale is not None and scale[0] != self._scale[0]:
                self.feedback.reset(SKIPPED)
            elif self._scale is not None and scale != self._scale:
                self.feedback.reset(SCALED)
            self._scale = scale
            self.feedback.begin(self.finished_steps())
        return self.feedback.slot()

    def save(self, folder: str) -> None:
        """Write this rank's state into the folder of a checkpoint."""
        checkpoint.save(folder, {"engine": self})

    def load(self, folder: str) -> None:
        """Load the states of all ranks from the folder of a checkpoint, or start again."""
        checkpoint.load(folder, {"engine": self})

    def forget(self) -> None:
        """Drop the residuals: they belong to other parameters."""
        self.set_numbers({})
        if self.feedback is not None:
            self.feedback.reset(LOADED)

    def numbers(self) -> dict[str, float]:
        """Return skipped steps and loss scale at the last reduction of gradients, and the digests of held weights."""
        names = ("skipped_steps", "loss_scale")
        found = {name: number for name, number in zip(names, self._scale or (), strict=False) if number is not None}
        return found if self.parameters is None else {**found, **self.parameters.numbers()}

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        if self.parameters is not None:
            self.parameters.set_numbers(numbers)
        self._pass = self._scale = None
        if "skipped_steps" in numbers:
            self._scale = (numbers["skipped_steps"], numbers.get("loss_scale"))

    def _site(self, group: dist.ProcessGroup) -> Site:
        experts = getattr(self._engine, "expert_data_parallel_group", None) or {}
        return self.site(EXPERTS if any(group is one for one in experts.values()) else gradients(self.stage))

    def finished_steps(self) -> int:
        """Return the number of optimizer steps, without those that the loss scaler skipped."""
        return int(self._engine.global_steps) - int(self._engine.skipped_steps)


def _volume(collective: str, like: Tensor, numel: int, group: dist.ProcessGroup) -> int:
    """Return the bytes that DeepSpeed's own collective of `numel` elements sends in a ring."""
    return ring_bytes(collective, numel * like.element_size(), group.size())


def _of_ranks(pieces: Sequence[Sequence[Tensor]], world: int) -> list[replicated_params.Range]:
    """Return the ranges, rank after rank, of each rank's pieces in the joined tensors."""
    segments: list[list[replicated_params.Range]] = [[] for _ in range(world)]
    start = 0
    for rank, piece in ((rank, piece) for tensor in pieces for rank, piece in enumerate(tensor)):
        segments[rank].append((start, start + len(piece)))
        start += len(piece)
    return list(chain(*segments))


def _loss_scale(engine: Any) -> float | None:
    scaler = getattr(engine, "torch_autocast_z0_gradscaler", None)
    scale = scaler.get_scale() if scaler else getattr(engine.optimizer, "loss_scale", None)
    return None if scale is None else float(scale)


def given_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        group = dist.group.WORLD
    assert group is not None, "DeepSpeed has initialized torch.distributed"
    return group
