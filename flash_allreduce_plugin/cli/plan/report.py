"""The output of `plan`: a step in full precision and at each width."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flash_allreduce_plugin.cli.plan.cost_model import Cluster, Group, Model, dp_ratio, pp_ratio, tp_ratio
from flash_allreduce_plugin.cli.plan.memory import Memory, estimate
from flash_allreduce_plugin.cli.plan.step_model import (
    FORWARD,
    FSDP_PARAMETERS,
    GRADIENT,
    PARAMETERS,
    VALUE_BITS,
    Layout,
    Step,
    advise,
    group_of,
    predict,
    quantizable,
    widths_at,
)
from flash_allreduce_plugin.cli.plan.tables import amount, grid, ms
from flash_allreduce_plugin.config import FlashConfig

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDE = 150  # columns that the table of traffic needs for bytes and times of three widths
LEFT_OUT = (
    "An estimate. Left out: contention inside switches and between sockets, the slowdown of GEMMs by the "
    "codec and the transfers, stragglers, messages too small to fill a link, trees and reductions inside the network, "
    "the host's time in the framework, the optimizer's time, accuracy. Never quantized here: the embedding."
)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A plan. widths: the fields that pay, by width. steps: with these. every: with all fields."""

    model: Model
    name: str
    source: str
    cluster: Cluster
    layout: Layout
    widths: dict[int, dict[str, int]]
    steps: dict[int, Step]
    every: dict[int, Step]

    @property
    def memory(self) -> Memory:
        return estimate(self.model, self.layout)

    @property
    def fits(self) -> bool | None:
        """True if a GPU has enough memory; None: its size is not known."""
        return self.memory.total <= self.cluster.memory if self.cluster.memory < math.inf else None

    @property
    def full(self) -> Step:
        return next(iter(self.steps.values()))

    def best(self, bits: int) -> float:
        """Return the speed-up if all quantizable traffic cost nothing."""
        step = self.every[bits]
        gone = sum(part.before.exposed for part in step.parts if part.bits)
        return step.before / (step.before - gone)


def make_forecast(
    model: Model, name: str, source: str, cluster: Cluster, layout: Layout, bits: Sequence[int]
) -> Forecast:
    widths = {b: advise(model, cluster, layout, b) for b in bits}
    fields = quantizable(model, cluster, layout)
    return Forecast(
        model, name, source, cluster, layout, widths,
        {b: predict(model, cluster, layout, widths[b]) for b in bits},
        {b: predict(model, cluster, layout, widths_at(layout, fields, b)) for b in bits},
    )  # fmt: skip


def section(layout: Layout, widths: Mapping[str, int], bits: int) -> dict[str, Any]:
    """Return the settings that quantize these fields only; empty: leave the plugin off."""
    if not widths:
        return {}
    settings: dict[str, Any] = {"bits": bits}
    if layout.framework != "torch":
        settings |= {key: value for key, value in widths.items() if setting(layout, key) != "bits"}
    if layout.framework == "megatron" and layout.tp > 1 and FORWARD not in widths:
        settings["exclude"] = ["*"]  # every module of tensor parallelism; patterns do not apply to data parallelism
    FlashConfig.from_dict(settings)  # checks the printed settings
    return settings


def setting(layout: Layout, field: str) -> str:
    """Return the name of the field in its framework: DeepSpeed's gradients have `bits`, torch has hooks."""
    if layout.framework == "torch":
        return {GRADIENT: "FlashReduceScatter" if layout.zero else "ddp_hook", FSDP_PARAMETERS: "FlashAllGather"}[field]
    return "bits" if layout.framework == "deepspeed" and field == GRADIENT else field


def flags(settings: Mapping[str, Any]) -> str:
    """Return Megatron-LM's launch flags of `settings`."""
    values = {key: ",".join(value) if isinstance(value, list) else value for key, value in settings.items()}
    given = [f"--flash-allreduce-{key.replace('_', '-')} '{value}'" if value == "*" else
             f"--flash-allreduce-{key.replace('_', '-')} {value}" for key, value in values.items()]  # fmt: skip
    return " ".join(["--flash-allreduce", *given])


def where(group: Group) -> str:
    return "inside a node" if group.nodes == 1 else f"between nodes, {group.per_node} of {group.ranks} a node"


def ratios(plan: Forecast) -> dict[str, float]:
    """Return t_comm / t_compute of the Ultra-Scale Playbook. Above 1 communication cannot be hidden."""
    c, a, m = plan.cluster, plan.layout, plan.model
    tokens = a.tokens(m)
    found = {}
    ranks = a.cp * a.dp
    if ranks > 1:
        group = group_of(a.tp, ranks, c.ranks_per_node)
        speed = min(group.per_node * c.inter, c.intra) if group.nodes > 1 else c.intra
        kind = "ZeRO-3 parameters" if a.zero == 3 else "data parallel"
        item = a.itemsize if a.zero == 3 else a.gradient_itemsize
        found[kind] = dp_ratio(item, tokens, ranks, c.flops, speed)
    if a.tp > 1:
        speed = c.intra if a.tp <= c.ranks_per_node else c.inter
        found["tensor parallel"] = tp_ratio(a.itemsize, m.hidden, a.tp, c.flops, speed)
    if a.pp > 1:
        speed = c.intra if a.ranks <= c.ranks_per_node else c.inter
        found["pipeline"] = pp_ratio(a.itemsize, m.hidden, m.layers // a.pp, c.flops, speed)
    return found


def show(plan: Forecast, console: Console) -> None:
    from rich.markup import escape

    m, a = plan.model, plan.layout
    tokens = a.micro_batch * a.accumulation * a.dp * m.sequence
    console.print(
        f"[bold]{escape(plan.name)}[/]: {m.parameters / 1e9:.4g} G parameters, {m.layers} layers of {m.hidden}, "
        f"{f'{m.experts_per_token} of {m.experts} experts a token, ' if m.experts else ''}"
        f"sequence {m.sequence} ({plan.source})",
        highlight=False,
    )
    console.print(
        f"{a.ranks} ranks: TP {a.tp}{', sequence parallel' if a.sequence_parallel else ''}, DP {a.dp}, PP {a.pp}, "
        f"{f'CP {a.cp} ({a.cp_comm_type}), ' if a.cp > 1 else ''}{f'EP {a.ep}, ' if a.ep > 1 else ''}"
        f"ZeRO {a.zero} ({a.framework}), micro-batch {a.micro_batch}, {a.accumulation} a step: {tokens} tokens a step",
        highlight=False,
    )
    for source in plan.cluster.sources:
        console.print(f"  {source}", highlight=False, markup=False, style="dim")
    _show_memory(plan, console)
    both = len(plan.steps) <= 3 and console.width >= _WIDE
    console.print(_traffic_table(plan, both))
    console.print(_step_table(plan))
    for kind, ratio in ratios(plan).items():
        verdict = "can be hidden" if ratio <= 1 else "cannot be hidden entirely"
        console.print(f"t_comm / t_compute, {kind}: {ratio:.2f}, {verdict}", highlight=False)
    for word, meaning in legend(plan, both).items():
        console.print(f"  {word}: {meaning}", highlight=False, markup=False, style="dim")
    console.print(_advice(plan), highlight=False, markup=False)
    console.print(LEFT_OUT, style="dim", highlight=False)


def _show_memory(plan: Forecast, console: Console) -> None:
    found, has = plan.memory, plan.cluster.memory
    parts = (f"{name} {amount(nbytes)}" for name, nbytes in dataclasses.asdict(found).items())
    of = "" if plan.fits is None else f" of {amount(has)}"
    console.print(f"Memory of a GPU, roughly: {amount(found.total)}{of} ({', '.join(parts)})", highlight=False)
    if plan.fits is False:
        console.print(
            f"Warning: this layout does not fit: {amount(found.total)} on a GPU of {amount(has)}. Raise --tp, --pp or "
            '--zero, lower --micro-batch, or set "recompute" in --layout FILE.',
            style="bold red", highlight=False, markup=False,
        )  # fmt: skip


def legend(plan: Forecast, both: bool) -> dict[str, str]:
    """Return the meanings of the words in the tables."""
    kinds = {part.kind.split()[0] for part in plan.full.parts}
    names = {
        "TP": "tensor parallel", "SP": "sequence parallel", "DP": "data parallel", "PP": "pipeline",
        "CP": "context parallel", "EP": "expert parallel", "ZeRO-3": "divided parameters",
    }  # fmt: skip
    words = {"traffic": ", ".join(f"{kind}: {names[kind]}" for kind in names if kind in kinds)}
    if any("(g)" in part.kind or "(f)" in part.kind for part in plan.full.parts):
        words["g, f"] = "Megatron's names of the all-reduces of a layer's forward and backward pass"
    words["setting"] = "the field of the configuration that quantizes this traffic; never: in full precision always"
    words["sent, ms"] = "bytes that a rank sends in a step, and their time"
    words["exposed"] = "the ms that computation does not hide: the step waits for them"
    if not both:
        words["INT8, ..."] = "exposed ms at that width"
    if plan.layout.zero == 3 and any(part.field == PARAMETERS for part in plan.full.parts):
        words[PARAMETERS] = f"{VALUE_BITS} bits at every width: ZeRO-3 gathers values, and computes with rounded values"
    if plan.layout.cp > 1 and plan.layout.cp_comm_type == "p2p":
        words["CP ring"] = (
            'Transformer Engine\'s own sends, never quantized; the exchanges of "cp_comm_type": "a2a" can be'
        )
    if plan.layout.pp > 1:
        words["bubble"] = "ms that a pipeline stage waits for the others"
    words["host"] = "the host's ms in quantized calls, without the framework's own work"
    words["speed-up"] = (
        "with the settings below; everything quantized: with every setting; at most: if that traffic took no time"
    )
    if ratios(plan):
        words["t_comm / t_compute"] = (
            "time of a transfer over the time of the computation that hides it; above 1 the step waits"
        )
    return words


def _traffic_table(plan: Forecast, both: bool) -> Table:
    """Return the table of traffic. both: show bytes and exposed ms of each width, else exposed ms only."""
    columns = ["traffic", "setting", "where", "sent", "ms", "exposed"]
    for bits in plan.steps:
        columns += [f"INT{bits}: sent", "exposed"] if both else [f"INT{bits}"]
    table = grid("Communication of one step and rank, in full precision and quantized", columns, left=3)
    for number, part in enumerate(plan.full.parts):
        cells = [
            part.kind,
            setting(plan.layout, part.field) if part.field else "never",
            where(part.group),
            amount(part.before.bytes_sent),
        ]
        cells += [ms(part.before.seconds), ms(part.before.exposed)]
        for step in plan.every.values():
            after = step.parts[number].after
            none = step.parts[number].bits is None
            two = " *" if after.way == "two levels" else ""
            cost = ["", ""] if none else [f"{amount(after.bytes_sent)}{two}", ms(after.exposed)]
            cells += cost if both else [cost[1] + (two if cost[1] else "")]
        table.add_row(*cells)
    if any(part.after.way == "two levels" for step in plan.every.values() for part in step.parts):
        table.caption = '* in two levels: needs "hierarchical": "auto"'
    return table


def _step_table(plan: Forecast) -> Table:
    columns = ["", "step ms", "computing", "bubble", "exposed", "host", "speed-up", "everything quantized", "at most"]
    table = grid("Time of a step", columns)
    full = plan.full
    table.add_row("full precision", *map(ms, (full.before, full.compute, full.bubble_before)),
                  ms(full.before - full.compute - full.bubble_before), "", "1.00 x", "", "")  # fmt: skip
    for bits, step in plan.steps.items():
        exposed = step.after - step.compute - step.bubble_after
        table.add_row(
            f"INT{bits}", *map(ms, (step.after, step.compute, step.bubble_after, exposed, step.host)),
            f"{step.speedup:.2f} x", f"{plan.every[bits].speedup:.2f} x", f"{plan.best(bits):.2f} x",
        )  # fmt: skip
    return table


def settings_of(plan: Forecast, bits: int) -> dict[str, Any]:
    """Return the settings at `bits`, with two levels where they are faster."""
    settings = section(plan.layout, plan.widths[bits], bits)
    step = plan.steps[bits]
    if settings and any(part.after.way == "two levels" for part in step.parts if part.bits):
        settings["hierarchical"] = "auto"
    return settings


def _advice(plan: Forecast) -> str:
    lines = []
    for bits in plan.widths:
        settings = settings_of(plan, bits)
        if not settings:
            lines.append(f"INT{bits}: leave the plugin off; no setting makes this step faster by half a percent.")
            continue
        if plan.layout.framework == "deepspeed":
            lines.append(f'INT{bits}: "flash_allreduce": {json.dumps(settings)}')
        elif plan.layout.framework == "torch":
            given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            hooks = [setting(plan.layout, field) for field in plan.widths[bits]]
            lines.append(f"INT{bits}: " + ", ".join(f"fap.{hook}(fap.FlashConfig({given}))" for hook in hooks))
        else:
            lines.append(f"INT{bits}: {flags(settings)}")
            lines.append(f"      {json.dumps(settings)}")
        idle = [field for field in quantizable(plan.model, plan.cluster, plan.layout) if field not in plan.widths[bits]]
        if idle:
            names = ", ".join(setting(plan.layout, field) for field in idle)
            lines.append(f"      does not pay here: {names}")
    return "\n".join(["Settings:", *lines])


def show_scale(rows: Sequence[tuple[int, Forecast | str]], console: Console) -> None:
    """Print the plans for several numbers of ranks, or why there is none."""
    bits = next((list(plan.steps) for _, plan in rows if not isinstance(plan, str)), [])
    columns = ["ranks", "DP", "GPU memory", "full precision ms", *(f"INT{b}" for b in bits), "fields that pay"]
    table = grid("By number of ranks", columns, 1)
    for ranks, plan in rows:
        if isinstance(plan, str):
            table.add_row(str(ranks), "", "", "", *("" for _ in bits), plan)
            continue
        gains = (f"{step.speedup:.2f} x" for step in plan.steps.values())
        pays = ", ".join(setting(plan.layout, field) for field in plan.widths[bits[0]]) or "nothing"
        memory = amount(plan.memory.total) + (" !" if plan.fits is False else "")
        table.add_row(str(ranks), str(plan.layout.dp), memory, ms(plan.full.before), *gains, pays)
    if any(not isinstance(plan, str) and plan.fits is False for _, plan in rows):
        table.caption = "! does not fit the GPU"
    console.print(table)


def as_dict(plan: Forecast) -> dict[str, Any]:
    return {
        "model": {"name": plan.name, "source": plan.source, "parameters": plan.model.parameters}
        | dataclasses.asdict(plan.model),
        "cluster": dataclasses.asdict(plan.cluster)
        | {key: _finite(getattr(plan.cluster, key)) for key in ("transport", "memory")},
        "layout": dataclasses.asdict(plan.layout) | {"ranks": plan.layout.ranks},
        "memory": dataclasses.asdict(plan.memory)
        | {"total": plan.memory.total, "of": _finite(plan.cluster.memory), "fits": plan.fits},
        "ratios": ratios(plan),
        "full precision": {
            "seconds": plan.full.before, "compute": plan.full.compute, "bubble": plan.full.bubble_before,
        },
        "widths": {
            str(bits): {
                "seconds": step.after, "speed-up": step.speedup, "bubble": step.bubble_after, "host": step.host,
                "everything quantized": plan.every[bits].speedup, "at most": plan.best(bits),
                "pays": list(plan.widths[bits]), "settings": settings_of(plan, bits),
                "traffic": [_part(part) for part in plan.every[bits].parts],
            }
            for bits, step in plan.steps.items()
        },
        "left out": LEFT_OUT,
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if value != float("inf") else None


def _part(part: Any) -> dict[str, Any]:
    group = {"ranks": part.group.ranks, "per node": part.group.per_node}
    return {"kind": part.kind, "setting": part.field, "bits": part.bits, "group": group} | {
        name: dataclasses.asdict(cost) for name, cost in (("full precision", part.before), ("quantized", part.after))
    }
