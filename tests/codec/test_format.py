"""Sizes of a payload: codec/format.py against the compiled library, and the promises about metadata."""

from __future__ import annotations

import pytest
import torch

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import format, ops
from flash_allreduce_plugin.codec.format import GROUP_SIZES, MAX_BITS, MIN_BITS, Format
from tests.codecs import LAYOUTS

CODECS = [
    Format(bits, group_size, **layout, spikes=spikes)
    for bits in range(MIN_BITS, MAX_BITS + 1)
    for group_size in GROUP_SIZES
    for layout in LAYOUTS
    for spikes in (False, True)
] + [
    Format(bits, group_size, codebook=True, spikes=spikes)
    for bits in (2, 3, 4, 8)
    for group_size in GROUP_SIZES[2:]
    for spikes in (False, True)
]
NUMELS = (0, 1, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025, 999_983, (1 << 31) + 5, 1 << 40)

needs_library = pytest.mark.skipif(ops.unavailable is not None, reason=str(ops.unavailable))


@needs_library
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_sizes_are_those_of_the_compiled_library(codec: Format) -> None:
    for numel in NUMELS:
        compiled = torch.ops.flash_allreduce.payload_bytes(numel, codec.bits, codec.group_size, codec.options)
        assert codec.payload_bytes(numel) == compiled


@needs_library
def test_the_library_writes_this_wire_version() -> None:
    assert torch.ops.flash_allreduce.wire_version() == format.WIRE_VERSION


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_metadata_takes_4_bytes_a_group_or_2_symmetric_or_compact_8_codebook_and_spikes_6_or_8_more_or_4(
    codec: Format,
) -> None:
    overhead = codec.record_bytes - codec.group_size * codec.bits // 8
    spikes = (4 if codec.codebook else 6 if codec.group_size <= 256 else 8) if codec.spikes else 0
    front = 8 if codec.codebook else 2 if codec.symmetric or codec.compact else 4
    assert overhead == codec.metadata_bytes == front + spikes
    assert codec.bits_per_element == codec.bits + 8 * overhead / codec.group_size


def test_int4_in_groups_of_128_takes_4_25_bits() -> None:
    assert Format(4, 128).bits_per_element == 4.25
    assert Format(4, 128, symmetric=True).bits_per_element == 4.125
    assert Format(4, 64, compact=True).bits_per_element == 4.25


@pytest.mark.parametrize("numel", NUMELS)
def test_a_ragged_group_is_sent_whole(numel: int) -> None:
    codec = Format(5, 64)
    assert codec.groups(numel) == (numel + 63) // 64
    assert codec.payload_bytes(numel) == codec.groups(numel) * (4 + 64 * 5 // 8)


def test_payload_bytes_of_a_configuration() -> None:
    config = fap.FlashConfig(bits=3, group_size=256, symmetric=True)
    assert fap.payload_bytes(1000, config) == Format(3, 256, True).payload_bytes(1000) == 4 * (2 + 96)
