"""Random calls on several groups from several threads, in every rank, with a check of every result.

A lane is a thread with its own groups. All ranks make the calls of a lane in one order, drawn from the seed. A rank
that is not in a call's group skips the call. In a round every lane makes its share of calls. Between rounds, with
nothing in flight, the ranks compare the bits of the results and measure their memory.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.bench import check
from flash_allreduce_plugin.cli.bench.check import Inputs, Segment
from flash_allreduce_plugin.cli.ranks import Say
from flash_allreduce_plugin.collectives import all_to_all as exchanges
from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.policy import SUMS, Collective, Plan, make_plan
from flash_allreduce_plugin.runtime import groups
from lab.soak import watch

LANES = 3
CALLS_A_ROUND = 200  # a lane
CONFIGS = 96
IN_FLIGHT = 5  # most pending handles of a lane
WITH_ALL: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
WITH_ONE_ROOT: tuple[Collective, ...] = ("broadcast", "reduce", "gather", "scatter")
COLLECTIVES: tuple[Collective, ...] = (*WITH_ALL, *WITH_ONE_ROOT, "send")
IN_PARTS = ("reduce_scatter", "all_to_all", "scatter")  # the input has a part for every rank
SAME_ON_ALL = ("all_reduce", "all_gather", "broadcast")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def groups_of(lane: int, world: int) -> list[tuple[int, ...]]:
    """Return the ranks of a lane's groups: all ranks twice, neighbours, all but one."""
    every = tuple(range(world))
    pairs = [(rank, rank + 1) for rank in range(world - 1)]
    chosen = ([every, every], pairs, [every[:-1], every[1:], every])[lane]
    return [ranks for ranks in chosen if len(ranks) > 1]


def draw_config(draw: random.Random, i: int) -> fap.FlashConfig:
    """Return the i-th configuration. The first keeps small messages in full precision."""
    layout = draw.choice(["asymmetric", "symmetric", "compact", "codebook"])
    fields: dict[str, Any] = {
        "bits": draw.randint(2, 8),
        "reduce_bits": draw.choice([None, None, 8]),
        "group_size": draw.choice([32, 64, 128, 256, 1024]),
        "symmetric": layout == "symmetric",
        "compact": layout == "compact",
        "spike_reserving": draw.random() < 0.25,
        "hadamard": draw.random() < 0.25,
        "rounding": draw.choice(["nearest", "nearest", "stochastic"]),
        "seed": i,
        "chunk_bytes": draw.choice([4096, 16384, 65536, 1 << 20]),
        "min_bytes": 1 << 16 if i == 0 else 0,
    }
    if layout == "codebook":
        fields.update(codebook=True, group_size=draw.choice([128, 256, 1024]), rounding="nearest")
    if i % 12 == 1:
        fields.update(range="mse", rounding="nearest")
    if i % 6 == 2:
        fields["hierarchical"] = {"intra_bits": 8, "inter_bits": draw.randint(2, 8), "ranks_per_node": 2}
    if i % 8 == 3:
        fields.update(quality_interval=draw.choice([1, 5]), quality_measure=draw.choice(["local", "exact"]))
    return fap.FlashConfig.from_dict(fields)


def filling_configs() -> list[fap.FlashConfig]:
    """Return the configurations of calls with the largest buffers, flat and in two levels."""
    widest = fap.FlashConfig(bits=8, group_size=32, spike_reserving=True, chunk_bytes=1 << 20, min_bytes=0)
    nodes = {"intra_bits": 8, "inter_bits": 8, "ranks_per_node": 2}
    return [widest, widest.model_copy(update={"hierarchical": nodes})]


@dataclass(frozen=True)
class Call:
    """One call.

    sizes: of the parts, one or one a rank. root: of a call with one; the sender of a send to the next rank.
    most_in_flight: pending handles of the lane, this one included. start: of its numbers in the pool.
    """

    lane: int
    number: int
    ranks: tuple[int, ...]
    group: int
    collective: Collective
    dtype: torch.dtype
    config: int
    average: bool
    sizes: tuple[int, ...]
    root: int
    strided: bool
    asynchronous: bool
    most_in_flight: int
    start: int

    def size(self, part: int) -> int:
        """Return the size of a part of a rank's input. part: the receiver's rank, if there is one part a rank."""
        return self.sizes[part if len(self.sizes) > 1 else 0]

    def from_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose values a rank receives, in order, or sums. Empty: the rank has no result."""
        every, here = tuple(range(len(self.ranks))), rank == self.root
        if self.collective in ("reduce", "gather"):
            return every if here else ()
        if self.collective == "send":
            return (self.root,) if rank == self.receiver else ()
        return (self.root,) if self.collective in WITH_ONE_ROOT else every

    @property
    def receiver(self) -> int:
        return (self.root + 1) % len(self.ranks)


@dataclass(frozen=True)
class Pooled(Inputs):
    """Every rank's input of one call, from a pool on all ranks. Averages are sums of shares."""

    pool: Tensor = field(default_factory=lambda: torch.empty(0))
    call: Call | None = None

    def given(self, rank: int, part: int) -> Tensor:
        """Return a rank's input; a view of the pool, if the pool has the call's dtype."""
        assert self.call is not None
        size = self.call.size(part)
        first = (self.call.start + 1_000_003 * rank + 99_991 * part) % (len(self.pool) - size)
        return self.pool[first : first + size].to(self.dtype)

    def piece(self, rank: int, part: int, i: int) -> Tensor:
        assert self.call is not None and i == 0
        given = self.given(rank, part)
        return given.double() / self.world_size if self.call.average else given


def draw_calls(lane: int, settings: dict[str, Any], configs: list[fap.FlashConfig]) -> Iterator[Call]:
    """Yield the calls of a lane, endlessly. configs: the last ones are filling_configs.

    The first calls have the largest sizes and the most pending handles, so that the groups' pools of buffers are full
    before memory is measured. A group caches sizes in full precision, so there are few such sizes.
    """
    draw = random.Random(f"{settings['seed']} {lane}")
    groups, largest = groups_of(lane, settings["world"]), settings["largest"]
    drawn = len(configs) - len(filling_configs())
    every = itertools.product(range(len(groups)), COLLECTIVES, range(drawn, len(configs)), range(2 * IN_FLIGHT))
    filling = itertools.islice(every, settings["calls"] // LANES // 10)
    for number in itertools.count():
        group, collective, config = draw.randrange(len(groups)), draw.choice(COLLECTIVES), draw.randrange(drawn)
        kind, dtype, asynchronous = draw.random(), draw.choice(DTYPES), draw.random() < 0.6
        if kind < 0.04:
            numel = draw.choice([0, 1])
        elif kind < 0.75:
            numel = int(2 ** draw.uniform(1, 15))
        elif kind < 0.995:
            numel = int(2 ** draw.uniform(12, 17))
        else:
            numel = draw.randint(largest // 4, largest)
        numel, root = min(numel, largest), draw.randrange(len(groups[group]))
        if draw.random() < 0.07:
            numel, config = 1 << min(numel, 1 << 15).bit_length(), 0
        fill = next(filling, None)
        if fill is not None:
            group, collective, config, _ = fill
            root = draw.randrange(len(groups[group]))
            numel, asynchronous, dtype = 9 * largest // 8, True, torch.float32
        world = len(groups[group])
        each = numel if collective in ("all_reduce", "reduce", "broadcast", "send") else -(-numel // world)
        sizes: tuple[int, ...] = (each,)
        if collective in ("reduce_scatter", "all_to_all"):
            uneven = fill is None and draw.random() < 0.3
            sizes = tuple(draw.randint(0, each) if uneven else each for _ in range(world))
        yield Call(
            *(lane, number, groups[group], group, collective, dtype, config),
            average=draw.random() < 0.3 and collective in SUMS and config != 0,
            sizes=sizes,
            root=root,
            strided=draw.random() < 0.1,
            asynchronous=asynchronous,
            most_in_flight=IN_FLIGHT if fill else draw.randint(IN_FLIGHT - 2, IN_FLIGHT) if asynchronous else 0,
            start=draw.randrange(1 << 30),
        )


def pool_of(seed: int, largest: int) -> Tensor:
    """Return Gaussian numbers whose scale changes every 1000 elements, with zeros, constants, and spikes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2 * largest // 1000 + 1, 1000, generator=generator)
    rows *= torch.exp2(torch.randint(-12, 7, (len(rows), 1), generator=generator))
    kind = torch.rand(len(rows), generator=generator)
    rows[kind < 0.02] = 0.0
    constant = (kind >= 0.02) & (kind < 0.04)
    rows[constant] = rows[constant, :1]
    rows[kind > 0.9, ::97] *= 20
    return rows.flatten()


class Lane:
    """A thread that starts calls, waits for them in random order, and checks the results."""

    def __init__(
        self,
        number: int,
        members: list[Any],
        configs: list[fap.FlashConfig],
        settings: dict[str, Any],
        watchdog: watch.Watchdog,
    ) -> None:
        """members: the groups from new_group; None: without this rank."""
        self.name = f"lane {number}"
        self._members = members
        self._configs = configs
        self._watchdog = watchdog
        self._draw = random.Random(f"{settings['seed']} {number} in flight")
        self._pool = pool_of(settings["seed"], settings["largest"])
        # Sums of whole numbers are exact, so calls in full precision must be exact too.
        self._whole = (3 * self._pool.clamp(-10, 10)).round()
        self._sites = [fap.Site(f"soak {number}.{i}") for i in range(4)]
        self.counts: Counter[str] = Counter()

    def pools(self) -> list[transport.BufferPool]:
        """Return the buffer pools of its groups."""
        return [groups.state_of(group).pool(torch.device("cpu")) for group in self._members if group is not None]

    def run(self, calls: list[Call]) -> Tensor:
        """Run the calls. Return a checksum of each result, 0 if this rank is not in the group."""
        torch.set_num_threads(1)
        checksums = torch.zeros(len(calls), dtype=torch.int64)
        in_flight: list[tuple[int, Any]] = []  # the same calls on every rank, also those of other groups
        for i, call in enumerate(calls):
            self._watchdog.advance(self.name, call)
            in_flight.append((i, self._start(call)))
            most = call.most_in_flight if i + 1 < len(calls) else 0
            while len(in_flight) >= max(1, most):
                at, started = in_flight.pop(self._draw.randrange(len(in_flight)))
                if started is not None:
                    self._watchdog.advance(self.name, ("waiting for", calls[at]))
                    checksums[at] = self._finish(calls[at], *started)
        return checksums

    def _start(self, call: Call) -> Any:
        group = self._members[call.group]
        if group is None:
            return None
        world, rank, config = group.size(), group.rank(), self._configs[call.config]
        pool = self._whole if config.min_bytes else self._pool
        inputs = Pooled(call.collective, max(call.sizes), call.dtype, world, pool=pool, call=call)
        if call.collective == "send" and rank not in (call.root, call.receiver):
            return None
        how: dict[str, Any] = {"group": group, "config": config}
        how["site"] = self._sites[call.number % len(self._sites) if call.config else 0]
        given = [inputs.given(rank, part).clone() for part in range(world if call.collective in IN_PARTS else 1)]
        work, outputs = _made(call, rank, given, how)
        return work, inputs, given, outputs

    def _finish(self, call: Call, work: Any, inputs: Pooled, given: list[Tensor], outputs: list[Tensor]) -> int:
        group, config = self._members[call.group], self._configs[call.config]
        world, rank = group.size(), group.rank()
        if work is not None:
            work.wait()
        result = torch.cat([output.reshape(-1) for output in outputs]) if outputs else given[0][:0]
        plan = make_plan(
            call.collective,
            numel=sum(call.sizes) * (world if call.collective in ("all_gather", "gather", "scatter") else 1),
            dtype=call.dtype,
            world_size=world,
            op="avg" if call.average else "sum",
            site=self._sites[0],
            config=config,
            nodes=groups.nodes_of(Label(call.collective, "soak", group), config, result.device),
        )
        rule = exchanges.Rule(call.dtype.itemsize, world, config.min_bytes)
        quantized = isinstance(plan, Plan)
        if call.collective == "all_to_all" and not rule.quantizes(call.size(rank)):
            quantized = False  # no run of this rank is quantized
        # torch's reduce may use the tensors of the other ranks for its sums.
        if call.collective != "reduce" or quantized:
            for part, tensor in enumerate(given):
                if not torch.equal(tensor, inputs.given(rank, part)):
                    raise AssertionError(f"the input has changed: {call}")
        for what in (call.collective, str(call.dtype).removeprefix("torch."), "quantized" if quantized else "plain"):
            self.counts[what] += rank == call.root
        self.counts["asynchronous"] += rank == call.root and call.asynchronous
        # If all ranks have the same bits, one rank checks the distance from the sum.
        if call.collective not in SAME_ON_ALL or call.number % world == rank:
            self._check(call, plan if quantized and isinstance(plan, Plan) else None, inputs, result, rank)
        bits = hashlib.blake2b(digest_size=7)
        if result.numel():
            bits.update(result.view(torch.uint8).numpy().tobytes())
        return int.from_bytes(bits.digest(), "little")

    def _check(self, call: Call, plan: Plan | None, inputs: Pooled, result: Tensor, rank: int) -> None:
        part, sources = rank if call.collective in IN_PARTS else 0, call.from_ranks(rank)
        size = call.size(part)
        together = [sources] if call.collective in SUMS and sources else [(source,) for source in sources]
        segments = [Segment(i * size, part, 0, 0, size, ranks) for i, ranks in enumerate(together)]
        if len(result) != size * len(segments):
            raise AssertionError(f"expected {size * len(segments)} elements, not {len(result)}: {call}")
        travels_as: Collective = "reduce_scatter" if call.collective == "reduce" else "all_gather"
        travels_as = call.collective if call.collective in WITH_ALL else travels_as
        travel = None if plan is None else lambda x: check.two_step(x, travels_as, plan)
        group_size = 128 if plan is None else plan.reduce.group_size
        parts = (segment for segment in segments if segment.last)
        wrong, signal, noise = check.compare(result, inputs, parts, group_size, travel)
        self.counts["elements checked"] += sum(segment.last for segment in segments)
        if wrong:
            config = self._configs[call.config]
            raise AssertionError(
                f"{wrong} of {result.numel()} elements are further from the exact result than guarantee 6 allows "
                f"(signal {signal:g}, noise {noise:g}): {call} with {config!r}"
            )


def _made(call: Call, rank: int, given: list[Tensor], how: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """Make the call as a rank of its group. Return its handle and the tensors that it writes. given: the inputs."""
    world, at_root, of_root = len(call.ranks), rank == call.root, call.ranks[call.root]
    op = dist.ReduceOp.AVG if call.average else dist.ReduceOp.SUM

    def empty(numel: int) -> Tensor:
        return _laid_out(given[0].new_empty(numel), call.strided)

    if call.collective == "send":
        here, peer = (fap.isend, call.receiver) if at_root else (fap.irecv, call.root)
        output = given[0] if at_root else empty(call.size(0))
        work = here(output, call.ranks[peer], **how)
        if not call.asynchronous:
            work.wait()
        return work if call.asynchronous else None, [] if at_root else [output]
    how = {**how, "async_op": call.asynchronous}
    if call.collective in ("all_reduce", "broadcast"):
        output = _laid_out(given[0].clone(), call.strided)
        if call.collective == "broadcast":
            return fap.broadcast(output, of_root, **how), [output]
        return fap.all_reduce(output, op, **how), [output]
    if call.collective == "reduce":
        output = _laid_out(given[0].clone(), call.strided) if at_root else given[0]
        return fap.reduce(output, of_root, op, **how), [output] if at_root else []
    if call.collective == "gather":
        outputs = [empty(call.size(0)) for _ in range(world)] if at_root else []
        return fap.gather(given[0], outputs or None, of_root, **how), outputs
    if call.collective == "scatter":
        output = empty(call.size(0))
        return fap.scatter(output, given if at_root else None, of_root, **how), [output]
    if call.collective == "all_gather":
        output = empty(world * call.size(0))
        return fap.all_gather(output, given[0], **how), [output]
    if call.collective == "all_to_all":
        output = given[0].new_empty(world * call.size(rank))
        splits = [call.size(rank)] * world, [call.size(part) for part in range(world)]
        return fap.all_to_all(output, torch.cat(given), *splits, **how), [output]
    output = empty(call.size(rank))
    even = len(set(call.sizes)) == 1
    return fap.reduce_scatter(output, torch.cat(given) if even else given, op, **how), [output]


def differing(calls: list[Call], checksums: Tensor) -> list[Call]:
    """Return the calls whose results should have equal bits on all ranks and have not. checksums: [ranks, calls]."""
    return [
        call
        for call, column in zip(calls, checksums.t().tolist(), strict=True)
        if call.collective in SAME_ON_ALL and len({column[rank] for rank in call.ranks}) > 1
    ]


def _laid_out(tensor: Tensor, strided: bool) -> Tensor:
    """Return the tensor with other strides, if `strided`."""
    if not strided or tensor.numel() % 2:
        return tensor
    return tensor.view(2, -1).t().contiguous().t()


def measure(settings: dict[str, Any], say: Say) -> dict[str, Any]:
    """Run in every rank. settings: calls, seed, largest (elements of a tensor), patience (seconds)."""
    torch.set_num_threads(1)
    try:
        with watch.Watchdog(dist.get_rank(), settings["patience"]) as watchdog:
            return _measure(settings, say, watchdog)
    except BaseException:
        watch.end()


def _measure(settings: dict[str, Any], say: Say, watchdog: watch.Watchdog) -> dict[str, Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    settings["world"] = world
    timeout = timedelta(seconds=2 * settings["patience"])  # the watchdog ends the rank before
    draw = random.Random(settings["seed"])
    configs = [*(draw_config(draw, i) for i in range(CONFIGS)), *filling_configs()]
    lanes, drawn, groups_made = [], [], 0
    per_lane = -(-settings["calls"] // LANES)
    for number in range(LANES):
        members = []
        for ranks in groups_of(number, world):
            made = dist.new_group(ranks, timeout=timeout)
            members.append(made if rank in ranks else None)
            groups_made += 1
        lanes.append(Lane(number, members, configs, settings, watchdog))
        drawn.append(itertools.islice(draw_calls(number, settings, configs), per_lane))
    among_all = dist.new_group(timeout=timeout)
    threads = [ThreadPoolExecutor(1, thread_name_prefix=lane.name) for lane in lanes]
    done, samples, bits = 0, [], hashlib.sha256()
    while done < LANES * per_lane:
        rounds = [list(itertools.islice(calls, CALLS_A_ROUND)) for calls in drawn]
        futures = [thread.submit(lane.run, calls) for thread, lane, calls in zip(threads, lanes, rounds, strict=True)]
        wait(futures, return_when=FIRST_EXCEPTION)
        made = [call for calls in rounds for call in calls]
        mine = torch.cat([future.result() for future in futures])
        everybodys = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everybodys, mine, group=among_all)
        if different := differing(made, torch.stack(everybodys)):
            config = configs[different[0].config]
            raise AssertionError(f"the ranks have results of different bits: {different[0]} with {config!r}")
        bits.update(torch.stack(everybodys).numpy().tobytes())
        done += len(made)
        if any(messages.unfinished for messages in transport._messages.values()):
            raise AssertionError("a message is kept that nobody waits for, though every handle was waited on")
        buffers = sum(pool.free_bytes() for lane in lanes for pool in lane.pools())
        samples.append(watch.sample(done, among_all, buffers=buffers))
        say(**samples[-1])
    counts = sum((lane.counts for lane in lanes), Counter())
    total = torch.tensor([counts[key] for key in sorted(_COUNTED)], dtype=torch.int64)
    dist.all_reduce(total, group=among_all)
    return {
        "calls": done,
        "groups": groups_made,
        "threads": LANES,
        "counts": dict(zip(sorted(_COUNTED), total.tolist(), strict=True)),
        "bits of all results": bits.hexdigest()[:16],
        "samples": samples,
    }


_COUNTED = {*COLLECTIVES, "float32", "bfloat16", "float16", "quantized", "plain", "asynchronous", "elements checked"}
