"""The tables of docs/benchmarks.md that scripts/make_benchmarks.py makes: the commands of each, and its text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_allreduce_plugin.cli.tune import command as tune

Rows = list[Sequence[object]]


@dataclass(frozen=True)
class Command:
    """line: as it stands in the documentation. quick: more options, which make it a matter of seconds. fine: exit
    statuses of a run that has measured; what it says with 1 is in the table.
    """

    line: str
    quick: str
    fine: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Table:
    """text: of what the commands wrote with --json, in their order -> the header, then the rows.

    picture: a file's name and what draws it of the same, beside the document, when the table is measured. slow: hours;
    made only where it is asked for by name. needs: root, or a package.
    """

    name: str
    commands: tuple[Command, ...]
    text: Callable[[list[Any]], Rows]
    picture: tuple[str, Callable[[list[Any], Path], None]] | None = None
    slow: bool = False
    needs: tuple[str, ...] = ()


def markdown(rows: Rows) -> list[str]:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def _number(value: float | None, form: str = ".2f", scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)


def _percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def codec(results: list[Any]) -> Rows:
    columns = {
        "bits": "g",
        "bits per element": "g",
        "SQNR dB": ".2f",
        "x.sum() GB/s": ".1f",
        "encode GB/s": ".1f",
        "decode GB/s": ".1f",
        "encode / memcpy": ".2f",
        "sum of 2 / add_": ".2f",
        "encode x fbgemm": ".2f",
        "decode x fbgemm": ".1f",
    }
    header = [name.replace("per element", "an element").replace("fbgemm", "FBGEMM") for name in columns]
    return [header, *([_number(row.get(key), form) for key, form in columns.items()] for row in results[0]["rows"])]


def collectives(results: list[Any]) -> Rows:
    """Of `flash-allreduce bench`, one size: a row a dtype and variant, columns for each link and number of ranks."""
    setups: dict[str, dict[str, Any]] = {}
    for result in results:
        for row in result["rows"]:
            setups.setdefault(_where(result, row), {})[f"{row['type']}, {row['variant']}"] = row
    header, names = [""], list(dict.fromkeys(name for rows in setups.values() for name in rows))
    for where, rows in setups.items():
        header += [f"{where}: ms", "speed-up", *(["of the line"] if _on_a_line(rows) else [])]
    table: Rows = [header]
    for name in names:
        cells = [name]
        for rows in setups.values():
            row = rows.get(name, {})
            cells += [_number(row.get("seconds"), ".1f", 1e3), _number(row.get("speedup"))]
            if _on_a_line(rows):
                cells.append(_percent(row["of_the_line"]) if row.get("of_the_line") else "")
        table.append(cells)
    return table


def _where(result: dict[str, Any], row: dict[str, Any]) -> str:
    link = result["about"]["link"]
    return f"loopback, {row['ranks']} ranks" if link == "loopback" else f"{row['ranks']} hosts, {link}"


def _on_a_line(rows: dict[str, Any]) -> bool:
    return any(row["of_the_line"] for row in rows.values())


def sizes(results: list[Any]) -> Rows:
    """Of `flash-allreduce bench`: a row a size, the time in full precision and each variant's speed-up."""
    columns: dict[str, dict[int, str]] = {}
    for result in results:
        for row in result["rows"]:
            full = row["variant"] == "full precision"
            column = columns.setdefault(f"{_where(result, row)}: {'ms' if full else row['variant']}", {})
            column[row["size"]] = _number(row["seconds"], ".2f", 1e3) if full else _number(row["speedup"])
    every = sorted({size for column in columns.values() for size in column})
    rows = [[_number(size / 1024, "g"), *(column.get(size, "") for column in columns.values())] for size in every]
    return [["KiB", *columns], *rows]


def tuned(results: list[Any]) -> Rows:
    """Of `flash-allreduce tune`: a row a size, for each run the time in full precision, that of the tuned configuration
    over it (bold: quantized), and full precision over itself.
    """
    header, rows = ["KiB"], {}
    for result in results:
        about = result["about"]
        on = "loopback" if about["link"] == "loopback" else about["link"]
        header += [f"{about['ranks']} ranks, {on}: ms", "tuned", "control"]
        for row in result["check"]:
            cells = rows.setdefault(row["size"], [_number(row["size"] / 1024, "g")])
            ratio = f"**{row['ratio']:.2f}**" if row["quantized"] else f"{row['ratio']:.2f}"
            cells += [_number(row["seconds"]["full precision"], ".2f", 1e3), ratio, _number(row["control"])]
    return [header, *(rows[size] for size in sorted(rows))]


def ring(results: list[Any]) -> Rows:
    """Of `flash-allreduce bench --algorithm two-step,ring`: steps, volume, roundings, error and time by ranks."""
    rows: Rows = []
    for row in results[0]["rows"]:
        if "algorithm" in row:
            name = row["variant"].removesuffix(" ring")
            sent, formula = (_number(row[key], ".3f", 1e-6) for key in ("wire_bytes", "wire_bytes_formula"))
            error, time = _number(row["sqnr_db"], ".1f"), _number(row["seconds"], ".1f", 1e3)
            rows.append(
                [
                    f"{name}, {row['algorithm']}",
                    row["ranks"],
                    row["steps"],
                    row["roundings"],
                    sent,
                    formula,
                    error,
                    time,
                ]
            )
    rows.sort(key=lambda cells: str(cells[0]), reverse=True)
    header = ["", "ranks", "steps", "QDQ rounds", "sent a rank, MB", "2 M (N-1)/N, MB", "SQNR, dB", "ms"]
    return [header, *rows]


def step_time(results: list[Any]) -> Rows:
    tables = results[0]["tables"]
    widths = [name for name in tables[0]["variants"] if name.startswith("INT")]
    rows: Rows = [["link, each way", "communication's share of the bf16 step", "bf16 ms", *widths]]
    for table in tables:
        variants = table["variants"]
        link = "no limit" if table["rate"] == "none" else f"{float(table['rate'].removesuffix('mbit')):.0f} Mbit/s"
        ratios = [f"{variants[name]['x bf16']:.2f} x" for name in widths]
        rows.append([link, _percent(table["share"]), _number(variants["bf16"]["seconds"], ".0f", 1e3), *ratios])
    sent = [_number(tables[0]["variants"][name]["megabytes sent"], ".1f") for name in ("bf16", *widths)]
    return [*rows, ["MB sent in a step and rank", "", *sent]]


def layer(results: list[Any]) -> Rows:
    table = results[0]["tables"][-1]
    variants, waits = table["variants"], ", waits at once"
    rows: Rows = [
        [f"{float(table['rate'].removesuffix('mbit')):.0f} Mbit/s, ms", "overlapped", "waits at once", "hidden"]
    ]
    for name, row in variants.items():
        if not name.endswith(waits):
            slower = variants.get(name + waits, {}).get("seconds")
            hidden = None if slower is None else slower - row["seconds"]
            rows.append([name, *(_number(seconds, ".0f", 1e3) for seconds in (row["seconds"], slower, hidden))])
    return rows


def deepspeed_step(results: list[Any]) -> Rows:
    rows: Rows = [["", "", "step ms", "gradients ms", "gradients x bf16", "step x bf16", "bits sent an element"]]
    for table in results[0]["tables"]:
        for i, (name, row) in enumerate(table["variants"].items()):
            cells = ["" if i else f"stage {table['stage']}", name, _number(row["step, seconds"], ".0f", 1e3)]
            if row["x bf16, gradients"] is not None:
                cells += [
                    _number(row["gradients, seconds"], ".0f", 1e3),
                    _number(row["x bf16, gradients"]),
                    _number(row["x bf16, step"]),
                    _number(row["bits sent per element"] or None, "g"),  # DeepSpeed's own is not counted
                ]
            rows.append([*cells, *[""] * (7 - len(cells))])
    return rows


def training(*labels: str, timed: bool = False) -> Callable[[list[Any]], Rows]:
    """Of benchmarks.training; a label for each command. timed: with the time of a step."""

    def text(results: list[Any]) -> Rows:
        rows: Rows = [["", "validation loss against full precision: mean", "by seed", *["time of a step"] * timed]]
        for label, result in zip(labels, results, strict=True):
            for row in result:
                if row["variant"] != "full precision":
                    by_seed = ", ".join(f"{seed}: {value:+.3f} %" for seed, value in row["difference %"].items())
                    time = [f"{row['time / full precision']:.2f} x"] * timed
                    rows.append([f"{label}{row['variant']}", f"{row['mean difference %']:+.3f} %", by_seed, *time])
        return rows

    return text


def deepspeed_training(*labels: str) -> Callable[[list[Any]], Rows]:
    """Of benchmarks.deepspeed_training; a label for each command."""

    def text(results: list[Any]) -> Rows:
        rows: Rows = [["", "", "mean", "by seed", "bits sent an element"]]
        for label, result in zip(labels, results, strict=True):
            for stage, seeds in result["stages"].items():
                first = next(iter(seeds.values()))
                for i, variant in enumerate(name for name in first if name != "full precision"):
                    each = {seed: _difference(losses, variant) for seed, losses in seeds.items() if variant in losses}
                    by_seed = ", ".join(f"{seed}: {value:+.3f}" for seed, value in each.items())
                    sent = first[variant]["bits sent per element"]
                    where = "" if i else f"{label}stage {stage}"
                    mean = f"{statistics.fmean(each.values()):+.3f} %"
                    rows.append([where, f"`{variant}`", mean, by_seed, _number(sent, ".2f") if sent else ""])
        return rows

    return text


def _difference(losses: dict[str, Any], variant: str) -> float:
    return 100 * float(losses[variant]["validation loss"] / losses["full precision"]["validation loss"] - 1)


BENCH = "flash-allreduce bench"
_QUICK = "-b 64K -e 64K --rounds 1 -n 1"
_TRAINING = "--steps 12 --seeds 1234 --hidden 64 --layers 1 --no-noise-control"
TABLES = (
    Table("codec", (Command("python -m benchmarks.codec", "--numel 131072 --rounds 1"),), codec),
    Table(
        "all_reduce",
        (
            Command(f"{BENCH} --link 1gbit --ranks 2,4 -b 32M -e 32M -n 1 --rounds 15", f"{_QUICK} --ranks 2"),
            Command(
                f"{BENCH} --link 1gbit --ranks 2,4 -b 16M -e 16M -n 1 --rounds 15 -d bfloat16", f"{_QUICK} --ranks 2"
            ),
            Command(f"{BENCH} --ranks 2,4 -b 32M -e 32M -n 1 --rounds 15", f"{_QUICK} --ranks 2"),
            Command(f"{BENCH} --ranks 2,4 -b 16M -e 16M -n 1 --rounds 15 -d bfloat16", f"{_QUICK} --ranks 2"),
        ),
        collectives,
        needs=("root",),
    ),
    Table(
        "in a row",
        (Command(f"{BENCH} --link 98mbit -b 2M -e 2M -n 8 --rounds 5 -d bfloat16 --bits 8,6,4", _QUICK),),
        collectives,
        needs=("root",),
    ),
    Table(
        "sizes",
        (
            Command(f"{BENCH} -b 16K -e 64M -f 4", f"{_QUICK} -e 256K"),
            Command(f"{BENCH} -b 16K -e 64M -f 4 --link 1gbit", f"{_QUICK} -e 256K"),
        ),
        sizes,
        needs=("root",),
    ),
    Table(
        "tuned",
        tuple(
            Command(f"flash-allreduce tune {where} -o /tmp/tuned.json", "-e 16K -b 16K --seconds 0", (0, 1))
            for where in ("--ranks 2", "--ranks 4", "--link 1gbit --ranks 2", "--link 1gbit --ranks 4")
        ),
        tuned,
        ("tuning.png", tune.plot),
        needs=("root",),
    ),
    Table(
        "ring",
        (
            Command(
                f"{BENCH} --algorithm two-step,ring --link 1gbit --ranks 2,4,8 -b 8M -e 8M -n 1", f"{_QUICK} --ranks 2"
            ),
        ),
        ring,
        needs=("root",),
    ),
    Table(
        "step time",
        (Command("python -m benchmarks.step_time --shares 0.25 0.5 0.75 0.9", "--shares 0.5 --rounds 1 --layers 1"),),
        step_time,
        needs=("root", "megatron"),
    ),
    Table(
        "layer",
        (
            Command(
                "python -m benchmarks.step_time --layer --hidden 1024 --overlap --shares 0.5 --bits 8 4 --rounds 25",
                "--hidden 128 --rounds 1",
            ),
        ),
        layer,
        needs=("root", "megatron"),
    ),
    Table(
        "DeepSpeed step",
        (Command("python -m benchmarks.deepspeed_step --rate 1gbit", "--width 128 --layers 1 --rounds 1"),),
        deepspeed_step,
        needs=("root", "deepspeed"),
    ),
    Table(
        "training",
        (
            Command("python -m benchmarks.training --hidden 288 --layers 5 --steps 400 --bits 8,6", _TRAINING),
            Command(
                "python -m benchmarks.training --hidden 288 --layers 5 --steps 400 --bits 8 --sequence-parallel "
                "--no-noise-control",
                _TRAINING,
            ),
            Command(
                "python -m benchmarks.training --hidden 288 --layers 5 --steps 400 --bits 8,6 --tp 4 --seeds 1234 "
                "--no-noise-control",
                _TRAINING,
            ),
        ),
        training("TP 2, ", "TP 2 with sequence parallelism, reduce-scatters at ", "TP 4, "),
        slow=True,
        needs=("megatron",),
    ),
    Table(
        "training with options",
        (
            Command(
                "python -m benchmarks.training --steps 400 --bits 6,4 "
                """--options '{"group_size": 32, "compact": true, "range": "mse"}'""",
                _TRAINING,
            ),
        ),
        training("TP 2, "),
        slow=True,
        needs=("megatron",),
    ),
    Table(
        "demo",
        (Command("python -m benchmarks.training --seeds 1234 2 3", _TRAINING),),
        training("", timed=True),
        slow=True,
        needs=("megatron",),
    ),
    Table(
        "DeepSpeed training",
        (
            Command("python -m benchmarks.deepspeed_training", "--steps 40 --seeds 1 --width 32 --layers 1"),
            Command(
                "python -m benchmarks.deepspeed_training --width 288 --layers 5 --stages 0 2 --seeds 1 --noise",
                "--steps 40 --width 32 --layers 1",
            ),
        ),
        deepspeed_training("0.7 M parameters, ", "5.2 M parameters, "),
        slow=True,
        needs=("deepspeed",),
    ),
)
