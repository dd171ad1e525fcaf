"""Guarantee 5 above 2^31 elements: minutes and up to 13 GB of memory, so only `nox -s test-slow` runs it.

The tensors repeat one block, so that the result is known from the block alone and needs no second copy.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec.format import Format
from tests import simulation
from tests.codecs import gaussian, same_bits
from tests.distributed import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK = 1 << 20
NUMEL = (1 << 31) + 5
CONFIG = fap.FlashConfig(bits=4)
CODEC = Format(4, 128)


def block_of(rank: int) -> Tensor:
    return gaussian(BLOCK, seed=rank).bfloat16()


def repeated(block: Tensor) -> Tensor:
    x = torch.empty(NUMEL, dtype=block.dtype)
    x[: NUMEL // BLOCK * BLOCK].view(-1, BLOCK).copy_(block)
    x[NUMEL // BLOCK * BLOCK :] = block[: NUMEL % BLOCK]
    return x


def is_repeated(x: Tensor, block: Tensor, tail: Tensor) -> bool:
    rows = x[: NUMEL // BLOCK * BLOCK].view(-1, BLOCK)
    return all(same_bits(row, block) for row in rows) and same_bits(x[rows.numel() :], tail)


def test_guarantee_5_encode_and_decode_above_2_to_the_31_elements() -> None:
    block = block_of(0)
    x = repeated(block)
    payload = fap.encode(x, CONFIG)
    del x
    assert payload.numel() == fap.payload_bytes(NUMEL, CONFIG)
    expected, tail = fap.encode(block, CONFIG), fap.encode(block[: NUMEL % BLOCK], CONFIG)
    rows = payload[: NUMEL // BLOCK * len(expected)].view(-1, len(expected))
    assert (rows == expected).all() and torch.equal(payload[rows.numel() :], tail)
    decoded = fap.decode(payload, (NUMEL,), torch.bfloat16, CONFIG)
    assert is_repeated(
        decoded,
        fap.decode(expected, (BLOCK,), torch.bfloat16, CONFIG),
        fap.decode(tail, (NUMEL % BLOCK,), torch.bfloat16, CONFIG),
    )


def large_all_reduce() -> bool:
    world = dist.get_world_size()
    x = repeated(block_of(dist.get_rank()))
    fap.all_reduce(x, config=CONFIG)
    blocks = [block_of(rank) for rank in range(world)]
    return is_repeated(
        x,
        simulation.all_reduce(blocks, 1.0, CODEC, CODEC),
        simulation.all_reduce([b[: NUMEL % BLOCK] for b in blocks], 1.0, CODEC, CODEC),
    )


def test_guarantee_5_all_reduce_above_2_to_the_31_elements() -> None:
    assert run_ranks(2, large_all_reduce, timeout=600) == [True, True]
