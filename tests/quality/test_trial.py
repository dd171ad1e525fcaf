"""The codebook with spikes, tried on calls of few bits: which calls, and the measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.quality import trial
from flash_allreduce_plugin.telemetry import counters, notices
from tests.codecs import gaussian


def site_of(name: str) -> tuple[Site, counters.Tally]:
    """Return a site with one quantized call, and the tally of its attachment."""
    tally = counters.Tally(lambda: None)
    site = Site(name, tally=tally)
    counters.record_quantized(site, 1, 2)
    return site, tally


def better(tally: counters.Tally) -> list[str]:
    return list(notices.better_at_few_bits(tally, fap.FlashConfig(bits=4), str).values())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gaussian_values_are_not_poor(bits: int) -> None:
    """Check that a tensor with an outlier in each group is poor."""
    site, tally = site_of("t40.gaussian")
    x = gaussian(1 << 16)
    trial.try_codebook(site, Format(bits, 128), x)
    [tried] = tally.trials().values()
    assert tried.own[0] == tried.better[0] == 32 and better(tally) == []
    x.view(-1, 128)[:, 5] *= 30
    for _ in range(30):
        counters.record_quantized(site, 1, 2)
        trial.try_codebook(site, Format(bits, 128), x)
    [tried] = tally.trials().values()
    assert tried.own[0] == 5 * 32, "at the calls 1, 2, 4, 8 and 16"
    [line] = better(tally)
    assert f" dB at {bits} bits; codebook=true and spike_reserving=true would have " in line


def test_calls_are_tried_only_where_a_line_may_be_printed() -> None:
    (site, tally), x = site_of("t40.some"), gaussian(1 << 14)
    for wire in (Format(5, 128), Format(4, 128, stochastic=True), Format(4, 128, codebook=True, spikes=True)):
        trial.try_codebook(site, wire, x)
    trial.try_codebook(replace(site, role=Role.PARAMETER_DIFFERENCE), Format(4, 128), x)
    trial.try_codebook(site, Format(4, 128), x[:100])
    trial.try_codebook(site, Format(4, 128), torch.zeros(1 << 14))
    assert not any(tried.own[0] for tried in tally.trials().values())
    tally.clear()
    counters.record_quantized(site, 1, 2)
    trial.try_codebook(site, Format(4, 128), x)
    assert tally.trials() == {}


def test_of_parts_the_longest_is_tried_and_of_rows_all() -> None:
    (site, tally), x = site_of("t40.parts"), gaussian(4, 1 << 14)
    trial.try_codebook(site, Format(4, 128), [x[0, :0], x[1], x[2, :64]])
    assert tally.trials()[site.name].own[0] == 32
    counters.record_quantized(site, 1, 2)
    trial.try_codebook(site, Format(4, 128), x[:, :1000].bfloat16())  # 7 whole groups of each row, no runs of one row
    assert 32 < tally.trials()[site.name].own[0] <= 64
    trial.try_codebook(site, Format(4, 128), [])
