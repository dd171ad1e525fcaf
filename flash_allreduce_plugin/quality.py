"""How large the error of a live call was, measured against the exact result.

SQNR = 10 log10(sum of squares of the exact result / sum of squares of the difference), in dB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_allreduce_plugin import telemetry, transport
from flash_allreduce_plugin.policy import Site
from flash_allreduce_plugin.transport import Label, Pending


class Measurement:
    """The exact result of one call, on its way in full precision beside the quantized one.

    It costs a float32 copy of the input and a plain collective, which is why only every
    config.quality_interval-th call of a site is measured.
    """

    def __init__(self, collective: str, input: Tensor, op: object, factor: float, label: Label) -> None:
        """input: what the plain collective takes, evenly split; factor: what its result is to be multiplied with."""
        self._factor = factor
        self._exact = input.detach().flatten().to(torch.float32, copy=True)
        self._pending: Pending
        world = label.group.size()
        if collective == "all_reduce":
            self._pending = transport.all_reduce(self._exact, op, label)
        elif collective == "reduce_scatter":
            whole, self._exact = self._exact, self._exact.new_empty(self._exact.numel() // world)
            self._pending = transport.reduce_scatter(self._exact, whole, op, label)
        else:
            shard, self._exact = self._exact, self._exact.new_empty(self._exact.numel() * world)
            self._pending = transport.all_gather(self._exact, shard, label, transport.PLAINLY)

    def record(self, result: Tensor, site: Site) -> tuple[float, float]:
        """Compare with the quantized result and add to the site's counters; signal_and_noise of this rank's result."""
        self._pending.wait()
        signal, noise = signal_and_noise(self._exact[: result.numel()] * self._factor, result)
        telemetry.record_sqnr(site, signal, noise)
        return signal, noise


def signal_and_noise(exact: Tensor, result: Tensor) -> tuple[float, float]:
    """Sums of squares, in float64: of `exact` and of its difference to `result`."""
    exact = exact.flatten().double()
    return float(exact.square().sum()), float((result.flatten().double() - exact).square().sum())
