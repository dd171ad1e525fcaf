"""The rows of each table of docs/decide/benchmarks.md, from the --json files of its commands, in their order."""

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
#: Rows of deepspeed_step that its table leaves out: lower bounds, and settings that presets replace.
NOT_SHOWN = ("gradients not sent", "nothing sent", "INT8", "INT4", "INT4 + 2")
#: Rows of deepspeed_step that show the same as those of int4.
THIN = ((2, "preset thin"), (3, "preset thin"))
#: The head of a column of _mean.
WORST = "loss: mean (worst), %"


def _number(value: float | None, form: str = ".2f", scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)


def _percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def _bytes(size: int) -> str:
    return f"{size // KIB} KiB" if size < KIB * KIB else f"{size // (KIB * KIB)} MiB"


def _signed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:+.3f}" for value in values)


def _mean(each: Sequence[float]) -> str:
    """Return the mean over seeds, and in brackets the worst seed if there are several."""
    return f"{statistics.fmean(each):+.3f}" + (f" ({max(each):+.3f})" if len(each) > 1 else "")


def columns(rows: Rows, *shown: int) -> Rows:
    """Return the rows with these columns alone."""
    return [[row[i] for i in shown] for row in rows]


def codec(results: list[Any]) -> Rows:
    """Return a row for each width and instruction set of lab.benchmarks.codec, measured in memory and in the cache."""
    memory = ("encode / memcpy", "sum of 2 / add_", "encode x fbgemm")
    cache = (*memory, "decode x fbgemm")  # in memory FBGEMM's decoding allocates its output
    header = ["bits", *memory, *(f"4 MiB: {key}" for key in cache)]
    rows: Rows = [[name.replace("fbgemm", "FBGEMM") for name in header]]
    for in_memory, in_cache in zip(results[::2], results[1::2], strict=True):
        for large, small in zip(in_memory["rows"], in_cache["rows"], strict=True):
            if large["bits"] in (7, 5, 3):
                continue  # they lie between their neighbours
            cells = [_number(large.get(key)) for key in memory]
            more = [_number(small.get(key)) for key in cache]
            rows.append([f"{large['bits']}, {in_memory['about']['instruction_set']}", *cells, *more])
    return rows


def gpu_kernels(results: list[Any]) -> Rows:
    """Return a row for each form of lab.benchmarks.cuda_codec, bf16 at 64 MiB: microseconds and share of a copy.

    Kernels with error feedback have no cells: a sentence of the page has their range. Nor have 6 and plain 2 bits.
    """
    (result,) = results
    rows: Rows = []
    for row in result["rows"]:
        if row["MiB"] != 64 or row["dtype"] != "bf16" or "compact" in row["options"] or row["bits"] in (7, 5, 3):
            continue  # those widths lie between their neighbours
        if row["bits"] == 6 or (not row["options"] and row["bits"] == 2):
            continue
        kernels = [kernel for kernel in row["us"] if "feedback" not in kernel]
        if not rows:
            rows.append(["bits/group", *kernels])
        form = f"{row['bits']}/{row['group_size']}{', ' if row['options'] else ''}"
        cells = (f"{row['us'][kernel]:.0f} ({row['share'][kernel]:.2f})" for kernel in kernels)
        rows.append([f"{form}{row['options'].replace('+', ', ')}", *cells])
    return rows


def collectives(results: list[Any]) -> Rows:
    """Return a row for each dtype and variant of `flash-allreduce bench`, one size, with columns for each link.

    On loopback two ranks have columns: four show the same.
    """
    setups: dict[str, dict[str, Any]] = {}
    for result in results:
        for row in result["rows"]:
            if result["about"]["link"] != "loopback" or row["ranks"] == 2:
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
    """Return a row for each size of `flash-allreduce bench`: time in full precision, and each variant's speed-up."""
    columns: dict[str, dict[int, str]] = {}
    for result in results:
        for row in result["rows"]:
            full = row["variant"] == "full precision"
            column = columns.setdefault(f"{result['about']['link']}: {'ms' if full else row['variant']}", {})
            column[row["size"]] = _number(row["seconds"], ".2f", 1e3) if full else _number(row["speedup"])
    as_neighbours = {KIB << 6, KIB << 8, KIB << 12, KIB << 14}
    every = sorted({size for column in columns.values() for size in column} - as_neighbours)
    rows = [[_number(size / KIB, "g"), *(column.get(size, "") for column in columns.values())] for size in every]
    return [["KiB", *columns], *rows]


def tuned(results: list[Any]) -> Rows:
    """Return a row for each run of `flash-allreduce tune`.

    A row has the choice, the tuned time over full precision's at some sizes and at the slowest, and full precision over
    itself at its worst size.
    """
    shown = {row["size"] for result in results for row in result["check"]} & {1 << 28}
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


def step_time(of_training: Callable[[list[Any]], Rows]) -> Callable[[list[Any], list[Any]], Rows]:
    """Return the rows of step_time. of_training: returns the rows of the training; the first with a width counts.

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
    """Return the rows of lab.benchmarks.pipeline_step. trained: results of lab.benchmarks.pipeline_training."""
    losses = _losses(pipeline_training, trained)
    for width in (8, 4):
        losses[f"INT{width}"] = losses.get(f"pipeline_bits {width}, pipeline_backward_bits {width}", "")
    return _by_share(results, "MB sent in a step, both ranks", losses)


def _by_share(results: list[Any], sent: str, losses: dict[str, str]) -> Rows:
    """Return a row for each link, speed-ups by variant, then a row of bytes and one of losses."""
    tables = results[0]["tables"]
    widths = [name for name in tables[0]["variants"] if name in ("INT8", "INT4", "preset int4")]
    rows: Rows = [["link, each way", "communication", "bf16 ms", *widths]]
    for table in tables:
        variants = table["variants"]
        link = "no limit" if table["rate"] == "none" else f"{float(table['rate'].removesuffix('mbit')):.0f} Mbit/s"
        ratios = [f"{variants[name]['x base']:.2f}" for name in widths]
        rows.append([link, _percent(table["share"]), _number(variants["bf16"]["step, seconds"], ".0f", 1e3), *ratios])
    bytes_ = [_wire(tables[0]["variants"][name]) for name in ("bf16", *widths)]
    return [*rows, [sent, "", *bytes_], ["validation loss, %", "", "", *(losses.get(name, "") for name in widths)]]


def deepspeed_step(results: list[Any], *trainings: list[Any]) -> Rows:
    """Return a row for each stage and variant of lab.benchmarks.deepspeed_step, a rate for each command.

    Stage 1 has no rows: its times are those of stage 2. Plain INT8 and INT4 gradients have none: presets quantize
    parameters too, and lose no more. Where parameters are most of the bytes thin has none: it gains as much as int4.

    Args:
        trainings: results of lab.benchmarks.deepspeed_training, for the loss.
    """
    rates = [result["about"]["arguments"]["rate"] for result in results]
    rows: Rows = [["ZeRO", "", *_heads(rates, "bf16"), "MB on the wire", "loss, %"]]
    losses = {key: loss for training in trainings for key, loss in _losses_by_stage(training).items()}
    for tables in zip(*(result["tables"] for result in results), strict=True):
        if (stage := tables[0]["stage"]) == 1:
            continue
        for variant, first in tables[0]["variants"].items():
            if variant in NOT_SHOWN or (stage, variant) in THIN:
                continue
            name = _parameters_too(variant)
            cells = _times([table["variants"][variant] for table in tables])
            rows.append([stage, name, *cells, _wire(first), losses.get((str(stage), name), "")])
    return rows


def _heads(rates: Sequence[str], base: str) -> list[str]:
    """Return the heads of _times: the first rate has its milliseconds."""
    return [f"{rates[0]}: step, ms", *(f"{rate}: x {base}" for rate in rates)]


def _times(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the milliseconds of the first of a variant's rows, and the speed-up of each."""
    return [_number(found[0].get("step, seconds"), ".0f", 1e3), *(_number(row.get("x base")) for row in found)]


def _parameters_too(variant: str) -> str:
    """Return the name of deepspeed_step's "INT4 + 2"."""
    name, plus, bits = variant.partition(" + ")
    return f"{name}, param_bits {bits}" if plus else name


def _wire(row: dict[str, Any]) -> str:
    """Return the MB of a row that counts the bytes on an interface."""
    return _number(row.get("wire, bytes"), ".1f", 1e-6)


def _losses_by_stage(training: list[Any]) -> dict[tuple[str, str], str]:
    """Return the mean over seeds of lab.benchmarks.deepspeed_training's small model, by stage and section."""
    head, *rows = deepspeed_training(training)
    cells = [(stage, row[0], str(cell)) for row in rows for stage, cell in zip(head[1:], row[1:], strict=True)]
    return {(str(stage).removeprefix("stage "), str(name)): cell.partition(" ")[0] for stage, name, cell in cells}


def _losses(training: Callable[[list[Any]], Rows], results: Sequence[Any], column: str = "") -> dict[str, str]:
    """Return the mean over seeds by variant, from a training's column of that head, or its first of figures.

    A training without results or without the column has none.
    """
    head, *rows = training(list(results)) if results else [[]]
    if column and column not in head:
        return {}
    of = head.index(column) if column else 1
    return {str(row[0]): str(row[of]).partition(" ")[0] for row in rows}


def ddp_step(results: list[Any], training: list[Any]) -> Rows:
    """Return a row for each variant of lab.benchmarks.ddp_step that runs, with columns for each rate.

    Args:
        training: results of lab.benchmarks.ddp_training, for the loss.
    """
    losses = {name: loss for name, loss in ddp_training(training)[1:]} if training else {}
    tables = results[0]["tables"]
    rows: Rows = [["", *_heads([table["rate"] for table in tables], "fp32"), "MB on the wire", WORST]]
    for variant in tables[0]["variants"]:
        found = [table["variants"][variant] for table in tables]
        ran = next((row for row in found if "cannot run" not in row), None)
        if variant == "no communication" or "rank 1" in variant:
            continue  # PowerSGD of rank 4 takes as long as of rank 1 and loses less
        if ran is not None:
            rows.append([_section(variant), *_times(found), _wire(ran), losses.get(_section(variant), "")])
    return rows


def avx2_steps(results: list[Any]) -> Rows:
    """Return the time of each variant of ddp_step and deepspeed_step, and its share of the least possible time.

    The least possible time is that of a step with nothing sent and of the variant's bytes at the link's rate.
    """
    ddp, zero = results
    [steps] = ddp["tables"]
    variants = steps["variants"]
    rows: Rows = [["", "step, ms", "of the fp16 hook's", "least possible, of the step"]]

    def add(name: str, row: dict[str, Any], alone: float, hook: float | None) -> None:
        seconds = row["step, seconds"]
        least = alone + 8 * row["wire, bytes"] / 1e9
        share = _number(seconds / hook) if hook else ""
        rows.append([name, _number(seconds, ".0f", 1e3), share, _number(least / seconds)])

    alone, hook = (variants[name]["step, seconds"] for name in ("no communication", "fp16_compress_hook"))
    for variant in variants:
        name = _section(variant)
        if name in ("preset int4", "preset thin"):
            add(f"DDP, {name}", variants[variant], alone, hook)
    for table, name in zip(zero["tables"], ("INT4 + 4", "INT4 + 8"), strict=True):
        alone = table["variants"]["nothing sent"]["step, seconds"]
        add(f"ZeRO {table['stage']}, {_parameters_too(name)}", table["variants"][name], alone, None)
    return rows


def timed_steps(training: Callable[[list[Any]], Rows], column: str = "") -> Callable[..., Rows]:
    """Return the rows of a benchmark of steps.py: time and speed-up for each rate, then the bytes and the loss.

    The loss is that of the training's row of the same variant: in its column of that head the mean, else the cell of
    its first column.
    """

    def text(results: list[Any], trained: Sequence[Any] = ()) -> Rows:
        tables, base = results[0]["tables"], results[0]["base"]
        heads = _heads([table["rate"] for table in tables], base)
        rows: Rows = [["", *heads, "MB on the wire", "loss, %" if column else WORST]]
        if column or not trained:
            losses = _losses(training, trained, column)
        else:
            losses = {str(name): str(loss) for name, loss in training(list(trained))[1:]}
        for variant, first in tables[0]["variants"].items():
            name = _variant(variant)
            if not name.startswith("preset thin"):  # as fast as int4
                times = _times([table["variants"][variant] for table in tables])
                rows.append([name, *times, _wire(first), losses.get(name, "")])
        return rows

    return text


def ddp_training(results: list[Any]) -> Rows:
    """Return a row for each variant of lab.benchmarks.ddp_training that runs."""
    seeds = list(results[0]["seeds"].values())
    base, *variants = seeds[0]
    rows: Rows = [["", WORST]]
    for variant in variants:
        each = [_difference(losses, variant, base) for losses in seeds if variant in losses]
        rows.append([_variant(variant), _mean(each)])
    return rows


def training(*labels: str) -> Callable[[list[Any]], Rows]:
    """Return the rows of lab.benchmarks.training: one for each variant, with a label for each command."""

    def text(results: list[Any]) -> Rows:
        rows: Rows = [["", WORST]]
        for label, result in zip(labels, results, strict=True):
            for row in result:
                if row["variant"] != "full precision":
                    rows.append([f"{label}{row['variant']}", _mean(list(row["difference %"].values()))])
        return rows

    return text


def deepspeed_training(results: list[Any]) -> Rows:
    """Return a row a model and section of lab.benchmarks.deepspeed_training, a column a stage: mean and worst seed."""
    cells: dict[str, dict[str, str]] = {}
    for result in results:
        for stage, seeds in result["stages"].items():
            first = next(iter(seeds.values()))
            parameters = first["full precision"]["parameters"]
            model = "" if parameters < 1e6 else f"{parameters / 1e6:.1f} M, "
            for variant in first:
                if variant not in ("full precision", "noise 1e-6"):
                    each = [_difference(losses, variant) for losses in seeds.values() if variant in losses]
                    cells.setdefault(f"{model}{_section(variant)}", {})[stage] = _mean(each)
    stages = sorted({stage for row in cells.values() for stage in row})
    return [
        ["", *(f"stage {stage}" for stage in stages)],
        *([name, *(row.get(stage, "") for stage in stages)] for name, row in cells.items()),
    ]


def pretraining(results: list[Any]) -> Rows:
    """Return a row a variant of lab.benchmarks.pretraining, a column a size: mean and each seed. One size a command."""
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
    """Return a row for each engine, method and variant of lab.benchmarks.fine_tuning, an engine for each command."""
    rows: Rows = [["", WORST, "right, points"]]
    for name, by_seed in (item for result in results for item in result["runs"].items()):
        seeds = list(by_seed.values())
        for variant in seeds[0]:
            if variant == "full precision":
                continue
            runs = [(seed[variant], seed["full precision"]) for seed in seeds if variant in seed]
            loss = [_difference(seed, variant) for seed in seeds if variant in seed]
            points = statistics.fmean(100 * (one["accuracy"] - full["accuracy"]) for one, full in runs)
            rows.append([f"{name.partition(', ')[2]}, {_section(variant)}", _mean(loss), f"{points:+.2f}"])
    return rows


def pretrained_tuning(results: list[Any]) -> Rows:
    """Return a row for each variant of lab.benchmarks.real_model --fine-tune, an engine for each command, one seed.

    Bits are those of a parameter's element. Megatron's rows have none, because there activations are sent.
    """
    rows: Rows = [["engine", "steps", "variant", "bits", "difference, %"]]
    for result in results:
        steps = result[0]["settings"]["steps"]
        for engine, variant, bits, _, _, by_seed, _ in real_model_tuning.table(result)[1:]:
            if variant != real_model_tuning.FULL_PRECISION:
                name = json.loads(str(variant))["preset"] if str(variant).startswith("{") else variant
                bits = "" if engine == "megatron" else bits
                rows.append([engine, steps, name, bits, str(by_seed).partition(": ")[2]])
    return rows


def exchange_training(results: list[Any]) -> Rows:
    """Return a row for each exchange of lab.benchmarks.deepspeed_training --ulysses and --experts, one stage each."""
    rows: Rows = [["", WORST]]
    for label, result in zip(("Ulysses", "experts"), results, strict=True):
        seeds = list(next(iter(result["stages"].values())).values())
        for variant in seeds[0]:
            if variant != "full precision":
                each = [_difference(losses, variant) for losses in seeds if variant in losses]
                rows.append([f"{label}, {_section(variant)}", _mean(each)])
    return rows


def bf16_ring(results: list[Any]) -> Rows:
    """Return a row for some numbers of simulated ranks of lab.benchmarks.bf16_ring, with columns by variant.

    The picture has the measured ones.
    """
    rows: Rows = []
    simulated = [row for row in results[0]["rows"] if row["how"] == "simulated"]
    for row in sorted(simulated, key=lambda row: (row["correlation"], row["ranks"])):
        names = [name for name in row["sqnr_db"] if name != "INT6"]
        if not rows:
            rows.append(["correlation", "ranks", *names])
        if row["ranks"] in (8, 32, 64, 1024):
            rows.append([row["correlation"], row["ranks"], *(f"{row['sqnr_db'][name]:.1f}" for name in names)])
    return rows


def scale(results: list[Any]) -> Rows:
    """Return a row for each size and some numbers of ranks of lab.planning.scale."""
    (result,) = results
    ways = ("one level", "two levels")
    rows: Rows = [["ranks", "MiB", "bf16 ms", *(f"INT{result['bits']} {way} ms" for way in ways)]]
    for row in result["rows"]:
        if row["ranks"] not in (64, 256) and row["bytes"] != 128 * KIB**2:  # between their neighbours
            full = f"{1e3 * row['full precision']:.2f} ({row['by']})"
            cells = (f"{1e3 * row[way]['seconds']:.2f}" for way in ("flat", "two levels"))
            rows.append([row["ranks"], row["bytes"] // KIB**2, full, *cells])
    return rows


def pipeline_training(results: list[Any]) -> Rows:
    """Return a row for each variant of lab.benchmarks.pipeline_training, with rotation that of the fewest bits only."""
    rows: Rows = [["", WORST, "bytes sent / fp32's"]]
    for seeds in ([*result["seeds"].values()] for result in results):
        for variant, first in seeds[0].items():
            name = _settings(variant)
            if variant in ("full precision", "noise 1e-6") or ("hadamard" in name and "bits 4" in name):
                continue
            each = [_difference(losses, variant) for losses in seeds if variant in losses]
            whole = first["bytes in full precision"]
            rows.append([name, _mean(each), f"{first['bytes sent'] / whole:.3f}" if whole else ""])
    return rows


def _settings(variant: str) -> str:
    """Return a configuration without its punctuation: pipeline_bits 4, codebook."""
    if not variant.startswith("{"):
        return variant
    given = {key: value for key, value in json.loads(variant).items() if key != "min_bytes"}
    return ", ".join(key if value is True else f"{key} {value}" for key, value in given.items())


def _variant(name: str) -> str:
    """Return the text of a section; of lab.benchmarks.fsdp_step, of a section and the width of parameters."""
    section, parameters, bits = name.partition(", parameters ")
    return _section(section) + parameters + bits


def _section(variant: str) -> str:
    """Return a section without its punctuation: INT4, group_size 32, compact, range mse."""
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


def _difference(losses: dict[str, Any], variant: str, against: str = "full precision") -> float:
    return 100 * float(losses[variant]["validation loss"] / losses[against]["validation loss"] - 1)


def real_model(results: list[Any]) -> Rows:
    """Return a row for each format of lab.benchmarks.real_model with three ranks, without the texts called sources."""
    header, *rows = pretrained_model.table(results[0])
    left_out = {"world", "dB a token: median", "10th percentile", *(head for head in header if "sources" in str(head))}
    shown = [i for i, head in enumerate(header) if head not in left_out]
    rows = [row for row in rows if row[0] == 3 and row[1] not in ("4/128 bpm", "4/128 bpH")]  # behind 4/128 bpHm
    return columns([header, *rows], *shown)


def whole_step(results: list[Any]) -> Rows:
    """Return a row for each layout of lab.benchmarks.whole_step, a column a preset, and the largest share left."""
    found = {(row["layout"], row["preset"]): row for row in results[0]["rows"]}
    layouts, presets = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    rows: Rows = [["", *(f"{preset}, %" for preset in presets), "left, %"]]
    for layout in layouts:
        if layout in ("Megatron TP 2 + SP", "Megatron TP 2 x PP 2", "DeepSpeed stage 1", "HSDP"):
            continue  # as without SP and PP, as stage 2, and as FSDP2
        of_layout = [found[layout, preset] for preset in presets]
        left = max(sum(row["left"].values()) / row["plain"] for row in of_layout)
        rows.append([layout, *(f"{100 * row['sent'] / row['plain']:.1f}" for row in of_layout), f"{100 * left:.2f}"])
    return rows


def auto_step(results: list[Any]) -> Rows:
    """Return a row for each framework and link of lab.benchmarks.auto_step."""
    rows: Rows = [["", "link", "full, ms", "`int8`, ms", "auto, ms", "total"]]
    for row in results[0]["rows"]:
        milliseconds = [f"{row[f'{way}, seconds'] * 1e3:.1f}" for way in ("full precision", "quantized", "auto")]
        rows.append([row["framework"], row["rate"], *milliseconds, f"{row['total']:.3f}"])
    return rows


def prefill(results: list[Any]) -> Rows:
    """Return a row for some numbers of tokens and each link with a limit, from lab.benchmarks.prefill."""
    names = {'{"preset": "int8"}': "`int8`", '{"preset": "int4"}': "`int4`"}
    engines = {"torch": "torch", "autotp": "AutoTP", "megatron": "Megatron"}
    rows: Rows = [["engine, ranks", "tokens", "link", "communication", "bf16, ms", *names.values()]]
    for result in results:
        given = result["about"]["arguments"]
        engine = engines[given.get("engine", "torch")]
        model = "SmolLM2, " if given["smollm2"] else ""
        for table in result["tables"]:
            if table["rate"] == "none" and (given["shares"] or given["rates"]):
                continue
            if len(given["tokens"]) > 1 and (table["tokens"] == 512 or (engine != "torch" and table["tokens"] == 128)):
                continue  # between 128 and 2,048, and as torch
            variants = table["variants"]
            speedups = [f"{variants[name]['x base']:.2f}" for name in names]
            milliseconds = f"{1e3 * variants['bf16']['step, seconds']:.0f}"
            link = [table["tokens"], table["rate"], f"{table['share']:.0%}", milliseconds]
            rows.append([f"{model}{engine}, {given['hosts']}", *link, *speedups])
    return rows
