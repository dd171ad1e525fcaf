"""What a step of the demo would take on a slow link: an estimate from the times and bytes that the run measured."""

from __future__ import annotations

import math
from typing import Any

FORMULA = "seconds of a step = seconds measured here + 8 x bytes sent by a rank / bits per second of the link"
RATES = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
BF16 = "bf16"


def costs(variants: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(seconds, bytes sent by a rank) of a step: full precision, bf16, each quantized variant; {} if none was timed.

    bf16 is not trained: it is full precision with half of the bytes. The noise control is left out.
    """
    quantized = {name: variant for name, variant in variants.items() if variant["quantized"]}
    full_name, full = next(iter(variants.items()))
    if not quantized or any(variant["seconds_per_step"] is None for variant in [full, *quantized.values()]):
        return {}
    # Nothing is counted where nothing is patched: the other variants' counters say what full precision sends.
    everything = next(iter(quantized.values()))["bytes_full_precision_per_step"]
    seconds = full["seconds_per_step"]
    found = {full_name: (seconds, everything), BF16: (seconds, everything / 2)}
    for name, variant in quantized.items():
        found[name] = (variant["seconds_per_step"], variant["bytes_sent_per_step"])
    return found


def step_seconds(cost: tuple[float, float], rate: float) -> float:
    """FORMULA: nothing overlaps, a message has no latency, the link is used at its full rate."""
    seconds, sent = cost
    return seconds + 8.0 * sent / rate


def faster_below(cost: tuple[float, float], base: tuple[float, float]) -> float:
    """The rate in bits per second below which `cost` takes less time than `base`: inf for every rate, 0 for none."""
    more_seconds, fewer_bytes = cost[0] - base[0], base[1] - cost[1]
    if fewer_bytes <= 0:
        return 0.0
    return math.inf if more_seconds <= 0 else 8.0 * fewer_bytes / more_seconds


def verdict(name: str, found: dict[str, tuple[float, float]]) -> str:
    """One sentence: on which links the variant `name` is faster than full precision, and than bf16."""
    full_name = next(iter(found))
    said = [f"{base} {_links(faster_below(found[name], found[base]))}" for base in (full_name, BF16)]
    return f"{name} is faster than {said[0]}, and than {said[1]}."


def _links(rate: float) -> str:
    if rate == 0:
        return "on no link"
    if math.isinf(rate):
        return "on every link"
    return f"below {rate / 1e9:.1f} Gbit/s" if rate >= 1e9 else f"below {rate / 1e6:.0f} Mbit/s"
