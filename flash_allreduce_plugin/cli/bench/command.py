"""`flash-allreduce bench`: starts the ranks, prints their rows as they arrive, and writes them to a file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flash_allreduce_plugin.cli import checkout, machine, ranks
from flash_allreduce_plugin.cli.bench import table
from flash_allreduce_plugin.cli.launch import LOOPBACK
from flash_allreduce_plugin.cli.output import Doing, Output
from flash_allreduce_plugin.config import FlashConfig, strict_json

MEASURE = "flash_allreduce_plugin.cli.bench.rank:measure"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "codec")
ALGORITHMS = ("two-step", "ring")
DATATYPES = ("float32", "bfloat16", "float16")
# Powers of two between the smallest and the largest value of repeated sums (bench/rank.py).
_EXPONENTS = {"float32": 200, "bfloat16": 200, "float16": 20}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST_BYTES = 1 << 50
_TIMEOUT = 24 * 3600.0
_SILENCE = 3.0  # seconds between two lines of progress without a bar


def run_bench(
    *,
    minbytes: str,
    maxbytes: str,
    stepfactor: int,
    iters: int,
    warmup_iters: int,
    rounds: int,
    check: bool,
    collectives: str,
    algorithms: str,
    datatype: str,
    bits: str | None,
    config: str | None,
    rank_counts: str | None,
    link: str,
    device: str,
    json_file: Path | None,
) -> bool:
    """Measure, print, and write json_file. Return True if no element was wrong.

    Raises ValueError for options that cannot work, before anything is started, and ranks.RanksError if a rank fails.
    """
    chosen = names("--collective", collectives, COLLECTIVES)
    worlds = worlds_of(rank_counts, link, chosen)
    settings: dict[str, Any] = {
        "collectives": chosen,
        "sizes": sizes(minbytes, maxbytes, stepfactor),
        "datatype": names("--datatype", datatype, DATATYPES, single=True)[0],
        "algorithms": names("--algorithm", algorithms, ALGORITHMS),
        "configs": {name: c.to_dict() for name, c in configs(bits, config).items()},
        "device": device_of(device, max(worlds)),
        "iters": iters,
        "warmup": warmup_iters,
        "rounds": rounds,
        "check": check,
        "line": _line_speed(link),
    }
    for world in worlds:
        _check_together(settings, world)
    output = Output(json_file, width=table.WIDTH, silent=not ranks.speaks())
    about = machine.about()
    output.results.print(table.heading(about, settings, link))
    rows = [row for world in worlds for row in _measured(output, settings, world, link)]
    wrong = sum(row["wrong"] or 0 for row in rows)
    if check:
        output.results.print(f"# wrong elements: {wrong}")
    output.results.print('# with enabled="auto" a training run measures which is faster')
    output.write_json({"about": {**about, "link": link}, "settings": settings, "rows": rows})
    return wrong == 0


def _measured(output: Output, settings: dict[str, Any], world: int, link: str) -> list[dict[str, Any]]:
    """Return the rows of `world` ranks, each printed as it arrives; none in a launcher's other ranks."""
    with output.progress(_SILENCE) as doing:
        shown = _Shown(output, doing, settings, world, link)
        found: list[dict[str, Any]] | None = ranks.run(
            MEASURE,
            settings,
            world_size=world,
            link=link,
            device=settings["device"],
            on_message=shown,
            timeout=_TIMEOUT,
        )
    return found or []


class _Shown:
    """Print the messages of rank 0: rows as they arrive, a header before a collective's first row, and progress."""

    def __init__(self, output: Output, doing: Doing, settings: Mapping[str, Any], world: int, link: str) -> None:
        self.output, self.doing, self.settings, self.world, self.link = output, doing, settings, world, link
        self.collective = ""

    def __call__(self, message: dict[str, Any]) -> None:
        if row := message.get("row"):
            if row["collective"] != self.collective:
                self.collective = row["collective"]
                self.output.results.print(table.header(self.collective, self.world, self.link, self.settings))
            self.output.results.print(table.line(row, self.settings))
            self.doing.heard()
            return
        what = f"{message['collective']} of {table.bytes_text(message['size'])}"
        at = f"round {message['round']} of {self.settings['rounds']}" if message["round"] else "checking"
        self.doing(what, message["done"], message["of"], more=at)


def _line_speed(link: str) -> float | None:
    """Return the payload bytes a second of a rate-limited link."""
    if link == LOOPBACK:
        return None
    checkout.need(f"--link {link}", "netlab")
    from lab.benchmarks import netlab

    speed = netlab.goodput(link) / 8
    return speed if speed < math.inf else None


def sizes(minbytes: str, maxbytes: str, stepfactor: int) -> list[int]:
    """Return the sizes from minbytes to maxbytes, each stepfactor times the last."""
    size, last = parse_size("-b", minbytes), parse_size("-e", maxbytes)
    if size > last:
        raise ValueError(f"-b {minbytes} -e {maxbytes}: the first size is larger than the last one")
    found: list[int] = []
    while size <= last:
        found.append(size)
        size *= stepfactor
    return found


def parse_size(option: str, text: str) -> int:
    """Return the bytes of "4096", "64K", "1.5M", "1G"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    if match is None or not 1 <= (size := float(match[1]) * _UNITS[match[2]]) <= _MOST_BYTES:
        raise ValueError(f"{option} {text}: expected a number of bytes, 1 or more, such as 4096, 64K, 8M or 1G")
    return int(size)


def configs(bits: str | None, config: str | None) -> dict[str, FlashConfig]:
    """Return the configurations to measure, by name: one for each of `bits`, or that of --config alone.

    min_bytes is 0 unless a file sets it, so that all calls are quantized. target_sqnr_db and min_sqnr_db are off: a
    width that follows measurements would change from round to round.
    """
    file, fields = fields_of(config)
    if fields.get("target_sqnr_db") is not None and file is None:
        raise ValueError(
            "--config: target_sqnr_db chooses widths during a run; bench measures fixed widths: give --bits"
        )
    given = fields if file is not None else {"min_bytes": 0, **fields}
    base = {**given, "target_sqnr_db": None, "min_sqnr_db": None, "quality_interval": 0}
    if bits is None and (file is not None or {"bits", "preset"} & fields.keys()):
        found = [FlashConfig.from_dict(base)]
    else:
        try:
            widths = [int(width) for width in (bits or "8,4").split(",")]
        except ValueError:
            raise ValueError(f"--bits {bits}: expected whole numbers from 2 to 8 separated by commas") from None
        found = [FlashConfig.from_dict({**base, "bits": width}) for width in widths]
    return {_name(each): each for each in found}


def fields_of(config: str | None) -> tuple[Path | None, dict[str, Any]]:
    """Return (the file, its fields) of --config FILE, or (None, the fields) of --config '{"group_size": 64}'."""
    if config is None:
        return None, {}
    text, file = config, None
    if not config.lstrip().startswith(("{", "[")):
        file = Path(config)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"--config {config}: cannot be read ({why}); expected a JSON file or JSON") from None
    try:
        fields = strict_json.loads(text)
    except strict_json.DuplicateKeyError as error:
        raise ValueError(f"--config {config}: {error}") from None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"--config {config}: expected a JSON object, such as '{{\"group_size\": 64}}'")
    return file, fields


def _name(config: FlashConfig) -> str:
    before, after = config.reduce_bits or config.bits, config.gather_bits or config.bits
    return f"INT{before}" if before == after else f"INT{before}+{after}"


def names(option: str, text: str, known: Sequence[str], single: bool = False) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if not set(names) <= set(known) or (single and len(names) > 1):
        some = "one of" if single else "one or more, separated by commas, of"
        raise ValueError(f"{option} {text}: expected {some} {', '.join(known)}")
    return names


def worlds_of(rank_counts: str | None, link: str, collectives: list[str]) -> list[int]:
    """Return the numbers of ranks, one run each."""
    if ranks.launched():
        if rank_counts or link != LOOPBACK:
            raise ValueError("--ranks and --link: bench starts no ranks under a launcher; leave both out")
        return [int(os.environ["WORLD_SIZE"])]
    if link != LOOPBACK:
        _line_speed(link)  # refuses a bad rate
        if os.geteuid() != 0:
            raise ValueError(
                f"--link {link}: rate-limited hosts are network namespaces, which need root: run it as root"
            )
    least = 1 if collectives == ["codec"] else 2
    text = rank_counts or str(least)
    try:
        worlds = [int(number) for number in text.split(",")]
    except ValueError:
        worlds = [0]
    if not all(least <= world <= 250 for world in worlds):
        raise ValueError(f"--ranks {text}: expected whole numbers from {least} to 250, separated by commas")
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
            f"-n {settings['iters']}: so many all-reduces in place on {world} ranks overflow {settings['datatype']}; "
            f"expected at most {most}"
        )
    if "ring" in settings["algorithms"]:
        checkout.need("--algorithm ring", "ring")
        if settings["collectives"] != ["all_reduce"] or settings["device"] != "cpu":
            raise ValueError("--algorithm ring: expected --collective all_reduce and --device cpu")
        for config in settings["configs"].values():
            if config["reduce_bits"] != config["gather_bits"] or config["hierarchical"] != "off":
                raise ValueError(
                    "--algorithm ring: it has one width and one level; remove reduce_bits, gather_bits, hierarchical"
                )
