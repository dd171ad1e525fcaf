"""The measurements that a site keeps, whichever control it has."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flash_allreduce_plugin.collectives import sample
from flash_allreduce_plugin.quality.guard import SiteGuard
from flash_allreduce_plugin.quality.sites import SiteBits, Sums
from flash_allreduce_plugin.quality.widths import SiteWidth

KINDS: list[Callable[[], SiteBits]] = [
    lambda: SiteWidth("site", 4, 18.0, symmetric=False),
    lambda: SiteGuard("site", 4, 18.0, symmetric=False),
]


def measured(error: float) -> Tensor:
    """Return one run with this error."""
    return sample.alone(torch.ones(1, dtype=torch.float64), torch.tensor([error], dtype=torch.float64))


def test_sums_are_taken_once() -> None:
    sums = Sums()
    sums.add(measured(0.5))
    sums.add(measured(0.25))
    assert sample.fold(sums.take()) == (2.0, 0.75)
    assert sample.fold(sums.take()) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("make", KINDS)
def test_one_measurement_that_is_not_finite_cancels_the_whole_decision(
    make: Callable[[], SiteBits], bad: float
) -> None:
    site, before = make(), make().state_dict()
    site.record(4, measured(1.0))  # 0 dB: more bits, from this measurement alone
    site.record(4, measured(bad))
    site.update(*sample.fold(site.take()), call=1, log=False)
    assert site.state_dict() == before


@pytest.mark.parametrize("make", KINDS)
def test_a_run_resumes_from_the_state_that_it_saved(make: Callable[[], SiteBits]) -> None:
    site, other = make(), make()
    for call in range(7):
        site.update(*((1.0, 1.0) if call < 3 else (1e6, 1.0)), call=call, log=False)
    site.record(site.bits, measured(0.5))
    assert site.state_dict() != other.state_dict()
    other.load_state_dict(site.state_dict())
    assert other.state_dict() == site.state_dict() and other.bits == site.bits
    assert torch.equal(other.take(), site.take())


@pytest.mark.parametrize("make", KINDS)
def test_the_sums_of_an_earlier_version_are_one_run(make: Callable[[], SiteBits]) -> None:
    site = make()
    site.load_state_dict({**site.state_dict(), "measured": [8.0, 2.0]})
    assert sample.fold(site.take()) == (1.0, 0.25)
    assert site.state_dict()["measured"] == []
