"""First half of lab/planning/plan_check.py: predictions against our measurements on rate-limited links.

Inputs, from step_time.json's run without a limit: the step without collectives (arithmetic), the bf16 step (the
device's time of a sent byte), the INT8 step (the cost of a quantized call besides its bytes), and the rate of each
link. All other numbers are predicted; none is fitted to a row. The layer has its own time without collectives.
DeepSpeed's inputs are steps without sent gradients: of the same stage, or, with quantized parameters, of stage 0, which
gathers none.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flash_allreduce_plugin.cli.plan.cost_model import Cluster, Group, Kind, Model, Traffic, cost
from flash_allreduce_plugin.cli.plan.step_model import Layout, predict, quantizable, traffic
from flash_allreduce_plugin.codec.format import Format
from lab.benchmarks import netlab

#: The largest allowed difference of a prediction from the measured time.
WITHIN = 0.15
#: Bytes a second that the codec reads and writes together, one core, bf16 (codec.json: 21 GB/s read of fp32).
CORE_CODEC = 20e9
_NOT_SENT = "gradients not sent"
FILES = (
    "step_time.json",
    "step_time_layer.json",
    "all_reduce-2-hosts-1gbit.json",
    "all_reduce-4-hosts-1gbit.json",
    "all_reduce-2-hosts-98mbit-in-a-row.json",
    "deepspeed_step.json",
)


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a call or step, measured and predicted, and of its communication (None: not measured separately)."""

    file: str
    what: str
    measured: float
    predicted: float
    communication: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def within(self) -> bool:
        return abs(self.error) <= WITHIN


def results_folder() -> Path | None:
    """Return the newest day of lab/results with all files, or None."""
    days = sorted((Path(__file__).resolve().parents[1] / "results").glob("????-??-??"))
    return next((day for day in reversed(days) if all((day / name).is_file() for name in FILES)), None)


def rows(folder: Path) -> list[Row]:
    """Return every row of the files in `folder`. Raises OSError, ValueError or KeyError for unexpected files."""
    results = {name: json.loads((folder / name).read_text()) for name in FILES}
    steps = results["step_time.json"]
    cluster = calibrated(steps)
    found = _steps(steps, cluster)
    found += _layer(results["step_time_layer.json"], cluster)
    for name in FILES[2:5]:
        found += _calls(name, results[name], cluster)
    return found + _deepspeed(results["deepspeed_step.json"], cluster)


def link(rate: str) -> float:
    """Return the payload bytes a second of "298.3mbit"; "none": inf."""
    return netlab.goodput(rate) / 8


def _model(arguments: dict[str, Any]) -> tuple[Model, Layout]:
    """Return the GPT of lab/benchmarks/step_time, with TP over all hosts."""
    a = arguments
    model = Model(a["layers"], a["hidden"], a["heads"], a["heads"], 4 * a["hidden"], 256, a["sequence"])
    return model, Layout(tp=a["hosts"], micro_batch=a["batch"])


def _seconds(table: dict[str, Any], variant: str) -> float:
    return float(table["variants"][variant]["step, seconds"])


def calibrated(steps: dict[str, Any]) -> Cluster:
    """Return one core over gloo, from three steps without a limit on the link."""
    model, layout = _model(steps["about"]["arguments"])
    table = next(table for table in steps["tables"] if table["rate"] == "none")
    arithmetic, full, int8 = (_seconds(table, name) for name in ("no collectives", "bf16", "INT8"))
    tokens = layout.micro_batch * model.sequence
    cluster = Cluster(
        name="one core a host, gloo",
        flops=3 * model.forward_flops(tokens) / layout.tp / arithmetic,
        codec=CORE_CODEC,
        ranks_per_node=1,
        intra=math.inf,
        inter=math.inf,
        backend="gloo",
    )
    sent = sum(cost(t, cluster).bytes_sent for t in traffic(model, cluster, layout))
    cluster = replace(cluster, transport=sent / (full - arithmetic))
    fields = dict.fromkeys(quantizable(model, cluster, layout), 8)
    calls = sum(t.calls for t in traffic(model, cluster, layout) if t.field in fields)
    rest = int8 - predict(model, cluster, layout, fields).after
    return replace(cluster, start=max(0.0, rest / calls))


def _steps(results: dict[str, Any], cluster: Cluster) -> list[Row]:
    model, layout = _model(results["about"]["arguments"])
    name = "step_time.json"
    found = []
    for table in results["tables"]:
        at = replace(cluster, inter=link(table["rate"]))
        for variant in table["variants"]:
            if variant == "no collectives" or (table["rate"] == "none" and variant in ("bf16", "INT8")):
                continue  # the inputs
            bits = variant.removeprefix("INT")
            widths = dict.fromkeys(quantizable(model, at, layout), int(bits)) if bits != variant else {}
            step = predict(model, at, layout, widths)
            measured = _seconds(table, variant)
            communication = (measured - _seconds(table, "no collectives"), step.after - step.compute)
            what = f"GPT step, TP {layout.tp}, {_rate(table['rate'])}, {variant}"
            found.append(Row(name, what, measured, step.after, communication))
    return found


def _layer(results: dict[str, Any], cluster: Cluster) -> list[Row]:
    """Return the rows of a layer: forward, and the input gradient's all-reduce during the weight gradient's GEMM."""
    a = results["about"]["arguments"]
    numel = a["sequence"] * a["batch"] * a["hidden"]
    free = next(table for table in results["tables"] if table["rate"] == "none")
    arithmetic = _seconds(free, "no collectives")
    found = []
    for table in results["tables"]:
        if table["rate"] == "none":
            continue
        at = replace(cluster, inter=link(table["rate"]))
        for variant in table["variants"]:
            if variant == "no collectives":
                continue
            plain = variant.removesuffix(", waits at once")
            hide = arithmetic / 3 if plain == variant else 0.0
            t = Traffic("layer", None, "all_reduce", numel, 2, 1, Group(a["hosts"], 1), hide)
            bits = plain.removeprefix("INT")
            predicted = arithmetic + cost(t, at, Format(int(bits), 128) if bits != plain else None).exposed
            what = f"one layer, TP {a['hosts']}, {_rate(table['rate'])}, {variant}"
            communication = (_seconds(table, variant) - arithmetic, predicted - arithmetic)
            found.append(Row("step_time_layer.json", what, _seconds(table, variant), predicted, communication))
    return found


def _calls(name: str, results: dict[str, Any], cluster: Cluster) -> list[Row]:
    a = results["about"]["arguments"]
    at = replace(cluster, inter=link(a["rate"]))
    found = []
    for row in results["rows"]:
        form, dtype = row["variant"].split(" ", 1)
        bits = form.removeprefix("INT")
        t = Traffic("call", None, "all_reduce", a["numel"], 4 if dtype.endswith("fp32") else 2, 1, Group(a["hosts"], 1))
        predicted = cost(t, at, Format(int(bits), 128) if bits != form else None).seconds
        what = f"all_reduce, {a['hosts']} hosts, {_rate(a['rate'])}, {row['variant']}"
        found.append(Row(name, what, row["ms"] / 1e3, predicted))
    return found


def _deepspeed(results: dict[str, Any], cluster: Cluster) -> list[Row]:
    """Return DeepSpeed's rows: the step without gradients, plus their time, which nothing hides (no overlap_comm).

    "INT4 + 8": gradients and parameters. In a step of stage 3 DeepSpeed keeps gathered parameters: one gather.
    """
    a = results["about"]["arguments"]
    at = replace(cluster, inter=link(a["rate"]))
    unsent = {table["stage"]: float(table["variants"][_NOT_SENT]["step, seconds"]) for table in results["tables"]}
    found = []
    for table in results["tables"]:
        stage = table["stage"]
        collective: Kind = "reduce_scatter" if stage == 3 else "all_reduce"
        calls, kept = (a["layers"], False) if stage == 3 else (1, stage > 0)
        size = (a["layers"] * a["width"] ** 2 / calls, 2, calls, Group(a["hosts"], 1))
        reduced = Traffic("gradients", None, collective, *size, owners=kept)
        gathered = Traffic("parameters", None, "all_gather", *size, differences=kept)
        for variant, row in table["variants"].items():
            if variant != "bf16" and not variant.startswith("INT"):
                continue
            bits, _, parameter_bits = variant.removeprefix("INT").partition(" + ")
            rest, measured = unsent[0 if parameter_bits else stage], float(row["step, seconds"])
            sent = cost(reduced, at, Format(int(bits), 128) if variant.startswith("INT") else None).seconds
            if parameter_bits:
                sent += cost(gathered, at, Format(int(parameter_bits), 128)).seconds
            what = f"DeepSpeed step, stage {stage}, {_rate(a['rate'])}, {variant}"
            found.append(Row("deepspeed_step.json", what, measured, rest + sent, (measured - rest, sent)))
    return found


def _rate(rate: str) -> str:
    if rate == "none":
        return "no limit"
    return f"{float(rate[:-4]):g} {rate[-4].upper() if rate[-4] != 'k' else 'k'}bit/s"
