"""Which elements of a call are measured, and the number in dB that follows from them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import sample
from flash_allreduce_plugin.collectives.meter import decoded_from
from flash_allreduce_plugin.collectives.sample import MOST, RUN, RUNS, Sample
from flash_allreduce_plugin.telemetry import counters
from tests.codecs import gaussian, sqnr_db

CPU = torch.device("cpu")


def quality_db(exact: Tensor, result: Tensor) -> float:
    return counters.sqnr_db(*sample.fold(sample.compare(exact.flatten(), result.flatten())))


def rounded(x: Tensor, **fields: object) -> Tensor:
    config = fap.FlashConfig(**fields)  # type: ignore[arg-type]
    return decoded_from(x.view(1, -1), config.format(config.bits)).view(x.shape)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [32, 128, 1024])
def test_gaussian_values_have_the_sqnr_of_the_whole_tensor(bits: int, group_size: int) -> None:
    x = gaussian(300 * RUN + 77)
    result = rounded(x, bits=bits, group_size=group_size)
    assert quality_db(x, result) == pytest.approx(sqnr_db(x, result), abs=0.1)


def dominated(tokens: int, seed: int = 0) -> Tensor:
    """Return tokens: the first has all the energy; each group of the others has an outlier, which 4 bits ruin."""
    x = gaussian(tokens, RUN, seed=seed)
    x[:, ::128] = 60.0
    x[0] = 1e4 * gaussian(RUN, seed=seed + 1000)
    return x


def test_one_token_with_all_the_energy_hides_no_others() -> None:
    x = dominated(64)
    result = rounded(x, bits=4)
    rest = sqnr_db(x[1:], result[1:])
    assert sqnr_db(x, result) > 19 and rest < 16
    assert quality_db(x, result) == pytest.approx(rest, abs=0.5)


def test_runs_without_energy_do_not_count() -> None:
    x = gaussian(8, RUN)
    result = rounded(x, bits=4)
    mixed, zeros = torch.cat([x, torch.zeros(100, RUN)]), torch.zeros(100, RUN)
    assert sample.fold(sample.compare(mixed.flatten(), torch.cat([result, zeros]).flatten()))[0] == 8
    assert quality_db(mixed, torch.cat([result, zeros])) == pytest.approx(quality_db(x, result), abs=1e-4)
    assert sample.fold(sample.compare(zeros.flatten(), zeros.flatten())) == (0.0, 0.0)


def test_a_run_whose_terms_cancel_does_not_outweigh_all_others() -> None:
    x = torch.ones(10, RUN)
    x[3] = 1e-20
    assert sample.fold(sample.compare(x.flatten(), torch.ones(10 * RUN))) == (10.0, MOST)
    assert sample.fold(sample.alone(torch.tensor([-1.0, 1.0]), torch.tensor([2.0, 0.5]))) == (2.0, MOST + 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_run_that_is_not_finite_makes_the_measurement_so(bad: float) -> None:
    x = gaussian(4, RUN)
    result = x.clone()
    result[2, 5] = bad
    assert all(map(math.isnan, sample.fold(sample.compare(x.flatten(), result.flatten()))))


def numbers(chosen: Sample, groups: int) -> list[int]:
    found = chosen.of(0, groups, 1, 0, CPU)
    assert found is not None
    return found.group.tolist()


@pytest.mark.parametrize("group_size", [32, 512, 1024])
def test_a_long_call_is_measured_at_one_run_in_each_stretch(group_size: int) -> None:
    a_run, groups = max(1, RUN // group_size), 100_003
    found = numbers(Sample(groups, group_size, 7), groups)
    assert len(found) == RUNS * a_run and found == sorted(set(found)) and found[-1] < groups
    stretch = groups / RUNS
    assert all(i * stretch - a_run <= found[i * a_run] < (i + 1) * stretch + a_run for i in range(RUNS))
    assert found == numbers(Sample(groups, group_size, 7), groups)
    assert found != numbers(Sample(groups, group_size, 8), groups)


def test_a_short_call_is_measured_at_all_its_groups() -> None:
    assert numbers(Sample(511, 128, 3), 511) == list(range(511))


def test_pieces_of_a_call_find_the_groups_of_the_whole() -> None:
    """Measure pieces like the rows of a reduce-scatter, of 5 shards in chunks of 700 groups."""
    shard, chosen = 2100, Sample(5 * 2100, 128, 3)
    found = []
    for first in range(0, shard, 700):
        here = chosen.of(first, 700, 5, shard, CPU)
        assert here is not None
        number = here.row * shard + first + here.group
        assert torch.equal(here.run, torch.bucketize(number, torch.tensor(numbers(chosen, 5 * shard))) // (RUN // 128))
        found += number.tolist()
    assert sorted(found) == numbers(chosen, 5 * shard)
    assert chosen.of(numbers(chosen, 5 * shard)[4] - 1, 1, 1, 0, CPU) is None
