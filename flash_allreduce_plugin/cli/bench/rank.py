"""`bench` in every rank: check each variant of a collective, then time the correct ones alternately."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.cli import checkout
from flash_allreduce_plugin.cli.bench import check
from flash_allreduce_plugin.cli.bench.check import Inputs
from flash_allreduce_plugin.cli.bench.codec_speed import codec_rows
from flash_allreduce_plugin.cli.ranks import Say
from flash_allreduce_plugin.cli.timing import interleaved
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.policy import Collective, FullPrecision, Plan, Site, make_plan
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.telemetry import counters

if TYPE_CHECKING:
    from lab.benchmarks.ring import RingAllReduce

FULL_PRECISION = "full precision"
BUSBW_FACTOR = {
    "all_reduce": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
    "all_to_all": 1,
}  # x (N-1)/N, as nccl-tests has it

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass
class Variant:
    """One way to run the collective.

    run(output, input): all_reduce reads output only. group_size: of its codec. travel: the roundings of its groups;
    None: no rounding. ring: the ring, if it is one.
    """

    name: str
    run: Callable[[Tensor, Tensor], object]
    wire_bytes: float
    group_size: int = 128
    travel: Callable[[Any], check.Groups] | None = None
    ring: RingAllReduce | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def measure(settings: dict[str, Any], say: Say) -> list[dict[str, Any]]:
    """Return the rows of every collective and size; each is sent as a message when it is ready.

    settings: collectives, sizes (bytes), datatype, device, configs {name: configuration}, algorithms, iters, warmup,
    rounds, check, line (bytes a second of the link, or None).
    """
    cases = [(collective, size) for collective in settings["collectives"] for size in settings["sizes"]]
    rows: list[dict[str, Any]] = []
    for number, (collective, size) in enumerate(cases):

        def progress(round_: int, number: int = number, collective: str = collective, size: int = size) -> None:
            done = number + round_ / (settings["rounds"] + 1)
            say(done=done, of=len(cases), collective=collective, size=size, round=round_)

        progress(0)
        of_case = codec_rows if collective == "codec" else collective_rows
        for row in of_case(collective, size, settings, progress):
            rows.append(row)
            say(row=row)
    return rows


def collective_rows(
    collective: Collective, size: int, settings: dict[str, Any], progress: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Return one row a variant: checked first, then timed alternately with the others. A wrong one is not timed."""
    group = dist.group.WORLD
    assert group is not None
    rank, world = group.rank(), group.size()
    device = torch.device(settings["device"])
    dtype: torch.dtype = getattr(torch, settings["datatype"])
    parts = 1 if collective == "all_reduce" else world
    numel = size // dtype.itemsize // parts
    inputs = Inputs(collective, numel, dtype, world)
    variants = _variants(inputs, numel * parts, settings, device, group)
    buffers = _Buffers(inputs, rank, device)
    checked = _checked(variants, buffers, inputs, settings, progress)
    # In place, sums grow by the number of ranks from call to call: they start as far below 1 as they end above it.
    if collective == "all_reduce":
        buffers.input.mul_(float(world) ** (-settings["iters"] / 2))
    right = {
        v.name: partial(v.run, buffers.output, buffers.input) for v in variants if not checked[v.name].get("wrong")
    }
    times = interleaved(
        right,
        settings["rounds"],
        settings["iters"],
        warmup=settings["warmup"],
        before=buffers.fresh,
        on_round=progress,
    )
    rival = checked[FULL_PRECISION].get("sqnr_db")
    for v in variants[1:]:
        checked[v.name]["rival_sqnr_db"] = rival
    return [_row(v, inputs, numel * parts, settings, times, checked[v.name]) for v in variants]


def _checked(
    variants: list[Variant],
    buffers: _Buffers,
    inputs: Inputs,
    settings: dict[str, Any],
    progress: Callable[[int], None],
) -> dict[str, dict[str, Any]]:
    """Run every variant once, note the bytes that it sends, and compare its result if required."""
    rank = dist.get_rank()
    found: dict[str, dict[str, Any]] = {v.name: {} for v in variants}
    for v in variants:
        progress(0)
        buffers.fresh()
        counters.reset_stats()
        v.run(buffers.output, buffers.input)
        sent = counters.stats()["bytes_sent"] if v.ring is None else v.ring.bytes_sent
        v.wire_bytes = sent or v.wire_bytes
        if settings["check"]:
            found[v.name] = _check(v, buffers.output, inputs, rank)
    if settings["check"]:
        numbers = replace(inputs, whole=True)
        whole = _Buffers(numbers, rank, buffers.input.device)
        for v in variants:
            if v.travel is None:
                whole.fresh()
                v.run(whole.output, whole.input)
                found[v.name]["wrong"] = _check(v, whole.output, numbers, rank)["wrong"]
    return found


def _row(
    v: Variant,
    inputs: Inputs,
    count: int,
    settings: dict[str, Any],
    times: dict[str, list[float]],
    checked: dict[str, Any],
) -> dict[str, Any]:
    collective, world, size = inputs.collective, inputs.world_size, count * inputs.dtype.itemsize
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    seconds, full = medians.get(v.name), medians.get(FULL_PRECISION)
    algbw = None if seconds is None else size / seconds
    return {
        "ranks": world,
        "collective": collective,
        "size": size,
        "count": inputs.numel,
        "type": settings["datatype"],
        "redop": None if collective in ("all_gather", "all_to_all") else "sum",
        "variant": v.name,
        "seconds": seconds,
        "seconds_by_round": times.get(v.name, []),
        "algbw": algbw,
        "busbw": algbw and algbw * BUSBW_FACTOR[collective] * (world - 1) / world,
        "wrong": checked.get("wrong"),
        "wire_bytes": round(v.wire_bytes),
        "sqnr_db": checked.get("sqnr_db"),
        "rival_sqnr_db": checked.get("rival_sqnr_db"),
        "speedup": seconds and full and full / seconds,
        "of_the_line": seconds and settings["line"] and v.wire_bytes / settings["line"] / seconds,
        **v.facts,
    }


class _Buffers:
    """The input and the output of this rank. all_reduce is in place, on a copy of the input."""

    def __init__(self, inputs: Inputs, rank: int, device: torch.device) -> None:
        self.in_place = inputs.collective == "all_reduce"
        self.input = inputs.tensor(rank).to(device)
        many = inputs.world_size if inputs.collective in ("all_gather", "all_to_all") else 1
        self.output = self.input.new_empty(many * inputs.numel)

    def fresh(self) -> None:
        if self.in_place:
            self.output.copy_(self.input)


def _variants(
    inputs: Inputs, count: int, settings: dict[str, Any], device: torch.device, group: dist.ProcessGroup
) -> list[Variant]:
    if "ring" in settings["algorithms"]:
        checkout.need("--algorithm ring", "ring")
    world, collective = inputs.world_size, inputs.collective
    size = count * inputs.dtype.itemsize
    ring_bytes = BUSBW_FACTOR[collective] * size * (world - 1) / world
    variants = [Variant(FULL_PRECISION, partial(plain, collective), ring_bytes)]
    for name, fields in settings["configs"].items():
        config = FlashConfig.from_dict(fields)
        plan = _plan(inputs, count, config, device, group)
        for algorithm in settings["algorithms"]:
            if algorithm == "two-step":
                variants.append(_two_step(name, inputs, config, plan))
            elif isinstance(plan, Plan) and collective == "all_reduce":
                variants.append(_ring(f"{name} ring", inputs, plan, group))
        if settings["algorithms"] != ["two-step"] and isinstance(plan, Plan):
            from lab.benchmarks.ring import sent_bytes

            formula = sent_bytes(count, plan.reduce, world)
            for v in variants[1:]:
                v.facts.setdefault("wire_bytes_formula", formula)
    return variants


def plain(collective: Collective, output: Tensor, input: Tensor) -> None:
    """Run torch.distributed's collective, as a program without the plugin does."""
    if collective == "all_reduce":
        dist.all_reduce(output)
    elif collective == "reduce_scatter":
        _reduce_scatter(output, input)
    elif collective == "all_to_all":
        dist.all_to_all_single(output, input)
    else:
        _all_gather(output, input)


def _plan(
    inputs: Inputs, count: int, config: FlashConfig, device: torch.device, group: dist.ProcessGroup
) -> Plan | FullPrecision:
    """Return the plan of the call, as in api/reductions.py."""
    if environment.is_on(environment.DISABLE):
        return FullPrecision(environment.DISABLE)
    return make_plan(
        inputs.collective,
        numel=count,
        dtype=inputs.dtype,
        world_size=inputs.world_size,
        op="sum",
        site=Site("bench"),
        config=config,
        nodes=groups.nodes_of(Label(inputs.collective, "bench", group), config, device),
    )


def _two_step(name: str, inputs: Inputs, config: FlashConfig, plan: Plan | FullPrecision) -> Variant:
    run: Callable[[Tensor, Tensor], object]
    if inputs.collective == "all_reduce":
        run = lambda output, input: reductions.all_reduce(output, config=config)  # noqa: E731
    else:
        run = partial(getattr(reductions, inputs.collective), config=config)
    if isinstance(plan, FullPrecision):
        return Variant(name, run, 0, facts={"full_precision": plan.reason})
    roundings = 2 if inputs.collective == "all_reduce" else 1
    steps, nodes = roundings, plan.nodes is not None
    if nodes and inputs.collective in ("all_reduce", "reduce_scatter"):
        roundings += 1
    return Variant(
        name,
        run,
        0,
        plan.reduce.group_size,
        lambda groups: check.two_step(groups, inputs.collective, plan),
        facts={
            "algorithm": "two levels" if nodes else "two-step",
            "steps": steps * (1 + nodes),
            "roundings": roundings,
        },
    )


def _ring(name: str, inputs: Inputs, plan: Plan, group: dist.ProcessGroup) -> Variant:
    from lab.benchmarks.ring import RingAllReduce

    wire = plan.reduce
    ring = RingAllReduce(inputs.numel, wire, plan.chunk_bytes, group)
    return Variant(
        name,
        lambda output, input: ring(output),
        0,
        wire.group_size,
        lambda groups: check.ring(groups, wire),
        ring,
        {"algorithm": "ring", "steps": 2 * (ring.world - 1), "roundings": ring.world},
    )


def _check(v: Variant, result: Tensor, inputs: Inputs, rank: int) -> dict[str, Any]:
    """Return wrong elements and SQNR in dB over all ranks (None without an error)."""
    parts = check.segments(inputs, rank) if v.ring is None else check.ring_segments(inputs, v.ring)
    wrong, signal, noise = check.compare(result, inputs, parts, v.group_size, v.travel)
    if inputs.collective in ("all_reduce", "all_gather"):  # the others leave different results on the ranks
        wrong += check.differing(result)
    total = torch.tensor([wrong, signal, noise], dtype=torch.float64)
    dist.all_reduce(total)
    wrong, signal, noise = total.tolist()
    db = counters.sqnr_db(signal, noise)
    return {"wrong": int(wrong), "sqnr_db": db if math.isfinite(db) else None}
