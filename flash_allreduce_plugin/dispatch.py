"""The collectives a user calls: checked, agreed on by the group, planned, run, counted.

Every call either runs quantized as policy.py plans it or goes to torch.distributed as it came; which of the two,
and why, is in stats().
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import codec, collectives, groups, hierarchical, switches, symmetric, telemetry, transport
from flash_allreduce_plugin.beside import ours
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.feedback import Residual, Slot
from flash_allreduce_plugin.policy import LOW_SQNR, WARM_UP, Collective, FullPrecision, Plan, Site, make_plan
from flash_allreduce_plugin.quality import Quality
from flash_allreduce_plugin.transport import Label
from flash_allreduce_plugin.work import StreamWork, Work

if TYPE_CHECKING:
    from flash_allreduce_plugin.groups import GroupState

SWITCHED_OFF = switches.DISABLE
_REMEMBERED = 4096  # calls of a group, by shape, dtype, site and configuration

_ALL_REDUCE = Site("all_reduce")
_REDUCE_SCATTER = Site("reduce_scatter")
_ALL_GATHER = Site("all_gather")


def all_reduce(
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    config: FlashConfig | None = None,
    async_op: bool = False,
    *,
    site: Site = _ALL_REDUCE,
    step: int | None = None,
    feedback: Slot | None = None,
) -> Work | None:
    """Reduce `tensor` over the group, in place; every rank ends with the same bits.

    Args:
        tensor: any shape, stride and dtype. float32, bfloat16 and float16 are quantized.
        op: SUM, AVG and PREMUL_SUM by a number are quantized.
        group: the default group if None.
        config: FlashConfig.from_env() if None. All ranks must have the same.
        async_op: return a handle at once; the tensor must not be touched until its wait() has returned.
        site: what the counters call this place in the program, the same on all ranks.
        step: finished training steps, for warmup_steps; None: no warm-up.
        feedback: of a gradient: where the residual of this call lies (Feedback.slot); None: no error feedback.

    Returns:
        A Work if async_op, else None.

    Raises:
        TypeError, ValueError: bad arguments; nothing was sent, the tensor is untouched.
        MismatchError: the ranks have different configurations.
        CollectiveError: a peer failed or the group's timeout passed.
    """
    if config is None:
        config = _default_config()
    key = None if async_op else _key("all_reduce", tensor, tensor, op, config, site)
    if key is not None and (plain := _plain_again(key, group, site)) is not None:
        try:
            with ours:
                dist.all_reduce(tensor, group=plain)
        except RuntimeError as error:
            raise Label("all_reduce", site.name, plain).error(transport.PLAINLY, error) from error
        return None
    _check_written(tensor, "tensor")
    call = _Call("all_reduce", tensor, tensor.numel(), op, group, config, site, step, feedback)
    plan = call.plan(key)
    steps = _plain_all_reduce(call, tensor) if plan is None else _all_reduce(call, plan, tensor, async_op)
    return call.run(steps, async_op, tensor)


def reduce_scatter(
    output: Tensor,
    input: Tensor | Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    config: FlashConfig | None = None,
    async_op: bool = False,
    *,
    site: Site = _REDUCE_SCATTER,
    step: int | None = None,
    feedback: Slot | None = None,
) -> Work | None:
    """Reduce `input` over the group; rank r gets the r-th of its world_size equal parts in `output`.

    input has world_size times as many elements as output, in row-major order, the same dtype and device; or it is
    a list of tensors, one for each rank, of any sizes on which the ranks agree, and output has the size of this
    rank's. Groups are anchored at the first element of every part. Arguments, results and errors as all_reduce;
    ValueError too where the sizes do not fit.
    """
    if config is None:
        config = _default_config()
    key = None if async_op else _key("reduce_scatter", output, input, op, config, site)
    if key is not None and (plain := _plain_again(key, group, site)) is not None:
        try:
            with ours:
                transport.reduce_scatter_single(_flat(output), _flat(input), group=plain)
        except RuntimeError as error:
            raise Label("reduce_scatter", site.name, plain).error(transport.PLAINLY, error) from error
        return None
    _check_written(output, "output")
    if isinstance(input, Tensor):
        _check_tensor(input, "input")
        call = _Call("reduce_scatter", input, input.numel(), op, group, config, site, step, feedback)
        call.check_pair(output, "output", output.numel() * call.world_size, input, "input")
        shards = input.detach().contiguous().view(call.world_size, -1)
        return call.run(_reduce_scatter(call, call.plan(key), output, shards), async_op, output, shards)
    for rank, part in enumerate(input):
        _check_tensor(part, f"input[{rank}]")
    call = _Call("reduce_scatter", output, sum(map(Tensor.numel, input)), op, group, config, site, step, feedback)
    call.check_parts(output, input)
    parts = [part.detach().contiguous().view(-1) for part in input]
    return call.run(_reduce_scatter(call, call.plan(), output, parts), async_op, output, *parts)


def all_gather(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    config: FlashConfig | None = None,
    async_op: bool = False,
    *,
    site: Site = _ALL_GATHER,
    step: int | None = None,
) -> Work | None:
    """Gather `input` of every rank, in rank order, into `output`, which has world_size times its elements.

    Every rank gets the same bits, its own part included. Arguments, results and errors as reduce_scatter.
    """
    if config is None:
        config = _default_config()
    key = None if async_op else _key("all_gather", output, input, dist.ReduceOp.SUM, config, site)
    if key is not None and (plain := _plain_again(key, group, site)) is not None:
        try:
            with ours:
                transport.all_gather_single(_flat(output), _flat(input), group=plain)
        except RuntimeError as error:
            raise Label("all_gather", site.name, plain).error(transport.PLAINLY, error) from error
        return None
    _check_written(output, "output")
    _check_tensor(input, "input")
    call = _Call("all_gather", input, output.numel(), dist.ReduceOp.SUM, group, config, site, step)
    call.check_pair(input, "input", input.numel() * call.world_size, output, "output")
    return call.run(_all_gather(call, call.plan(key), output, input), async_op, output, input)


def _key(
    collective: Collective, output: Any, input: Any, op: Any, config: FlashConfig, site: Site
) -> tuple[Any, ...] | None:
    """What decides about a call, of those that torch.distributed can be given as they are; None: it is none of them."""
    if (
        op is dist.ReduceOp.SUM
        and type(output) is Tensor
        and type(input) is Tensor
        and output.layout is torch.strided
        and input.layout is torch.strided
        and output.is_contiguous()
        and input.is_contiguous()
        and not output.requires_grad
        and not input.requires_grad
        and (numel := input.numel())
    ):
        where = output.device, input.device
        return collective, numel, output.numel(), input.dtype, output.dtype, *where, id(config), id(site)
    return None


def _flat(tensor: Any) -> Tensor:
    """A contiguous tensor in one dimension: gloo compares shapes, and ours need not be alike."""
    assert isinstance(tensor, Tensor)
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _plain_again(key: tuple[Any, ...], group: dist.ProcessGroup | None, site: Site) -> dist.ProcessGroup | None:
    """The group of a call that is known to go in full precision, counted; None: it is not known.

    Small messages are the many; beside a plain collective of theirs, checking and planning each anew would show.
    FLASH_ALLREDUCE_DISABLE is not looked at: it would change nothing.
    """
    if group is None:
        group = dist.group.WORLD
    state = groups.known(group)
    if state is None or (answer := state.plain.get(key)) is None:
        return None
    telemetry.record_full_precision(site, answer[0], answer[1])
    return group


class _Call:
    """One call: its group, its plan, and what to count."""

    def __init__(
        self,
        collective: Collective,
        input: Tensor,
        numel: int,
        op: Any,
        group: dist.ProcessGroup | None,
        config: FlashConfig | None,
        site: Site,
        step: int | None,
        feedback: Slot | None = None,
    ) -> None:
        self.feedback = feedback
        self.collective = collective
        self.input = input
        self.numel = numel
        self.op = op
        self.op_name = _op_name(op)
        self.site = site
        self.step = step
        self.group = _group(group)
        self.label = Label(collective, site.name, self.group)
        self.state: GroupState = groups.state_of(self.group)
        self.world_size = self.state.world_size
        self.config = _default_config() if config is None else config
        if not isinstance(self.config, FlashConfig):
            raise TypeError(f"config is {type(config).__name__}; expected FlashConfig or None.")
        _check_device(input, self.group)
        self.key = 0  # of the random numbers of a call that is rounded stochastically
        self.parts: list[int] | None = None  # elements for each rank, where they are not all alike
        self.quality = Quality(collective, site, self.label, self.state, self.config)

    def check_pair(self, shard: Tensor, shard_name: str, numel: int, whole: Tensor, whole_name: str) -> None:
        if numel != whole.numel():
            raise ValueError(
                f"{whole_name} has {whole.numel()} elements and {shard_name} {shard.numel()}; expected "
                f"{shard_name} x {self.world_size} ranks = {whole_name}."
            )
        if shard.dtype != whole.dtype or shard.device != whole.device:
            raise ValueError(
                f"{shard_name} is {shard.dtype} on {shard.device} and {whole_name} {whole.dtype} on "
                f"{whole.device}; expected the same dtype and device."
            )

    def run(self, steps: Iterator[None], async_op: bool, *tensors: Tensor) -> Work | None:
        """tensors: that the call reads or writes."""
        if not async_op:
            for _ in steps:
                pass
            return None
        name, device = f"{self.collective} at site {self.site.name!r}", self.input.device
        if transport.queues(self.group, device):
            return StreamWork(steps, name, device, tensors)
        return Work(steps, name)

    def check_parts(self, output: Tensor, parts: Sequence[Tensor]) -> None:
        if len(parts) != self.world_size:
            raise ValueError(f"input has {len(parts)} tensors; expected one for each of {self.world_size} ranks.")
        own = parts[self.group.rank()]
        if output.numel() != own.numel():
            raise ValueError(f"output has {output.numel()} elements; expected {own.numel()}, as this rank's input.")
        for rank, part in enumerate(parts):
            if part.dtype != output.dtype or part.device != output.device:
                raise ValueError(
                    f"input[{rank}] is {part.dtype} on {part.device} and output {output.dtype} on {output.device}; "
                    "expected the same dtype and device."
                )
        self.parts = [part.numel() for part in parts]

    @property
    def factor(self) -> float:
        """What the sum is multiplied with."""
        if self.op_name == "avg":
            return 1 / self.world_size
        return float(self.op.__getstate__()[1]) if self.op_name == "premul_sum" else 1.0

    def plain(self) -> tuple[Any, float]:
        """The operator for the plain collective, and what its result is still to be multiplied with: gloo can only
        sum.
        """
        scaled = self.op_name in ("avg", "premul_sum") and self.input.is_floating_point()
        if scaled and self.group._get_backend(self.input.device).name() == "gloo":
            return dist.ReduceOp.SUM, self.factor
        return self.op, 1.0

    def plan(self, key: tuple[Any, ...] | None = None) -> Plan | None:
        """The plan, counted; None if the call goes in full precision: remembered by `key` if it always will."""
        disabled = switches.is_on(switches.DISABLE)
        groups.agree(self.label, self.config, disabled, self.input.device)
        answer = FullPrecision(SWITCHED_OFF) if disabled else self._make_plan()
        if isinstance(answer, Plan):
            answer = self.quality.decide(answer, self._at_width, self.input.device)
        if isinstance(answer, FullPrecision):
            nbytes = self.plain_bytes()
            message = self.numel * self.input.element_size()
            telemetry.record_full_precision(self.site, answer.reason, nbytes, message)
            if key is not None and answer.reason not in (SWITCHED_OFF, WARM_UP, LOW_SQNR):
                if len(self.state.plain) == _REMEMBERED:
                    self.state.plain.clear()
                self.state.plain[key] = answer.reason, nbytes, (self.config, self.site)
            return None
        self.label.sign(
            *(self.op_name, self.factor, self.input.dtype, self.numel, self.parts),
            *(answer.reduce, answer.gather, answer.inside, answer.chunk_bytes),
        )
        sent, between_nodes = self.sent_bytes(answer)
        telemetry.record_quantized(self.site, sent, self.plain_bytes(), between_nodes, answer.bits(self.collective))
        if answer.reduce.stochastic:
            self.key = codec.draw_key(self.config.seed, self.state.draws)
            self.state.draws += 1
        return answer

    def _make_plan(self, width: int | None = None) -> Plan | FullPrecision:
        return make_plan(
            self.collective,
            numel=self.numel,
            dtype=self.input.dtype,
            world_size=self.world_size,
            op=self.op_name,
            site=self.site,
            config=self.config,
            step=self.step,
            nodes=groups.nodes_of(self.label, self.config, self.input.device),
            width=width,
        )

    def _at_width(self, bits: int) -> Plan:
        plan = self._make_plan(bits)
        assert isinstance(plan, Plan)
        return plan

    def plain_bytes(self) -> int:
        """What a rank sends in full precision."""
        if self.parts is not None:
            return (sum(self.parts) - self.parts[self.group.rank()]) * self.input.element_size()
        half = self.numel * self.input.element_size() * (self.world_size - 1) // self.world_size
        return 2 * half if self.collective == "all_reduce" else half

    def sent_bytes(self, plan: Plan) -> tuple[int, int]:
        """What a rank sends as planned, and what of it goes to another node; 0 where the call knows no nodes."""
        rank = self.group.rank()
        if plan.nodes is not None:
            shards = self.parts or [self.numel // self.world_size] * self.world_size
            sizes = self.numel if self.collective == "all_reduce" else shards
            return hierarchical.sent_bytes(self.collective, sizes, plan, rank)
        if self.parts is not None:
            return sum(map(plan.reduce.payload_bytes, self.parts)) - plan.reduce.payload_bytes(self.parts[rank]), 0
        return collectives.sent_bytes(self.collective, self.numel, plan, self.world_size), 0

    def residual(self, plan: Plan, sizes: Sequence[int]) -> Residual | None:
        """What the last such call lost. sizes: elements of the tensor, or of each rank's part."""
        if self.feedback is None or plan.nodes is not None:  # the configuration refuses both
            return None
        layout = (
            f"{self.collective} of {self.input.dtype} {list(sizes)} as rank {self.group.rank()} of {self.world_size} "
            f"by {plan}"
        )
        groups = collectives.groups_of_residual(self.collective, sizes, plan, self.world_size)
        return self.feedback.open(layout, self.site, groups, plan.reduce.group_size, self.input.device)

    def measure(self, input: Tensor | Sequence[Tensor]) -> None:
        """A quantized call begins. input: in world_size even parts, or one 1-D tensor a rank."""
        if not self.quality.measured:
            return
        if self.config.quality_measure == "local":
            self.quality.measure_locally(self.factor, self.input.device)
        else:
            op, factor = self.plain()
            even = input if isinstance(input, Tensor) else _padded(input)
            self.quality.measure_exactly(even, op, factor)


def _plain_all_reduce(call: _Call, tensor: Tensor) -> Iterator[None]:
    if call.numel == 0:
        return
    tensor = tensor.detach()
    whole = tensor.contiguous()
    op, factor = call.plain()
    call.quality.watch([whole.view(-1)], call.factor)
    pending = transport.all_reduce(whole, op, call.label)
    yield
    pending.wait()
    if factor != 1.0:
        whole.mul_(factor)
    call.quality.watched(whole.view(-1))
    if whole is not tensor:
        tensor.copy_(whole)


def _all_reduce(call: _Call, plan: Plan, tensor: Tensor, async_op: bool) -> Iterator[None]:
    tensor = tensor.detach()
    flat = tensor.contiguous().view(-1)
    call.measure(flat)
    meter, residual = call.quality.meter, call.residual(plan, [flat.numel()])
    carried = () if residual is None else (residual,)
    how = {"asynchronous": async_op, "feedback": residual is not None, "measured": meter is not None}
    if not (flat.is_cuda and symmetric.all_reduce(flat, call.factor, plan, call.label, call.key, **how)):
        pool = call.state.pool(flat.device)
        yield from _levels(plan).all_reduce(flat, call.factor, plan, call.label, pool, call.key, *carried, meter=meter)
    if call.feedback is not None:
        call.feedback.check(flat)
    call.quality.end(flat)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def _reduce_scatter(
    call: _Call, plan: Plan | None, output: Tensor, shards: Tensor | Sequence[Tensor]
) -> Iterator[None]:
    """shards [world, numel], or a list of 1-D tensors."""
    if call.numel == 0:
        return
    output = output.detach()
    shard = output.view(-1) if output.is_contiguous() else output.new_empty(output.numel())
    if plan is None:
        op, factor = call.plain()
        even = shards if isinstance(shards, Tensor) else _padded(shards)
        sums = shard if even is shards else shard.new_empty(even.shape[1])
        call.quality.watch(shards, call.factor)
        pending = transport.reduce_scatter(sums, even.view(-1), op, call.label)
        yield
        pending.wait()
        if even is not shards:
            shard.copy_(sums[: len(shard)])
        if factor != 1.0:
            shard.mul_(factor)
        call.quality.watched(shard)
    else:
        call.measure(shards)
        pool = call.state.pool(shard.device)
        residual = call.residual(plan, list(map(len, shards)))
        carried = () if residual is None else (residual,)
        # Sums are put in place when all of them are there: a call that fails leaves output as it was, and with it the
        # input that it may lie in. Over NCCL, where a failure ends the process, as they come.
        buffer = None
        sums = shard
        if not transport.queues(call.group, shard.device):
            buffer = pool.take(shard.numel() * shard.element_size())
            sums = buffer.view(shard.dtype)
        how = (call.factor, plan, call.label, pool, call.key, *carried)
        yield from _levels(plan).reduce_scatter(sums, shards, *how, meter=call.quality.meter)
        if buffer is not None:
            shard.copy_(sums)
            pool.give(buffer)
        if call.feedback is not None:
            call.feedback.check(shard)
        call.quality.end(shard)
    if not output.is_contiguous():
        output.copy_(shard.view(output.shape))


def _padded(shards: Sequence[Tensor]) -> Tensor:
    """1-D tensors as rows [world, the longest's numel], filled up with zeros."""
    rows = shards[0].new_zeros(len(shards), max(map(len, shards)))
    for row, shard in zip(rows, shards, strict=True):
        row[: len(shard)] = shard
    return rows


def _all_gather(call: _Call, plan: Plan | None, output: Tensor, input: Tensor) -> Iterator[None]:
    if call.numel == 0:
        return
    output = output.detach()
    whole = output.view(-1) if output.is_contiguous() else output.new_empty(output.numel())
    flat = input.detach().contiguous().view(-1)
    if plan is None:
        call.quality.watch([flat], 1.0)
        pending = transport.all_gather_plainly(whole, flat, call.label)
        yield
        pending.wait()
        call.quality.watched(whole)
    else:
        call.measure(flat)
        pool = call.state.pool(flat.device)
        yield from _levels(plan).all_gather(whole, flat, plan, call.label, pool, call.key, meter=call.quality.meter)
        call.quality.end(whole)
    if not output.is_contiguous():
        output.copy_(whole.view(output.shape))


def _levels(plan: Plan) -> ModuleType:
    return collectives if plan.nodes is None else hierarchical


@cache
def _default_config() -> FlashConfig:
    return FlashConfig.from_env()


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("torch.distributed is not initialized; call init_process_group first.")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this rank is not a member of the group.")
    return group


def _check_tensor(tensor: Any, name: str) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        what = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} is {what}; expected a dense tensor.")


def _check_written(tensor: Any, name: str) -> None:
    _check_tensor(tensor, name)
    if not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError(
            f"{name} has strides {tensor.stride()}, several elements at one place in memory, and cannot hold "
            "the result; clone() it first."
        )


def _check_device(tensor: Tensor, group: dist.ProcessGroup) -> None:
    try:
        group._get_backend(tensor.device)
    except RuntimeError as error:
        raise ValueError(
            f"the tensor is on {tensor.device}, which the group's backend does not serve ({error})"
        ) from error


def _op_name(op: Any) -> str:
    """sum, avg, max, ... of a ReduceOp."""
    if op is dist.ReduceOp.SUM:
        return "sum"
    # ReduceOp itself is not hashable and hides its kind; comparing is what it offers.
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"):
        if op == getattr(dist.ReduceOp, name):
            return name.lower()
    return str(op)
