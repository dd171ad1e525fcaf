"""`bench --collective codec`: the codec alone, on all ranks together, against memcpy and add_."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.cli.bench import check
from flash_allreduce_plugin.cli.bench.check import Groups, Inputs, Segment
from flash_allreduce_plugin.cli.timing import interleaved
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.telemetry import counters

COPY, ADD = "copy_", "add_"
ENCODE, DECODE, SUM = "encode", "decode", "sum of 2"
BESIDE = {ENCODE: COPY, DECODE: COPY, SUM: ADD}  # the comparison of each


def codec_rows(
    collective: str, size: int, settings: dict[str, Any], progress: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Time encode and decode of a tensor of `size` bytes, and the sum of two such payloads."""
    device = torch.device(settings["device"])
    dtype: torch.dtype = getattr(torch, settings["datatype"])
    inputs = Inputs("all_reduce", size // dtype.itemsize, dtype, 2)
    tensors = [inputs.tensor(number).to(device) for number in range(2)]
    x, y = tensors[0], torch.empty_like(tensors[0])
    runs: dict[str, Callable[[], object]] = {COPY: lambda: y.copy_(x), ADD: lambda: y.add_(x)}
    facts: dict[str, dict[str, Any]] = {COPY: {}, ADD: {}}
    for name, fields in settings["configs"].items():
        config = FlashConfig.from_dict(fields)
        wire = config.format(config.reduce_bits)
        for what, sources, payloads, run in _operations(tensors, y, wire):
            runs[f"{name} {what}"] = run
            run()
            if what == ENCODE:
                rows.decode(payloads, y.view(1, -1), wire)
            found = _check(y, inputs, sources, wire) if settings["check"] else {}
            facts[f"{name} {what}"] = {**found, "wire_bytes": payloads.shape[1], "beside": BESIDE[what]}
    times = interleaved(
        {name: run for name, run in runs.items() if not facts[name].get("wrong")},
        settings["rounds"],
        settings["iters"],
        warmup=settings["warmup"],
        before=lambda: y.copy_(x),
        on_round=progress,
    )
    return [_row(name, collective, inputs, settings["datatype"], times, facts[name]) for name in runs]


def _operations(
    tensors: Sequence[torch.Tensor], output: torch.Tensor, wire: Format
) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor, Callable[[], object]]]:
    """Return the timed operations: (name, numbers of the tensors in the result, payloads, call)."""
    x, numel = tensors[0], tensors[0].numel()
    payloads = torch.empty(2, wire.payload_bytes(numel), dtype=torch.uint8, device=x.device)
    for tensor, payload in zip(tensors, payloads, strict=True):
        rows.encode(tensor.view(1, -1), payload.view(1, -1), wire)
    spare = torch.empty_like(payloads[:1])  # decode reads another payload than encode writes, so either may run first
    yield ENCODE, (0,), spare, partial(rows.encode, x.view(1, -1), spare, wire)
    yield DECODE, (0,), payloads, partial(rows.decode, payloads[:1], output.view(1, -1), wire)
    yield SUM, (0, 1), payloads, partial(rows.decode_sum, payloads, output, wire, 1.0)


def _row(
    name: str, collective: str, inputs: Inputs, datatype: str, times: Mapping[str, list[float]], facts: dict[str, Any]
) -> dict[str, Any]:
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    seconds, size = medians.get(name), inputs.numel * inputs.dtype.itemsize
    return {
        "ranks": dist.get_world_size(),
        "collective": collective,
        "size": size,
        "count": inputs.numel,
        "type": datatype,
        "redop": None,
        "variant": name,
        "seconds": seconds,
        "seconds_by_round": times.get(name, []),
        "algbw": seconds and size / seconds,
        "busbw": None,
        "wrong": facts.get("wrong"),
        "wire_bytes": facts.get("wire_bytes"),
        "sqnr_db": facts.get("sqnr_db"),
        "speedup": seconds and medians[facts.get("beside", name)] / seconds,
        "of_the_line": None,
    }


def _check(result: torch.Tensor, inputs: Inputs, sources: tuple[int, ...], wire: Format) -> dict[str, Any]:
    """Check the result on all ranks."""

    def travel(groups: Sequence[Groups]) -> Groups:
        rounded = [x.rounded(wire) for x in groups]
        return rounded[0] if len(rounded) == 1 else rounded[0] + rounded[1]

    pieces = range(-(-inputs.numel // check.PIECE))
    segments = [
        Segment(i * check.PIECE, 0, i, 0, min(check.PIECE, inputs.numel - i * check.PIECE), sources) for i in pieces
    ]
    wrong, signal, noise = check.compare(result, inputs, iter(segments), wire.group_size, travel)
    total = torch.tensor([wrong, signal, noise], dtype=torch.float64)
    dist.all_reduce(total)
    db = counters.sqnr_db(*total[1:].tolist())
    return {"wrong": int(total[0]), "sqnr_db": db if math.isfinite(db) else None}
