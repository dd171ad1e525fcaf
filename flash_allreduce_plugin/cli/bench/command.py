"""`flash-allreduce bench`: starts the ranks, prints their rows as they come, writes them down."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import netlab
from flash_allreduce_plugin.cli import machine, ranks
from flash_allreduce_plugin.cli.bench import table
from flash_allreduce_plugin.config import FlashConfig, strict_json

MEASURE = "flash_allreduce_plugin.cli.bench.rank:measure"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "codec")
ALGORITHMS = ("two-step", "ring")
DATATYPES = ("float32", "bfloat16", "float16")
# Powers of two between the smallest and the largest value that sums may reach from call to call (bench_rank.py).
_EXPONENTS = {"float32": 200, "bfloat16": 200, "float16": 20}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST_BYTES, _MOST_SIZES = 1 << 50, 10_000
_TIMEOUT = 24 * 3600.0
_SILENCE = 3.0  # seconds after which a line says how far it is, where there is no bar


def run_bench(
    *,
    minbytes: str,
    maxbytes: str,
    stepfactor: int,
    stepbytes: str | None,
    iters: int,
    warmup_iters: int,
    rounds: int,
    check: bool,
    collectives: str,
    algorithms: str,
    datatype: str,
    bits: str | None,
    options: str,
    config: Path | None,
    rank_counts: str | None,
    link: str,
    hosts: str | None,
    device: str,
    json_file: Path | None,
) -> bool:
    """Measure, print, and write json_file; whether no element was wrong.

    Raises ValueError for what cannot work, before anything is started, and ranks.RanksError if a rank fails.
    """
    chosen = names("--collective", collectives, COLLECTIVES)
    worlds = worlds_of(rank_counts, hosts, link, chosen)
    settings: dict[str, Any] = {
        "collectives": chosen,
        "sizes": sizes(minbytes, maxbytes, stepfactor, stepbytes),
        "datatype": names("--datatype", datatype, DATATYPES, single=True)[0],
        "algorithms": names("--algorithm", algorithms, ALGORITHMS),
        "configs": {name: c.to_dict() for name, c in configs(bits, options, config).items()},
        "device": device_of(device, max(worlds)),
        "iters": iters,
        "warmup": warmup_iters,
        "rounds": rounds,
        "check": check,
        "line": netlab.goodput(link) / 8 if netlab.goodput(link) < math.inf else None,
    }
    for world in worlds:
        _check_together(settings, world)
    console = Console(width=max(Console().width, table.WIDTH), highlight=False, soft_wrap=True)
    about = machine.about()
    rows: list[dict[str, Any]] = []
    speaks = not ranks.launched() or os.environ["RANK"] == "0"
    if speaks:
        console.print(table.heading(about, settings, link))
    for world in worlds:
        with _shown(console, speaks, settings, world, link) as on_message:
            found = ranks.run(
                MEASURE,
                settings,
                world_size=world,
                link=link,
                device=device,
                on_message=on_message,
                timeout=_TIMEOUT,
            )
        rows += found or []
    wrong = sum(row["wrong"] or 0 for row in rows)
    if speaks:
        if check:
            console.print(f"# wrong elements: {wrong}")
        if json_file:
            result = {"about": {**about, "link": link}, "settings": settings, "rows": rows}
            json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return wrong == 0


def sizes(minbytes: str, maxbytes: str, stepfactor: int, stepbytes: str | None) -> list[int]:
    """From minbytes to maxbytes, each stepfactor times the last or stepbytes more."""
    size, last = parse_size("-b", minbytes), parse_size("-e", maxbytes)
    step = 0 if stepbytes is None else parse_size("-i", stepbytes)
    if size > last:
        raise ValueError(f"-b {minbytes} -e {maxbytes}: the first size is larger than the last one")
    found: list[int] = []
    while size <= last:
        if len(found) == _MOST_SIZES:
            raise ValueError(f"-b {minbytes} -e {maxbytes} -i {stepbytes}: expected at most {_MOST_SIZES} sizes")
        found.append(size)
        size = size + step if step else size * stepfactor
    return found


def parse_size(option: str, text: str) -> int:
    """Bytes of "4096", "64K", "1.5M", "1G"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    if match is None or not 1 <= (size := float(match[1]) * _UNITS[match[2]]) <= _MOST_BYTES:
        raise ValueError(f"{option} {text}: expected a number of bytes, 1 or more, such as 4096, 64K, 8M or 1G")
    return int(size)


def configs(bits: str | None, options: str, file: Path | None) -> dict[str, FlashConfig]:
    """The configurations to measure, by name: one for each of `bits`, or the file's own."""
    try:
        fields = strict_json.loads(options)
        assert isinstance(fields, dict)
    except strict_json.DuplicateKeyError as error:
        raise ValueError(f"--options {options}: {error}") from None
    except (ValueError, RecursionError, AssertionError):
        raise ValueError(f"--options {options}: expected a JSON object, such as '{{\"group_size\": 64}}'") from None
    # Every call in full precision is one that tells nothing; a file is measured as it stands.
    base = FlashConfig.from_dict({"min_bytes": 0}) if file is None else FlashConfig.from_file(file)
    # A width that follows from measurements would be another one in every round.
    fields = {**base.given(), "target_sqnr_db": None, "min_sqnr_db": None, "quality_interval": 0, **fields}
    if fields["target_sqnr_db"] is not None:
        raise ValueError("--options: target_sqnr_db finds a width while a job runs; bench measures widths: give --bits")
    if bits is None and (file is not None or "preset" in fields):
        widths = [FlashConfig.from_dict(fields).bits]
    else:
        try:
            widths = [int(width) for width in (bits or "8,4").split(",")]
        except ValueError:
            raise ValueError(f"--bits {bits}: expected whole numbers from 2 to 8 separated by commas") from None
    found = (FlashConfig.from_dict({**fields, "bits": width}) for width in widths)
    return {_name(config): config for config in found}


def _name(config: FlashConfig) -> str:
    before, after = config.reduce_bits or config.bits, config.gather_bits or config.bits
    return f"INT{before}" if before == after else f"INT{before}+{after}"


def names(option: str, text: str, known: Sequence[str], single: bool = False) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if not set(names) <= set(known) or (single and len(names) > 1):
        some = "one of" if single else "one or more, separated by commas, of"
        raise ValueError(f"{option} {text}: expected {some} {', '.join(known)}")
    return names


def worlds_of(rank_counts: str | None, hosts: str | None, link: str, collectives: list[str]) -> list[int]:
    """How many ranks, one run after the other."""
    if ranks.launched():
        if rank_counts or hosts or link != netlab.LOOPBACK:
            raise ValueError("--ranks, --hosts and --link are for ranks that bench starts; a launcher started these")
        return [int(os.environ["WORLD_SIZE"])]
    if link != netlab.LOOPBACK:
        netlab.parse_rate(link)
        if os.geteuid() != 0:
            raise ValueError(
                f"--link {link}: rate-limited hosts are network namespaces, which need root: run it as root"
            )
    elif hosts:
        raise ValueError(
            f"--hosts {hosts}: expected --link with it, such as --link 1gbit; on this machine it is --ranks"
        )
    if rank_counts and hosts:
        raise ValueError("--ranks and --hosts say the same; give one of them")
    least = 1 if collectives == ["codec"] else 2
    text = hosts or rank_counts or str(least)
    try:
        worlds = [int(number) for number in text.split(",")]
    except ValueError:
        worlds = [0]
    if not all(least <= world <= 250 for world in worlds):
        option = "--hosts" if hosts else "--ranks"
        raise ValueError(f"{option} {text}: expected whole numbers from {least} to 250, separated by commas")
    return worlds


def device_of(device: str, world: int) -> str:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: expected cpu or cuda")
    if device == "cuda" and not ranks.launched() and torch.cuda.device_count() < world:
        raise ValueError(f"--device cuda: {world} ranks need a GPU each; torch finds {torch.cuda.device_count()}")
    return device


def _check_together(settings: Mapping[str, Any], world: int) -> None:
    itemsize = getattr(torch, settings["datatype"]).itemsize
    if settings["sizes"][0] < itemsize * world:
        least = f"{itemsize * world} bytes, one {settings['datatype']} a rank"
        raise ValueError(f"-b: expected at least {least}, got {settings['sizes'][0]}")
    most = _EXPONENTS[settings["datatype"]] // max(1, (world - 1).bit_length())
    if "all_reduce" in settings["collectives"] and settings["iters"] > most:
        raise ValueError(
            f"-n {settings['iters']}: in place on {world} ranks so many calls in a row overflow "
            f"{settings['datatype']}; expected at most {most}"
        )
    if "ring" in settings["algorithms"]:
        if settings["collectives"] != ["all_reduce"] or settings["device"] != "cpu":
            raise ValueError("--algorithm ring: expected --collective all_reduce and --device cpu, it has no others")
        for config in settings["configs"].values():
            if config["reduce_bits"] != config["gather_bits"] or config["hierarchical"] != "off":
                raise ValueError(
                    "--algorithm ring: it has one width and one level; drop reduce_bits, gather_bits, hierarchical"
                )


def progress_bar(console: Console) -> Progress:
    """Drawn when it is told to: a thread of its own would take its share of the cores from the ranks."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
    )


@contextlib.contextmanager
def _shown(
    console: Console, speaks: bool, settings: Mapping[str, Any], world: int, link: str
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields what takes the messages of rank 0: a bar on a terminal, and each row as it comes."""
    bar = progress_bar(console)
    task = bar.add_task("starting the ranks", total=None)
    collective, spoke = "", time.monotonic()

    def on_message(message: dict[str, Any]) -> None:
        nonlocal collective, spoke
        if row := message.get("row"):
            if row["collective"] != collective:
                collective = row["collective"]
                console.print(table.header(collective, world, link, settings))
            console.print(table.line(row, settings))
        else:
            doing = f"{message['collective']} of {table.bytes_text(message['size'])}"
            bar.update(task, completed=message["done"], total=message["of"], description=doing)
            bar.refresh()
            if console.is_terminal or time.monotonic() - spoke < _SILENCE:
                return
            at = f"round {message['round']} of {settings['rounds']}" if message["round"] else "checking"
            console.print(f"# {doing}: {at}")
        spoke = time.monotonic()

    with bar if speaks and console.is_terminal else contextlib.nullcontext():
        yield on_message
