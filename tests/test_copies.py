"""Ranges of what is copied, without any ranks."""

from __future__ import annotations

import itertools
import random

import torch

from flash_allreduce_plugin import copies


def test_a_gradient_that_is_partly_in_a_bucket_counts_in_part() -> None:
    memory = torch.zeros(100)
    gradients = [memory[90:100], memory[5:15], memory[30:40], memory[60:60]]
    assert copies.within(gradients, memory[10:50]) == [(0, 5), (20, 30)]
    assert copies.within(gradients, memory[50:80]) == []
    assert copies.within([torch.zeros(10**6, dtype=torch.bfloat16)], memory) == []


def test_ranges_move_with_their_segments() -> None:
    chosen = random.Random(5)
    for _ in range(200):
        borders = [0, *sorted(chosen.sample(range(1, 60), 6)), 60]
        segments = list(itertools.pairwise(borders))
        chosen.shuffle(segments)
        ends = sorted(chosen.sample(range(61), 8))
        ranges = list(zip(ends[::2], ends[1::2], strict=True))
        marked = torch.zeros(60, dtype=torch.bool)
        for first, last in ranges:
            marked[first:last] = True
        expected = torch.cat([marked[first:last] for first, last in segments])
        found = torch.zeros_like(marked)
        for first, last in copies.moved(ranges, segments):
            assert not found[first:last].any() and first < last
            found[first:last] = True
        assert torch.equal(found, expected)
