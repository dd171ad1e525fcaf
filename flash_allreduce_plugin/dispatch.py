"""The collectives a user calls: checked, agreed on by the group, planned, run, counted.

Every call either runs quantized as policy.py plans it or goes to torch.distributed as it came; which of the two,
and why, is in stats().
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import environment, groups, traced
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.collectives import copies, flat, runs, transport, two_level, two_shot
from flash_allreduce_plugin.collectives.copies import Exactly, Range
from flash_allreduce_plugin.collectives.error_feedback import Residual, Slot
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.collectives.work import StreamWork, Work
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.policy import (
    EMPTY,
    LOW_SQNR,
    SMALL,
    WARM_UP,
    Collective,
    FullPrecision,
    Plan,
    Site,
    make_plan,
)
from flash_allreduce_plugin.quality.control import Quality
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.beside import ours

if TYPE_CHECKING:
    from flash_allreduce_plugin.groups import GroupState

SWITCHED_OFF = environment.DISABLE
_REMEMBERED = 4096  # calls of a group, by shape, dtype, site and configuration

_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_TAKEN = {  # what torch's own backends take in full precision
    "gloo": (*rows.DTYPES, torch.float64, *_INTEGERS, *_COMPLEX),
    "nccl": (*rows.DTYPES, torch.float64, *_INTEGERS, *_COMPLEX, *_FLOAT8),
}

_ALL_REDUCE = Site("all_reduce")
_REDUCE_SCATTER = Site("reduce_scatter")
_ALL_GATHER = Site("all_gather")
_ALL_TO_ALL = Site("all_to_all")


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
    exact: Sequence[Range] = (),
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
        exact: ascending ranges (first, end) of elements that are summed in full precision, by a small collective beside
            the quantized one: gradients of parameters that other ranks have copies of (copies.py).

    Returns:
        A Work if async_op, else None.

    Raises:
        TypeError, ValueError: bad arguments; nothing was sent, the tensor is untouched.
        MismatchError: the ranks have different configurations.
        CollectiveError: a peer failed or the group's timeout passed.
    """
    if torch.compiler.is_dynamo_compiling():
        return traced.all_reduce(tensor, op, group, config, async_op, site, step, feedback=feedback, exact=exact)
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
    call = _Call("all_reduce", tensor, tensor.numel(), op, group, config, site, step, feedback, exact)
    plan = call.plan(key)
    steps = _plain_all_reduce(call, tensor) if plan is None else _all_reduce(call, plan, tensor, async_op)
    return call.run(steps, plan, async_op, tensor)


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
    exact: Sequence[Range] = (),
    instead_of: int | None = None,
) -> Work | None:
    """Reduce `input` over the group; rank r gets the r-th of its world_size equal parts in `output`.

    input has world_size times as many elements as output, in row-major order, the same dtype and device; or it is
    a list of tensors, one for each rank, of any sizes on which the ranks agree, and output has the size of this
    rank's. Groups are anchored at the first element of every part. Arguments, results and errors as all_reduce;
    ValueError too where the sizes do not fit. exact: ranges of the parts one after another. instead_of: the bytes that
    would have been sent in full precision, if that were not a reduce-scatter of the same parts.
    """
    if torch.compiler.is_dynamo_compiling():
        more = {"feedback": feedback, "exact": exact, "instead_of": instead_of}
        return traced.reduce_scatter(output, input, op, group, config, async_op, site, step, **more)
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
        call = _Call("reduce_scatter", input, input.numel(), op, group, config, site, step, feedback, exact)
        call.check_pair(output, "output", output.numel() * call.world_size, input, "input")
        shards = input.detach().contiguous().view(call.world_size, -1)
        plan = call.plan(key)
        return call.run(_reduce_scatter(call, plan, output, shards), plan, async_op, output, shards)
    if not isinstance(input, Sequence):
        raise TypeError(f"input is {type(input).__name__}; expected a dense tensor, or a list of one for each rank.")
    for rank, part in enumerate(input):
        _check_tensor(part, f"input[{rank}]")
    numel = sum(map(Tensor.numel, input))
    call = _Call("reduce_scatter", output, numel, op, group, config, site, step, feedback, exact, instead_of)
    call.check_parts(output, input)
    parts = [part.detach().contiguous().view(-1) for part in input]
    plan = call.plan()
    return call.run(_reduce_scatter(call, plan, output, parts), plan, async_op, output, *parts)


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
    if torch.compiler.is_dynamo_compiling():
        return traced.all_gather(output, input, group, config, async_op, site, step)
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
    plan = call.plan(key)
    return call.run(_all_gather(call, plan, output, input), plan, async_op, output, input)


def all_to_all(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: FlashConfig | None = None,
    site: Site = _ALL_TO_ALL,
    step: int | None = None,
    plain: Callable[[], Any] | None = None,
    full_precision: str | None = None,
) -> Any:
    """Send run r of `input` to rank r and get run r of `output` from it, as torch.distributed.all_to_all_single.

    One rounding. A rank's own run is rounded like the others: what becomes of a row does not depend on where it goes.
    A run whose bytes times world_size are below min_bytes arrives as it is: its two ends are all who know its size.
    Runs may be empty, and ranks may have other sizes. The error is measured locally, whatever quality_measure says.

    Args:
        output, input: [rows, ...] of the same dtype on the same device, of any strides; they must not share memory.
        output_split_sizes, input_split_sizes: rows from and to each rank, which add up to those of the tensor; None:
            the same number for every rank.
        async_op: return a handle at once; the tensors must not be touched until its wait() has returned.
        plain: runs a framework's own collective, asynchronously if async_op, and returns its handle: it takes the place
            of torch.distributed's wherever the call goes in full precision.
        full_precision: a reason to go in full precision, as stats() will show it; None: the configuration decides.

    The other arguments, results and errors are those of all_reduce. If two ranks disagree about the size of the run
    between them, one of them or both get CollectiveError within the group's timeout. torch.compile breaks the graph.
    """
    _check_written(output, "output")
    _check_tensor(input, "input")
    call = _AllToAll(output, input, output_split_sizes, input_split_sizes, group, config, site, step, full_precision)
    plan = call.plan()
    if plan is None and plain is not None and not call.quality.watching:
        try:
            with ours:
                return plain()
        except RuntimeError as error:
            raise call.label.error(transport.PLAINLY, error) from error
    return call.run(_all_to_all(call, plan, output, input, plain), plan, async_op, output, input)


traced.serve_collectives(all_reduce, reduce_scatter, all_gather)
traced.never_trace(all_to_all, reason="no graph holds an all_to_all of flash_allreduce")
traced.never_trace(Work.wait, Work.is_completed, Work.get_future, StreamWork.wait, StreamWork.is_completed)


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
        and not input.is_neg()
        and (input is output or not output.is_neg())
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
    counters.record_full_precision(site, answer[0], answer[1])
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
        exact: Sequence[Range] = (),
        instead_of: int | None = None,
    ) -> None:
        self.feedback = feedback
        copies.check(exact, numel)
        self.exact = exact
        self.instead_of = instead_of
        self.collective = collective
        self.input = input
        self.numel = numel
        self.op = op
        self.op_name = _op_name(op)
        self.site = site
        self.step = step
        self.group = _group(group)
        _check_named(site, step, feedback)
        self.label = Label(collective, site.name, self.group)
        self.state: GroupState = groups.state_of(self.group)
        self.world_size = self.state.world_size
        self.config = _default_config() if config is None else config
        if not isinstance(self.config, FlashConfig):
            raise TypeError(f"config is {type(config).__name__}; expected FlashConfig or None.")
        _check_taken(collective, self.op_name, input, self.group)
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

    def run(
        self, steps: Iterator[None], plan: Plan | None, async_op: bool, output: Tensor, *inputs: Tensor
    ) -> Work | None:
        if not async_op:
            for _ in steps:
                pass
            return None
        name, device = f"{self.collective} at site {self.site.name!r}", self.input.device
        if transport.queues(self.group, device):
            return StreamWork(steps, name, [output], device, (output, *inputs))
        helper = self.state.helper if transport.by_messages(self.group, device) else None
        return Work(steps, name, [output], helper, at_once=plan is not None)

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
    def start(self) -> int:
        """The first element of this rank's part."""
        rank = self.group.rank()
        return sum(self.parts[:rank]) if self.parts is not None else rank * (self.numel // self.world_size)

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
        if self.op_name in ("avg", "premul_sum") and self.group._get_backend(self.input.device).name() == "gloo":
            return dist.ReduceOp.SUM, self.factor
        return self.op, 1.0

    def plan(self, key: tuple[Any, ...] | None = None) -> Plan | None:
        """The plan, counted; None if the call goes in full precision: remembered by `key` if it always will."""
        disabled = environment.is_on(environment.DISABLE)
        groups.agree(self.label, self.config, disabled, self.input.device)
        answer = FullPrecision(SWITCHED_OFF) if disabled else self._make_plan()
        if isinstance(answer, Plan):
            answer = self.quality.decide(answer, self._at_width, self.input.device)
        if isinstance(answer, FullPrecision):
            if answer.reason != LOW_SQNR:  # the one reason that the groups of other copies need not have
                self.exact = ()
            nbytes = self.plain_bytes()
            message = self.numel * self.input.element_size()
            more = {"instead_of": self.instead_of, "message": message}
            counters.record_full_precision(self.site, answer.reason, nbytes, **more)
            lasting = answer.reason not in (SWITCHED_OFF, WARM_UP, LOW_SQNR)
            if key is not None and lasting and not self.input.is_complex():  # whose next one may be a conjugate
                if len(self.state.plain) == _REMEMBERED:
                    self.state.plain.clear()
                self.state.plain[key] = answer.reason, nbytes, (self.config, self.site)
            return None
        self.label.sign(
            *(self.op_name, self.factor, self.input.dtype, *self.sizes),
            *(answer.reduce, answer.gather, answer.inside, answer.chunk_bytes, *self.exact),
        )
        self.count(answer)
        if answer.reduce.stochastic:
            self.key = rows.draw_key(self.config.seed, self.state.draws)
            self.state.draws += 1
        return answer

    @property
    def sizes(self) -> tuple[Any, ...]:
        """In which the ranks' calls have to be alike."""
        return self.numel, self.parts

    def count(self, plan: Plan) -> None:
        """A quantized call."""
        sent, between_nodes = self.sent_bytes(plan)
        plain = self.plain_bytes() if self.instead_of is None else self.instead_of
        counters.record_quantized(self.site, sent, plain, between_nodes, plan.bits(self.collective))

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
            return two_level.sent_bytes(self.collective, sizes, plan, rank)
        if self.parts is not None:
            return sum(map(plan.reduce.payload_bytes, self.parts)) - plan.reduce.payload_bytes(self.parts[rank]), 0
        return flat.sent_bytes(self.collective, self.numel, plan, self.world_size), 0

    def residual(self, plan: Plan, sizes: Sequence[int]) -> Residual | None:
        """What the last such call lost. sizes: elements of the tensor, or of each rank's part."""
        if self.feedback is None or plan.nodes is not None:  # the configuration refuses both
            return None
        layout = (
            f"{self.collective} of {self.input.dtype} {list(sizes)} as rank {self.group.rank()} of {self.world_size} "
            f"by {plan}"
        )
        groups = flat.groups_of_residual(self.collective, sizes, plan, self.world_size)
        return self.feedback.open(layout, self.site, groups, plan.reduce.group_size, self.input.device)

    def exactly(self, parts: Sequence[Tensor]) -> Exactly | None:
        """Starts what is summed in full precision beside the call; parts: its input, contiguous."""
        return Exactly(self.exact, parts, self.factor, self.label, self.site) if self.exact else None

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


# ---- all_to_all: other ranks have other sizes, and decide alike without them ----


class _AllToAll(_Call):
    """numel: of the longest run, times world_size, as min_bytes sees it. parts: elements of the runs that are sent."""

    def __init__(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        group: dist.ProcessGroup | None,
        config: FlashConfig | None,
        site: Site,
        step: int | None,
        full_precision: str | None,
    ) -> None:
        super().__init__("all_to_all", input, 0, dist.ReduceOp.SUM, group, config, site, step)
        if output.dtype != input.dtype or output.device != input.device:
            raise ValueError(
                f"output is {output.dtype} on {output.device} and input {input.dtype} on {input.device}; expected the "
                "same dtype and device."
            )
        if _share_memory(output, input):
            raise ValueError("output and input share memory; an all_to_all needs a tensor for each.")
        self.sent = _runs_of(input, "input", input_splits, self.world_size)
        self.received = _runs_of(output, "output", output_splits, self.world_size)
        rank = self.group.rank()
        if self.sent[rank] != self.received[rank]:
            raise ValueError(
                f"input has {self.sent[rank]} elements for rank {rank} itself and output {self.received[rank]}; "
                "expected the same number."
            )
        self.parts = self.sent
        self.numel = max(self.sent) * self.world_size
        self.rule = runs.Rule(input.element_size(), self.world_size, self.config.min_bytes)
        self.full_precision = full_precision

    @property
    def sizes(self) -> tuple[Any, ...]:
        return (self.rule.min_bytes,)

    def count(self, plan: Plan) -> None:
        sent, exact = self.rule.sent_bytes(self.sent, self.group.rank(), plan.gather)
        if any(map(self.rule.quantizes, self.sent)):
            bits = plan.bits(self.collective)
            counters.record_quantized(self.site, sent, self.plain_bytes(), bits=bits, bytes_plain=exact)
        else:
            message = self.numel * self.input.element_size()
            counters.record_full_precision(self.site, SMALL if any(self.sent) else EMPTY, sent, message=message)

    def _make_plan(self, width: int | None = None) -> Plan | FullPrecision:
        return super()._make_plan(width) if self.full_precision is None else FullPrecision(self.full_precision)


def _runs_of(tensor: Tensor, name: str, splits: Sequence[int] | None, world_size: int) -> list[int]:
    """Elements of the run of each rank. Raises TypeError, ValueError where the split sizes do not fit."""
    if tensor.dim() == 0:
        raise ValueError(f"{name} is a single number; expected rows, which are split along the first dimension.")
    rows_, named = len(tensor), f"{name}_split_sizes"
    if splits is None or len(splits) == 0:  # torch takes an empty list for None
        if rows_ % world_size:
            raise ValueError(
                f"{name} has {rows_} rows, which {world_size} ranks cannot share evenly; give {named}, the rows of "
                "each rank."
            )
        return [tensor.numel() // world_size] * world_size
    try:
        counts = [operator.index(count) for count in splits]
    except TypeError as error:
        raise TypeError(f"{named} is {splits!r}; expected whole numbers of rows.") from error
    if len(counts) != world_size:
        raise ValueError(f"{named} has {len(counts)} sizes; expected one for each of {world_size} ranks.")
    if min(counts) < 0 or sum(counts) != rows_:
        raise ValueError(f"{named} is {counts}; expected sizes, 0 or more, that add up to the {rows_} rows of {name}.")
    width = tensor.numel() // max(rows_, 1)
    return [count * width for count in counts]


def _share_memory(a: Tensor, b: Tensor) -> bool:
    if not (a.numel() and b.numel()) or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False

    def span(tensor: Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    (first, end), (other, other_end) = span(a), span(b)
    return first < other_end and other < end


def _all_to_all(
    call: _AllToAll, plan: Plan | None, output: Tensor, input: Tensor, plain: Callable[[], Any] | None
) -> Iterator[None]:
    """A rank that sends and gets nothing takes part as well: the others cannot know."""
    output = output.detach()
    in_place = output.is_contiguous()
    whole = output.view(-1) if in_place else output.new_empty(output.numel())
    own = input.detach().contiguous().view(-1)
    if plan is None:
        call.quality.watch((run for run in own.split(call.sent) if call.rule.quantizes(len(run))), 1.0)
        theirs = plain or (
            lambda: dist.all_to_all_single(whole, own, call.received, call.sent, group=call.group, async_op=True)
        )
        pending = transport.plainly(theirs, call.label)
        yield
        pending.wait()
        if plain is not None and not in_place:  # whose result is in the output
            whole.view(output.shape).copy_(output)
    else:
        if call.quality.measured:
            call.quality.measure_locally(1.0, own.device)
        pool, how = call.state.pool(own.device), (plan, call.rule, call.label)
        yield from runs.all_to_all(whole, own, call.received, call.sent, *how, pool, call.key, meter=call.quality.meter)
    if not in_place:
        output.copy_(whole.view(output.shape))
    yield
    if plan is None:
        call.quality.watched(whole)
    else:
        call.quality.end(whole)


# ---- ----


def _plain_all_reduce(call: _Call, tensor: Tensor) -> Iterator[None]:
    if call.numel == 0:
        return
    tensor = tensor.detach()
    whole = tensor.contiguous()
    op, factor = call.plain()
    call.quality.watch([whole.view(-1)], call.factor)
    exactly = call.exactly([whole])
    pending = transport.all_reduce(whole, op, call.label)
    yield
    pending.wait()
    if factor != 1.0:
        whole.mul_(factor)
    if exactly is not None:
        exactly.write(whole.view(-1))
    if whole is not tensor:
        tensor.copy_(whole)
    yield
    call.quality.watched(whole.view(-1))


def _all_reduce(call: _Call, plan: Plan, tensor: Tensor, async_op: bool) -> Iterator[None]:
    tensor = tensor.detach()
    flat = tensor.contiguous().view(-1)
    exactly = call.exactly([flat])
    call.measure(flat)
    meter, residual = call.quality.meter, call.residual(plan, [flat.numel()])
    carried = () if residual is None else (residual,)
    how = {"asynchronous": async_op, "feedback": residual is not None, "measured": meter is not None}
    if not (flat.is_cuda and two_shot.all_reduce(flat, call.factor, plan, call.label, call.key, **how)):
        pool = call.state.pool(flat.device)
        yield from _levels(plan).all_reduce(flat, call.factor, plan, call.label, pool, call.key, *carried, meter=meter)
    if exactly is not None:
        exactly.write(flat)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
    yield
    if call.feedback is not None:
        call.feedback.check(flat)
    call.quality.end(flat)


def _reduce_scatter(
    call: _Call, plan: Plan | None, output: Tensor, shards: Tensor | Sequence[Tensor]
) -> Iterator[None]:
    """shards [world, numel], or a list of 1-D tensors."""
    if call.numel == 0:
        return
    output = output.detach()
    shard = output.view(-1) if output.is_contiguous() else output.new_empty(output.numel())
    exactly = call.exactly([shards] if isinstance(shards, Tensor) else shards)
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
    else:
        call.measure(shards)
        pool = call.state.pool(shard.device)
        residual = call.residual(plan, list(map(len, shards)))
        carried = () if residual is None else (residual,)
        how = (call.factor, plan, call.label, pool, call.key, *carried)
        yield from _levels(plan).reduce_scatter(shard, shards, *how, meter=call.quality.meter)
    if exactly is not None:
        exactly.write(shard, call.start)
    if not output.is_contiguous():
        output.copy_(shard.view(output.shape))
    yield
    if plan is None:
        call.quality.watched(shard)
        return
    if call.feedback is not None:
        call.feedback.check(shard)
    call.quality.end(shard)


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
    else:
        call.measure(flat)
        pool = call.state.pool(flat.device)
        yield from _levels(plan).all_gather(whole, flat, plan, call.label, pool, call.key, meter=call.quality.meter)
    if not output.is_contiguous():
        output.copy_(whole.view(output.shape))
    yield
    if plan is None:
        call.quality.watched(whole)
    else:
        call.quality.end(whole)


def _levels(plan: Plan) -> ModuleType:
    return flat if plan.nodes is None else two_level


@cache
def _default_config() -> FlashConfig:
    return FlashConfig.from_env()


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("torch.distributed is not initialized; call init_process_group first.")
    if not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this rank is not a member of the group.")
        hint = " (its get_group())" if hasattr(group, "get_group") else ""
        raise TypeError(f"group is {type(group).__name__}; expected a ProcessGroup{hint} or None.")
    return group


def _check_named(site: Any, step: Any, feedback: Any) -> None:
    if not isinstance(site, Site):
        raise TypeError(f"site is {type(site).__name__}; expected Site, for example Site({str(site)!r}).")
    if step is not None and not isinstance(step, int):
        raise TypeError(f"step is {type(step).__name__}; expected a whole number or None.")
    if feedback is not None and not isinstance(feedback, Slot):
        raise TypeError(f"feedback is {type(feedback).__name__}; expected what Feedback.slot() gives, or None.")


def _check_tensor(tensor: Any, name: str) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        what = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} is {what}; expected a dense tensor.")
    if hasattr(tensor, "__tensor_flatten__"):  # a tensor around others: DTensor, AsyncCollectiveTensor ...
        hint = ": give its to_local()" if hasattr(tensor, "to_local") else ""
        raise TypeError(f"{name} is {type(tensor).__name__}; expected a plain dense tensor{hint}.")
    if tensor.is_conj() or tensor.is_neg():
        kind, mend = ("conjugate", "resolve_conj") if tensor.is_conj() else ("negative", "resolve_neg")
        raise ValueError(f"{name} is a view that stands for the {kind} of its memory; {mend}() it first.")


def _check_written(tensor: Any, name: str) -> None:
    _check_tensor(tensor, name)
    if not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError(
            f"{name} has strides {tensor.stride()}, several elements at one place in memory, and cannot hold "
            "the result; clone() it first."
        )


def _check_taken(collective: str, op: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Raises ValueError for what the group's backend would refuse in full precision, for a device that it does not
    serve and for an operator that the dtype has not: else the failure would look like a peer's.
    """
    try:
        backend = group._get_backend(tensor.device).name()
    except RuntimeError as error:
        raise ValueError(
            f"the tensor is on {tensor.device}, which the group's backend does not serve ({error})"
        ) from error
    dtype = tensor.dtype
    if dtype in rows.DTYPES and op in ("sum", "avg", "premul_sum"):
        return
    taken = _TAKEN.get(backend)
    if taken is not None and dtype not in taken:
        raise ValueError(
            f"{collective} of {dtype}: {backend} does not take it; convert the tensor to one of "
            f"{', '.join(str(each).removeprefix('torch.') for each in taken)}."
        )
    if collective in ("all_gather", "all_to_all"):
        return
    exact = not (dtype.is_floating_point or dtype.is_complex)
    if op in ("band", "bor", "bxor"):
        wrong = not exact or backend == "nccl"
    elif op in ("max", "min", "product"):
        wrong = dtype.is_complex
    elif op == "avg":
        wrong = dtype == torch.bool or (exact and backend != "nccl")
    else:
        wrong = op == "premul_sum" and exact
    if wrong:
        raise ValueError(f"{collective} of {dtype}: {backend} does not reduce it by {op.upper()}; take SUM.")


def _op_name(op: Any) -> str:
    """sum, avg, max, ... of a ReduceOp."""
    if op is dist.ReduceOp.SUM:
        return "sum"
    # ReduceOp itself is not hashable and hides its kind; comparing is what it offers.
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"):
        if op == getattr(dist.ReduceOp, name):
            return name.lower()
    raise TypeError(f"op is {op!r}; expected one of torch.distributed.ReduceOp.")
