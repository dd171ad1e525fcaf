"""Steps of the demo on a slow link: measured, if root runs the demo, and estimated from its times and bytes."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
from collections.abc import Sequence
from typing import Any

from flash_allreduce_plugin.cli import checkout
from flash_allreduce_plugin.cli.demo.model import ModelSize

FORMULA = "seconds of a step = seconds measured here + 8 x bytes sent by a rank / bits per second of the link"
RATES = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
BF16 = "bf16"
MEASURED = "100 Mbit/s"
ROUNDS = 5


def costs(variants: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return (seconds, bytes sent by a rank) of a step by variant: full precision, bf16, and the quantized ones.

    {} if no step was timed. bf16 is not trained: it is full precision with half of the bytes. The noise control is
    skipped.
    """
    quantized = {name: variant for name, variant in variants.items() if variant["quantized"]}
    full_name, full = next(iter(variants.items()))
    if not quantized or any(variant["seconds_per_step"] is None for variant in [full, *quantized.values()]):
        return {}
    # An unpatched variant has no counters: the other variants count the bytes of full precision.
    everything = next(iter(quantized.values()))["bytes_full_precision_per_step"]
    seconds = full["seconds_per_step"]
    found = {full_name: (seconds, everything), BF16: (seconds, everything / 2)}
    for name, variant in quantized.items():
        found[name] = (variant["seconds_per_step"], variant["bytes_sent_per_step"])
    return found


def cannot_measure() -> str | None:
    """Return why no step can be measured on a slow link here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("tc") is None or shutil.which("ip") is None:
        return "needs iproute2"
    try:
        checkout.need("a measured link", "step_time")
    except ValueError:
        return "needs a checkout of the plugin"
    return None


def measured(size: ModelSize, hosts: int, presets: Sequence[str]) -> dict[str, float]:
    """Return the median seconds of a step in bf16 and with each preset, between hosts with links of MEASURED.

    The steps of the variants alternate. Raises RuntimeError if the hosts cannot be created or a rank fails.
    """
    from lab.benchmarks import step_time, steps

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(checkout.ROOT), os.environ.get("PYTHONPATH"))))
    # As the demo trains. Its messages are smaller than those of models for which a slow link matters.
    variants = {BF16: BF16} | {f"preset {name}": json.dumps({"preset": name, "min_bytes": 0}) for name in presets}
    arguments = argparse.Namespace(
        hidden=size.hidden,
        layers=size.layers,
        heads=size.heads,
        sequence=size.sequence,
        batch=size.batch,
        rounds=ROUNDS,
        hosts=hosts,
        timeout=120,
    )
    found = steps.over_links(
        step_time.in_rank, f"{RATES[MEASURED] / 1e6:.0f}mbit", arguments, variants=[*variants.values()]
    )
    return {name: statistics.median(found["seconds"][variant]) for name, variant in variants.items()}


def step_seconds(cost: tuple[float, float], rate: float) -> float:
    """Return FORMULA: nothing overlaps, a message has no latency, the link reaches its full rate."""
    seconds, sent = cost
    return seconds + 8.0 * sent / rate


def faster_below(cost: tuple[float, float], base: tuple[float, float]) -> float:
    """Return the rate in bits a second below which `cost` is faster than `base`: inf for every rate, 0 for none."""
    more_seconds, fewer_bytes = cost[0] - base[0], base[1] - cost[1]
    if fewer_bytes <= 0:
        return 0.0
    return math.inf if more_seconds <= 0 else 8.0 * fewer_bytes / more_seconds


def verdict(name: str, found: dict[str, tuple[float, float]]) -> str:
    """Return a sentence about the links on which the variant `name` is faster than full precision, and than bf16."""
    full_name = next(iter(found))
    said = [f"{base} {_links(faster_below(found[name], found[base]))}" for base in (full_name, BF16)]
    return f"{name} is faster than {said[0]}, and than {said[1]}."


def _links(rate: float) -> str:
    if rate == 0:
        return "on no link"
    if math.isinf(rate):
        return "on every link"
    return f"below {rate / 1e9:.1f} Gbit/s" if rate >= 1e9 else f"below {rate / 1e6:.0f} Mbit/s"
