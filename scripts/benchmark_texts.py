"""The rows of each table of docs/decide/benchmarks.md, of what its commands wrote with --json, in their order."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from lab.benchmarks import real_model as pretrained_model
from lab.benchmarks import real_model_tuning

#: The header, then the rows.
Rows = list[Sequence[object]]
KIB = 1024


def _number(value: float | None, form: str = ".2f", scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)


def _percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def _bytes(size: int) -> str:
    return f"{size // KIB} KiB" if size < KIB * KIB else f"{size // (KIB * KIB)} MiB"


def _signed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:+.3f}" for value in values)


def codec(results: list[Any]) -> Rows:
    """Of lab.benchmarks.codec in memory and in the cache: a row a width."""
    memory = {
        "encode GB/s": ".1f",
        "decode GB/s": ".1f",
        "encode / memcpy": ".2f",
        "sum of 2 / add_": ".2f",
        "encode x fbgemm": ".2f",
        "decode x fbgemm": ".1f",
    }
    cache = {key: memory[key] for key in ("encode / memcpy", "encode x fbgemm", "decode x fbgemm")}
    header = ["bits", *memory, *(f"4 MiB: {key}" for key in cache)]
    rows: Rows = [[name.replace("fbgemm", "FBGEMM") for name in header]]
    for large, small in zip(*(result["rows"] for result in results), strict=True):
        if large["bits"] in (7, 5):
            continue  # between their neighbours
        cells = [_number(large.get(key), form) for key, form in memory.items()]
        rows.append([large["bits"], *cells, *(_number(small.get(key), form) for key, form in cache.items())])
    return rows


def gpu_kernels(results: list[Any]) -> Rows:
    """Return a row for each form of lab.benchmarks.cuda_codec, bf16 at 64 MiB: microseconds and share of a copy."""
    (result,) = results
    rows: Rows = []
    for row in result["rows"]:
        if row["MiB"] != 64 or row["dtype"] != "bf16" or "compact" in row["options"] or row["bits"] in (7, 5, 3):
            continue  # those widths lie between their neighbours
        if not rows:
            rows.append(["bits", "group", "options", *row["us"]])
        cells = (f"{us:.0f} ({row['share'][kernel]:.2f})" for kernel, us in row["us"].items())
        rows.append([row["bits"], row["group_size"], row["options"].replace("+", ", "), *cells])
    return rows


def collectives(results: list[Any]) -> Rows:
    """Of `flash-allreduce bench`, one size: a row a dtype and variant, columns for each link and number of ranks."""
    setups: dict[str, dict[str, Any]] = {}
    for result in results:
        for row in result["rows"]:
            setups.setdefault(_where(result, row), {})[f"{row['type']}, {row['variant']}"] = row
    names = list(dict.fromkeys(name for rows in setups.values() for name in rows))
    table: Rows = [["", *(text for where in setups for text in (f"{where}: ms", "speed-up"))]]
    for name in names:
        rows = [of_setup.get(name, {}) for of_setup in setups.values()]
        cells = [(_number(row.get("seconds"), ".1f", 1e3), _number(row.get("speedup"))) for row in rows]
        table.append([name, *(text for pair in cells for text in pair)])
    return table


def _where(result: dict[str, Any], row: dict[str, Any]) -> str:
    link = result["about"]["link"]
    return f"loopback, {row['ranks']} ranks" if link == "loopback" else f"{row['ranks']} hosts, {link}"


def sizes(results: list[Any]) -> Rows:
    """Of `flash-allreduce bench`: a row a size, the time in full precision and each variant's speed-up."""
    columns: dict[str, dict[int, str]] = {}
    for result in results:
        for row in result["rows"]:
            full = row["variant"] == "full precision"
            column = columns.setdefault(f"{_where(result, row)}: {'ms' if full else row['variant']}", {})
            column[row["size"]] = _number(row["seconds"], ".2f", 1e3) if full else _number(row["speedup"])
    every = sorted({size for column in columns.values() for size in column})
    rows = [[_number(size / KIB, "g"), *(column.get(size, "") for column in columns.values())] for size in every]
    return [["KiB", *columns], *rows]


def tuned(results: list[Any]) -> Rows:
    """Of `flash-allreduce tune`: a row a run: what it chose, the tuned time over full precision's at some sizes and at
    the slowest, and full precision over itself at its worst size.
    """
    shown = {row["size"] for result in results for row in result["check"]} & {1 << 20, 1 << 24, 1 << 28}
    heads = [f"{_bytes(size)}" for size in sorted(shown)]
    table: Rows = [["", "chunk_bytes", "min_bytes", *heads, "slowest size", "full precision against itself"]]
    for result in results:
        about, check, written = result["about"], result["check"], result["written"]
        on = "loopback" if about["link"] == "loopback" else about["link"]
        pays_from = _bytes(written["min_bytes"]) if written.get("enabled", True) else "off"
        cells = [f"{about['ranks']} ranks, {on}", _bytes(written["chunk_bytes"]), pays_from]
        cells += [f"{row['ratio']:.2f}" for row in check if row["size"] in shown]
        slowest = max(check, key=lambda row: row["ratio"])
        cells += [f"{slowest['ratio']:.3f} ({_bytes(slowest['size'])})", f"{max(row['control'] for row in check):.3f}"]
        table.append(cells)
    return table


def exchanges(results: list[Any]) -> Rows:
    """Of `flash-allreduce bench --collective all_to_all`: a row a number of hosts and variant."""
    rows: Rows = [["", "variant", "ms", "speed-up", "of the line"]]
    for result in results:
        for row in result["rows"]:
            share = row["of_the_line"]
            times = [_number(row["seconds"], ".1f", 1e3), _number(row["speedup"]), _number(share, ".0f", 100) + " %"]
            rows.append([_where(result, row), f"{row['type']}, {row['variant']}", *times])
    return rows


def sends(results: list[Any]) -> Rows:
    """Of lab.benchmarks.sends: a row a variant, columns for each link and direction."""
    columns: dict[str, dict[str, Any]] = {}
    for result in results:
        for row in result["rows"]:
            columns.setdefault(f"{result['link']}, {row['direction']}", {})[row["variant"]] = row
    table: Rows = [["", *(text for name in columns for text in (f"{name}: ms", "speed-up"))]]
    for variant in next(iter(columns.values())):
        found = [column[variant] for column in columns.values()]
        table.append([variant, *(text for row in found for text in (f"{row['ms']:.1f}", f"{row['speed-up']:.2f}"))])
    return table


def step_time(of_training: Callable[[list[Any]], Rows]) -> Callable[[list[Any], list[Any]], Rows]:
    """Rows of step_time. of_training: the rows of the training, of which the first with a width counts;
    INT6 with the codebook is the preset int4.
    """

    def text(results: list[Any], trained: list[Any]) -> Rows:
        losses: dict[str, str] = {}
        for name, loss in _losses(of_training, trained).items():
            setting, _, width = name.rpartition(", ")
            losses.setdefault("preset int4" if (width, "codebook" in setting) == ("INT6", True) else width, loss)
        return _by_share(results, "MB sent in a step and rank", losses)

    return text


def pipeline_step(results: list[Any], trained: list[Any]) -> Rows:
    """Of lab.benchmarks.pipeline_step. trained: of lab.benchmarks.pipeline_training."""
    losses = _losses(pipeline_training, trained)
    for width in (8, 4):
        losses[f"INT{width}"] = losses.get(f"pipeline_bits {width}, pipeline_backward_bits {width}", "")
    return _by_share(results, "MB sent in a step, both ranks", losses)


def _by_share(results: list[Any], sent: str, losses: dict[str, str]) -> Rows:
    """A row a link, speed-ups by variant, then a row of bytes and one of losses."""
    tables = results[0]["tables"]
    widths = [name for name in tables[0]["variants"] if name.startswith(("INT", "preset"))]
    rows: Rows = [["link, each way", "communication's share of the bf16 step", "bf16 ms", *widths]]
    for table in tables:
        variants = table["variants"]
        link = "no limit" if table["rate"] == "none" else f"{float(table['rate'].removesuffix('mbit')):.0f} Mbit/s"
        ratios = [f"{variants[name]['x base']:.2f}" for name in widths]
        rows.append([link, _percent(table["share"]), _number(variants["bf16"]["step, seconds"], ".0f", 1e3), *ratios])
    bytes_ = [_wire(tables[0]["variants"][name]) for name in ("bf16", *widths)]
    return [*rows, [sent, "", *bytes_], ["validation loss, %", "", "", *(losses.get(name, "") for name in widths)]]


def deepspeed_step(results: list[Any], *trainings: list[Any]) -> Rows:
    """Of lab.benchmarks.deepspeed_step, a rate a command: a row a stage and variant, time and speed-ups for each rate.

    Stage 1 has the times of stage 2, and no rows.

    Args:
        trainings: of lab.benchmarks.deepspeed_training, for the loss.
    """
    rates = [result["about"]["arguments"]["rate"] for result in results]
    heads = [text for rate in rates for text in (f"{rate}: step, ms", "x bf16", "its gradients, x")]
    rows: Rows = [["ZeRO stage", "", *heads, "MB on the wire", "loss, %"]]
    losses = {key: loss for training in trainings for key, loss in _losses_by_stage(training).items()}
    for tables in zip(*(result["tables"] for result in results), strict=True):
        if (stage := tables[0]["stage"]) == 1:
            continue
        for variant, first in tables[0]["variants"].items():
            name = _parameters_too(variant)
            alone = variant != "bf16" and name == variant and not variant.startswith("ZeRO++")  # gradients alone
            cells = [_of_a_step(table["variants"][variant], alone) for table in tables]
            loss = losses.get((str(stage), name), "")
            rows.append([stage, name, *(text for each in cells for text in each), _wire(first), loss])
    return rows


def _parameters_too(variant: str) -> str:
    """Of deepspeed_step's "INT4 + 2"."""
    name, plus, bits = variant.partition(" + ")
    return f"{name}, param_bits {bits}" if plus else name


def _of_a_step(row: dict[str, Any], gradients_alone: bool) -> tuple[str, str, str]:
    gradients = _number(row["x base, gradients"]) if gradients_alone else ""
    return f"{1e3 * row['step, seconds']:.0f}", f"{row['x base']:.2f}", gradients


def _wire(row: dict[str, Any]) -> str:
    """MB of a row that counts the bytes on an interface."""
    return _number(row.get("wire, bytes"), ".1f", 1e-6)


def _losses_by_stage(training: list[Any]) -> dict[tuple[str, str], str]:
    """Of lab.benchmarks.deepspeed_training, by stage and section: the mean over seeds, of its small model."""
    head, *rows = deepspeed_training(training)
    cells = [(stage, row[0], str(cell)) for row in rows for stage, cell in zip(head[1:], row[1:], strict=True)]
    return {(str(stage).removeprefix("stage "), str(name)): cell.partition(" ")[0] for stage, name, cell in cells}


def _losses(training: Callable[[list[Any]], Rows], results: Sequence[Any], column: str = "") -> dict[str, str]:
    """Of a training's column of that head, or its first of figures, by variant: the mean over seeds. Of one without
    results or the column: nothing.
    """
    head, *rows = training(list(results)) if results else [[]]
    if column and column not in head:
        return {}
    of = head.index(column) if column else 1
    return {str(row[0]): str(row[of]).partition(" ")[0] for row in rows}


def ddp_step(results: list[Any], training: list[Any]) -> Rows:
    """Of lab.benchmarks.ddp_step: a row a variant that runs, columns for each rate.

    Args:
        training: of lab.benchmarks.ddp_training, for the loss.
    """
    losses = _losses(ddp_training, training)
    tables = results[0]["tables"]
    heads = [text for table in tables for text in (f"{table['rate']}: step, ms", "x fp32")]
    rows: Rows = [["", *heads, "MB on the wire", "bits an element", "loss, %"]]
    for variant in tables[0]["variants"]:
        found = [table["variants"][variant] for table in tables]
        times = [(_number(row.get("step, seconds"), ".0f", 1e3), _number(row.get("x base"))) for row in found]
        ran = next((row for row in found if "cannot run" not in row), None)
        if ran is None:
            continue
        wire = [_wire(ran), _number(ran.get("bits on the wire per element")), losses.get(_section(variant), "")]
        rows.append([_section(variant), *(text for pair in times for text in pair), *wire])
    return rows


def timed_steps(training: Callable[[list[Any]], Rows], column: str = "") -> Callable[..., Rows]:
    """Rows of a benchmark of steps.py: one a variant; time and speed-up for each rate, then the bytes,
    and the mean loss where the rows of a training have the variant, in its column of that head or its first.
    """

    def text(results: list[Any], trained: Sequence[Any] = ()) -> Rows:
        tables, base = results[0]["tables"], results[0]["base"]
        heads = [text for table in tables for text in (f"{table['rate']}: step, ms", f"x {base}")]
        rows: Rows = [["", *heads, "MB on the wire", "loss, %"]]
        losses = _losses(training, trained, column)
        for variant, first in tables[0]["variants"].items():
            name = _variant(variant)
            found = [table["variants"][variant] for table in tables]
            times = [text for row in found for text in (f"{1e3 * row['step, seconds']:.0f}", f"{row['x base']:.2f}")]
            rows.append([name, *times, _wire(first), losses.get(name, "")])
        return rows

    return text


def ddp_training(results: list[Any]) -> Rows:
    """Of lab.benchmarks.ddp_training: a row a variant that runs."""
    seeds = list(results[0]["seeds"].values())
    rows: Rows = [["", "mean, %", "worst, %", "by seed, %"]]
    base, *variants = seeds[0]
    for variant in variants:
        each = [_difference(losses, variant, base) for losses in seeds if variant in losses]
        worst, by_seed = (f"{max(each):+.3f}", _signed(each)) if len(each) > 1 else ("", "")
        rows.append([_variant(variant), f"{statistics.fmean(each):+.3f}", worst, by_seed])
    return rows


def training(*labels: str) -> Callable[[list[Any]], Rows]:
    """Of lab.benchmarks.training: a row a variant; a label for each command."""

    def text(results: list[Any]) -> Rows:
        rows: Rows = [["", "mean, %", "by seed, %"]]
        for label, result in zip(labels, results, strict=True):
            for row in result:
                if row["variant"] != "full precision":
                    seeds = list(row["difference %"].values())
                    by_seed = _signed(seeds) if len(seeds) > 1 else ""
                    rows.append([f"{label}{row['variant']}", f"{row['mean difference %']:+.3f}", by_seed])
        return rows

    return text


def deepspeed_training(results: list[Any]) -> Rows:
    """Of lab.benchmarks.deepspeed_training: a row a model and section, a column a stage: mean and worst seed."""
    cells: dict[str, dict[str, str]] = {}
    for result in results:
        for stage, seeds in result["stages"].items():
            first = next(iter(seeds.values()))
            parameters = first["full precision"]["parameters"]
            model = "" if parameters < 1e6 else f"{parameters / 1e6:.1f} M, "
            for variant in first:
                if variant != "full precision":
                    each = [_difference(losses, variant) for losses in seeds.values() if variant in losses]
                    mean = f"{statistics.fmean(each):+.3f}"
                    cell = f"{mean} ({max(each):+.3f})" if len(each) > 1 else mean
                    cells.setdefault(f"{model}{_section(variant)}", {})[stage] = cell
    stages = sorted({stage for row in cells.values() for stage in row})
    return [
        ["", *(f"stage {stage}" for stage in stages)],
        *([name, *(row.get(stage, "") for stage in stages)] for name, row in cells.items()),
    ]


def pretraining(results: list[Any]) -> Rows:
    """Of lab.benchmarks.pretraining, a size a command: a row a variant, a column a size: mean and each seed."""
    sizes = [f"{runs[0]['parameters'] / 1e6:.1f} M" for runs in results]
    cells: dict[str, dict[str, str]] = {}
    for size, runs in zip(sizes, results, strict=True):
        base = {run["seed"]: run["validation loss"] for run in runs if run["variant"] == "full precision"}
        each: dict[str, list[float]] = {}
        for run in runs:
            each.setdefault(run["variant"], []).append(100 * (run["validation loss"] / base[run["seed"]] - 1))
        for variant, values in each.items():
            mean = f"{statistics.fmean(values):+.3f}"
            cells.setdefault(variant, {})[size] = f"{mean} ({_signed(values)})" if len(values) > 1 else mean
    rows = [[_section(name), *(row.get(size, "") for size in sizes)] for name, row in cells.items()]
    return [["", *(f"{size}, %" for size in sizes)], *(row for row in rows if row[0] != "full precision")]


def fine_tuning(results: list[Any]) -> Rows:
    """Of lab.benchmarks.fine_tuning, an engine a command: a row an engine, method and variant."""
    rows: Rows = [["", "loss, mean %", "by seed, %", "right, points"]]
    for name, by_seed in (item for result in results for item in result["runs"].items()):
        seeds = list(by_seed.values())
        for variant in seeds[0]:
            if variant == "full precision":
                continue
            runs = [(seed[variant], seed["full precision"]) for seed in seeds if variant in seed]
            loss = [_difference(seed, variant) for seed in seeds if variant in seed]
            points = statistics.fmean(100 * (one["accuracy"] - full["accuracy"]) for one, full in runs)
            by = _signed(loss) if len(loss) > 1 else ""
            rows.append([f"{name}, {_section(variant)}", f"{statistics.fmean(loss):+.3f}", by, f"{points:+.2f}"])
    return rows


def pretrained_tuning(results: list[Any]) -> Rows:
    """Of lab.benchmarks.real_model --fine-tune, an engine a command: a row a variant, without its seconds.

    Bits are those of a parameter's element: none where activations are sent.
    """
    rows: Rows = []
    for result in results:
        header, *found = real_model_tuning.table(result)
        steps = result[0]["settings"]["steps"]
        rows += [[*header[:1], "steps", *header[1:-1]]] if not rows else []
        for engine, variant, bits, *row in found:
            name = json.loads(variant)["preset"] if variant.startswith("{") else variant
            rows.append([engine, steps, name, "" if engine == "megatron" else bits, *row[:-1]])
    return rows


def exchange_training(results: list[Any]) -> Rows:
    """Of lab.benchmarks.deepspeed_training --ulysses and --experts, one stage each: a row a variant."""
    rows: Rows = [["", "mean, %", "by seed, %"]]
    for label, result in zip(("Ulysses", "experts"), results, strict=True):
        seeds = list(next(iter(result["stages"].values())).values())
        for variant in seeds[0]:
            if variant != "full precision":
                each = [_difference(losses, variant) for losses in seeds if variant in losses]
                by_seed = _signed(each) if len(each) > 1 else ""
                rows.append([f"{label}, {_section(variant)}", f"{statistics.fmean(each):+.3f}", by_seed])
    return rows


def bf16_ring(results: list[Any]) -> Rows:
    """Rows of bf16_ring: one for some numbers of ranks, simulated, in brackets measured; columns by variant."""
    found: dict[str, dict[tuple[float, int], dict[str, float]]] = {"simulated": {}, "measured": {}}
    for row in results[0]["rows"]:
        found[row["how"]][row["correlation"], row["ranks"]] = row["sqnr_db"]
    names = list(next(iter(found["simulated"].values())))
    rows: Rows = [["correlation", "ranks", *names]]
    for (correlation, ranks), simulated in sorted(found["simulated"].items()):
        if ranks in (2, 8, 16, 32, 64, 256, 1024):
            measured = found["measured"].get((correlation, ranks), {})
            cells = (
                f"{simulated[name]:.1f}" + (f" ({measured[name]:.1f})" if name in measured else "") for name in names
            )
            rows.append([correlation, ranks, *cells])
    return rows


def scale(results: list[Any]) -> Rows:
    """Of lab.planning.scale, a width a command: a row a size and number of ranks."""
    names = [f"INT{result['bits']}" for result in results]
    head = ["ranks", "MiB", "bf16 ms", *(f"{name} {what}" for name in names for what in ("flat ms", "two levels ms"))]
    rows: Rows = [head]
    for same in zip(*(result["rows"] for result in results), strict=True):
        cells = [
            same[0]["ranks"],
            same[0]["bytes"] // KIB**2,
            f"{1e3 * same[0]['full precision']:.2f} ({same[0]['by']})",
        ]
        for row in same:
            cells += [f"{1e3 * row[way]['seconds']:.2f}" for way in ("flat", "two levels")]
        rows.append(cells)
    return rows


def pipeline_training(results: list[Any]) -> Rows:
    """Of lab.benchmarks.pipeline_training: a row a variant."""
    rows: Rows = [["", "mean, %", "by seed, %", "bytes sent / fp32's"]]
    for seeds in ([*result["seeds"].values()] for result in results):
        for variant, first in seeds[0].items():
            if variant == "full precision":
                continue
            each = [_difference(losses, variant) for losses in seeds if variant in losses]
            by_seed = _signed(each) if len(each) > 1 else ""
            whole = first["bytes in full precision"]
            share = f"{first['bytes sent'] / whole:.3f}" if whole else ""
            rows.append([_settings(variant), f"{statistics.fmean(each):+.3f}", by_seed, share])
    return rows


def _settings(variant: str) -> str:
    """A configuration without its punctuation: pipeline_bits 4, codebook."""
    if not variant.startswith("{"):
        return variant
    given = {key: value for key, value in json.loads(variant).items() if key != "min_bytes"}
    return ", ".join(key if value is True else f"{key} {value}" for key, value in given.items())


def _variant(name: str) -> str:
    """A section, or of lab.benchmarks.fsdp_step a section and the width of parameters."""
    section, parameters, bits = name.partition(", parameters ")
    return _section(section) + parameters + bits


def _section(variant: str) -> str:
    """A section without its punctuation: INT4, group_size 32, compact, range mse."""
    if not variant.startswith("{"):
        return variant
    section = json.loads(variant)
    for key in ("error_feedback", "min_bytes"):  # the table has it in its title
        section.pop(key, None)
    if "preset" in section:
        widths = f"preset {section.pop('preset')}"
    elif "bits" in section:
        widths = f"INT{section.pop('bits')}"
    else:
        widths = f"INT{section.pop('reduce_bits')}, gather_bits {section.pop('gather_bits')}"
    return ", ".join([widths, *(key if value is True else f"{key} {value}" for key, value in section.items())])


def held_weights(results: list[Any]) -> Rows:
    """Of lab.benchmarks.held_weights: a row a width, columns for some steps."""
    widths = results[0]["bits"]
    steps = list(next(iter(widths.values())))
    shown = [steps[0], steps[len(steps) // 2 - 1], steps[-1]] if len(steps) > 2 else steps
    head = ["param_bits", *(f"step {step}" for step in shown), "greatest", "bf16 itself", "same bits on all ranks"]
    rows: Rows = [head]
    for bits, found in widths.items():
        greatest = max(row["held"] for row in found.values())
        alike = "at every step shown" if all(row["same bits on all ranks"] for row in found.values()) else "no"
        own = found[steps[-1]]["bf16"]
        rows.append([bits, *(f"{found[step]['held']:.3e}" for step in shown), f"{greatest:.3e}", f"{own:.3e}", alike])
    return rows


def _difference(losses: dict[str, Any], variant: str, against: str = "full precision") -> float:
    return 100 * float(losses[variant]["validation loss"] / losses[against]["validation loss"] - 1)


def guard(results: list[Any]) -> Rows:
    """Of lab.benchmarks.guard: a row a collective, columns for each width."""
    cells: dict[str, list[str]] = {}
    widths = list(dict.fromkeys(row["bits"] for row in results[0]["rows"]))
    for row in results[0]["rows"]:
        found = [f"{row['local']:.2f}", f"{row['exact']:.1f}", f"+{100 * row['overhead']:.2f} %"]
        cells.setdefault(row["collective"], []).extend(found)
    heads = [text for bits in widths for text in (f"INT{bits}: local", "exact", "every 100th")]
    return [["", *heads], *([name, *row] for name, row in cells.items())]


def real_model(results: list[Any]) -> Rows:
    """Of lab.benchmarks.real_model: every format with three ranks, elsewhere the presets and the bf16 ring."""
    header, *rows = pretrained_model.table(results[0])
    return [header, *(row for row in rows if row[0] == 3 or ":" in str(row[1]) or "ring" in str(row[1]))]


def whole_step(results: list[Any]) -> Rows:
    """Of lab.benchmarks.whole_step: a row a layout, a column a preset, and the greatest share that a preset leaves."""
    found = {(row["layout"], row["preset"]): row for row in results[0]["rows"]}
    layouts, presets = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    rows: Rows = [["", *(f"{preset}, %" for preset in presets), "left, %"]]
    for layout in layouts:
        of_layout = [found[layout, preset] for preset in presets]
        left = max(sum(row["left"].values()) / row["plain"] for row in of_layout)
        rows.append([layout, *(f"{100 * row['sent'] / row['plain']:.1f}" for row in of_layout), f"{100 * left:.2f}"])
    return rows


def auto_step(results: list[Any]) -> Rows:
    """Of lab.benchmarks.auto_step: a row a framework and link."""
    rows: Rows = [["", "link", "full, ms", "`int8`, ms", "auto, ms", "total", "after", "from step"]]
    for row in [row for result in results for row in result["rows"]]:
        milliseconds = [f"{row[f'{way}, seconds'] * 1e3:.1f}" for way in ("full precision", "quantized", "auto")]
        ratios = [f"{row[key]:.3f}" for key in ("total", "after")]
        rows.append([row["framework"], row["rate"], *milliseconds, *ratios, row["decided"]])
    return rows


def prefill(results: list[Any]) -> Rows:
    """Return a row for each number of tokens and link with a limit, from lab.benchmarks.prefill."""
    names = {'{"bits": 8}': "INT8", '{"preset": "int8"}': "`int8`", '{"preset": "int4"}': "`int4`"}
    engines = {"torch": "torch", "autotp": "AutoTP", "megatron": "Megatron"}
    rows: Rows = [["engine", "model, ranks", "tokens", "link", "communication", "bf16, ms", *names.values()]]
    for result in results:
        given = result["about"]["arguments"]
        model = "SmolLM2" if given["smollm2"] else f"{given['layers']} x {given['hidden']}"
        for table in result["tables"]:
            if table["rate"] == "none" and (given["shares"] or given["rates"]):
                continue
            variants = table["variants"]
            speedups = [f"{variants[name]['x base']:.2f}" for name in names]
            milliseconds = f"{1e3 * variants['bf16']['step, seconds']:.0f}"
            link = [table["tokens"], table["rate"], f"{table['share']:.0%}", milliseconds]
            rows.append([engines[given.get("engine", "torch")], f"{model}, {given['hosts']}", *link, *speedups])
    return rows
