"""Guarantee 4: a GPU encodes and decodes the bits of the CPU's codec and of reference.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from flash_allreduce_plugin.codec import reference, rows
from flash_allreduce_plugin.codec.format import Format
from tests.codecs import BITS, DTYPES, GROUP_SIZES, fits, gaussian, hard_values, same_bits
from tests.feedback import KINDS
from tests.gpu import device
from tests.gpu.cases import DRAW, NAMES, OPTIONS, check, check_feedback, encoded
from tests.gpu.device import DEVICE, EVERY, compiled

device.need_device()

# Around a warp's 1024 elements and a block's 8192.
LENGTHS = (1, 33, 1000, 1023, 1024, 1025, 2100, 8191, 8192, 8193, 20_001)
SOME = (
    Format(8, 128),
    Format(4, 64, compact=True),
    Format(3, 32, symmetric=True),
    Format(2, 256, spikes=True, mse=True),
    Format(5, 1024, hadamard=True),
    Format(6, 512, stochastic=True),
    Format(4, 256, codebook=True),
    Format(2, 128, codebook=True, mse=True),
    Format(6, 128, codebook=True, spikes=True),
    Format(3, 512, codebook=True, spikes=True, hadamard=True),
)


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_every_option_width_and_group_size(options: dict[str, bool]) -> None:
    hard = torch.stack(list(hard_values(1100).values()))
    lengths = itertools.cycle(LENGTHS)
    sizes = [g for g in GROUP_SIZES if fits(g, options)]
    for i, (bits, group_size, dtype) in enumerate(itertools.product(BITS, sizes, DTYPES)):
        if i % EVERY:
            continue
        c, other = Format(bits, group_size, **options), DTYPES[i // 7 % 3]
        check(gaussian(3, next(lengths), seed=i).to(dtype), c, other, 2 + i % 7)
        first = i % (len(hard) - 3)
        check(hard[first : first + 3].to(dtype), c, other, 2 + (i + 3) % 7)


# The kernels of csrc/cuda/codec.cu: of the presets, and widths in groups of 128.
KNOWN = (
    Format(8, 256, codebook=True, spikes=True),
    *(Format(bits, 128, codebook=True, spikes=True) for bits in (6, 4, 2)),
    Format(6, 128, stochastic=True),
    *(Format(bits, 128) for bits in BITS),
)


@pytest.mark.parametrize("c", KNOWN, ids=str)
def test_forms_that_the_compiler_knows(c: Format) -> None:
    """Use rows at addresses that 16 divides: whole groups, a ragged group and a ragged block."""
    for dtype, numel in itertools.product(DTYPES, (1024, 8200, 20_008)):
        check(gaussian(3, numel, seed=numel).to(dtype), c, dtype, c.bits)
    hard = torch.stack(list(hard_values(1104).values()))
    check(hard[:3], c, DTYPES[1], c.bits)


@pytest.mark.parametrize("c", SOME, ids=str)
def test_the_reference_says_the_same(c: Format) -> None:
    for dtype in DTYPES:
        x_rows = torch.cat([gaussian(2, 1100), torch.stack(list(hard_values(1100).values()))[::3]]).to(dtype)
        payload = torch.empty(len(x_rows), c.payload_bytes(1100), dtype=torch.uint8)
        reference.encode(x_rows, payload, c, DRAW)
        assert torch.equal(device.encode(x_rows.to(DEVICE), c, DRAW), payload), dtype
        decoded = torch.empty_like(x_rows)
        reference.decode(payload, decoded, c)
        assert same_bits(device.decode(payload.to(DEVICE), 1100, dtype, c), decoded), dtype


@pytest.mark.parametrize("c", SOME, ids=str)
def test_so_does_the_reference_on_the_device(c: Format) -> None:
    """Run with FLASH_ALLREDUCE_REFERENCE=1: torch's own CUDA arithmetic, in the same order."""
    x_rows = gaussian(3, 2311).bfloat16()
    payload = torch.empty(3, c.payload_bytes(2311), dtype=torch.uint8, device=DEVICE)
    reference.encode(x_rows.to(DEVICE), payload, c, DRAW)
    assert torch.equal(payload.cpu(), encoded(x_rows, c))
    total, expected = torch.empty(2311, device=DEVICE), torch.empty(2311)
    reference.decode_sum(payload, total, c, 1 / 3)
    rows.decode_sum(payload.cpu(), expected, c, 1 / 3)
    assert same_bits(total.cpu(), expected)


@pytest.mark.parametrize("seed", range(12))
def test_any_bit_pattern(seed: int) -> None:
    """Encode every kind of NaN, infinities and subnormals; then decode any bytes as a payload."""
    generator = torch.Generator().manual_seed(seed)
    options, dtype = OPTIONS[seed * 3 % len(OPTIONS)], DTYPES[seed % 3]
    sizes = [g for g in GROUP_SIZES if fits(g, options)]
    c = Format(BITS[seed % 7], sizes[seed % len(sizes)], **options)
    bits = torch.randint(0, 256, (3, 9000 * dtype.itemsize), generator=generator, dtype=torch.uint8)
    check(bits.view(dtype), c, DTYPES[(seed + 1) % 3], 4)
    payloads = torch.randint(0, 256, (3, c.payload_bytes(9000)), generator=generator, dtype=torch.uint8)
    expected = torch.empty(9000)
    rows.decode_sum(payloads, expected, c, 1.0)
    assert same_bits(device.decode_sum(payloads.to(DEVICE), 9000, torch.float32, c, 1.0), expected)


@pytest.mark.parametrize("c", SOME, ids=str)
def test_strides_and_addresses_of_any_alignment(c: Format) -> None:
    """Use rows with gaps between them that begin anywhere, and payloads at odd addresses."""
    for dtype, numel in itertools.product(DTYPES, (999, 8192)):
        wide = gaussian(3, numel + 40).to(dtype)
        for start, width in ((0, numel + 40), (1, numel + 1), (8, numel + 9), (3, numel + 8)):
            frame = wide[:, :width].contiguous().to(DEVICE)
            x_rows = frame[:, start : start + numel]
            expected = encoded(x_rows.cpu(), c)
            for offset, gap in ((0, 0), (1, 0), (2, 6), (4, 1), (16, 16)):
                ours = device.encode(x_rows, c, DRAW, offset, gap)
                assert torch.equal(ours, expected), f"rows from {start} of {width}, payload + {offset}, gap {gap}"
        decoded, total = torch.empty(3, numel, dtype=dtype), torch.empty(numel, dtype=dtype)
        rows.decode(expected, decoded, c)
        rows.decode_sum(expected, total, c, 1.0)
        sent = torch.empty(c.payload_bytes(numel), dtype=torch.uint8)
        rows.decode_sum_encode(expected, sent, c, c, 1.0, DRAW)
        for offset, gap in ((0, 0), (1, 0), (2, 6), (4, 1), (16, 16)):
            where = f"payload + {offset}, gap {gap}"
            held = torch.zeros(offset + 3 * (expected.shape[1] + gap), dtype=torch.uint8, device=DEVICE)
            payloads = held[offset:].view(3, -1)[:, : expected.shape[1]]
            payloads.copy_(expected)
            shift = offset * dtype.itemsize  # of the output: a multiple of its elements
            assert same_bits(device.decode(payloads, numel, dtype, c, shift, gap), decoded), where
            assert same_bits(device.decode_sum(payloads, numel, dtype, c, 1.0, shift), total), where
            assert torch.equal(device.decode_sum_encode(payloads, c, c, 1.0, DRAW, offset), sent), where


@pytest.mark.parametrize("c", SOME, ids=str)
def test_feedback_at_addresses_of_any_alignment(c: Format) -> None:
    for dtype, numel, kind in itertools.product(DTYPES, (999, 20_001), KINDS):
        x = gaussian(3, numel, seed=2).to(dtype)
        x[:, 5::7] = 0.0
        for offset in (0, 1, 2, 4):
            check_feedback(x, encoded(x, c), c, c, kind, offset=offset)


def test_many_rows() -> None:
    x_rows = gaussian(3000, 130)
    c = Format(4, 32, stochastic=True)
    expected = encoded(x_rows, c)
    assert torch.equal(device.encode(x_rows.to(DEVICE), c, DRAW), expected)
    decoded = torch.empty_like(x_rows)
    rows.decode(expected, decoded, c)
    assert same_bits(device.decode(expected.to(DEVICE), 130, torch.float32, c), decoded)


@pytest.mark.parametrize("shape", [(0, 100), (3, 0), (0, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    c = Format(4, 64)
    x = torch.empty(shape, device=DEVICE)
    payload = device.encode(x, c)
    assert payload.shape == (shape[0], c.payload_bytes(shape[1]))
    assert device.decode(payload.to(DEVICE), shape[1], torch.float32, c).shape == shape
    nothing = torch.empty(3, 0, dtype=torch.uint8, device=DEVICE)
    assert device.decode_sum(nothing, 0, torch.float32, c, 1.0).numel() == 0
    assert device.decode_sum_encode(nothing, c, c, 1.0).numel() == 0


def test_the_functions_of_the_codec_take_the_operators() -> None:
    """Check the functions that the collectives call on tensors of the device: not the reference."""
    assert rows._is_compiled(torch.empty(1, device=DEVICE))
    x, c = gaussian(1, 5003), Format(4, 128)
    payload = torch.empty(1, c.payload_bytes(5003), dtype=torch.uint8, device=DEVICE)
    rows.encode(x.to(DEVICE), payload, c)
    assert torch.equal(payload.cpu(), encoded(x, c))
    decoded, expected = torch.empty(1, 5003, device=DEVICE), torch.empty(1, 5003)
    rows.decode(payload, decoded, c)
    rows.decode(payload.cpu(), expected, c)
    assert same_bits(decoded.cpu(), expected)


def test_arguments_that_are_refused() -> None:
    x, payload = torch.zeros(1, 100, device=DEVICE), torch.zeros(1, 72, dtype=torch.uint8, device=DEVICE)
    for arguments, message in (
        ((x, payload, 9, 64, 0), "bits is 9"),
        ((x, payload, 4, 48, 0), "group_size is 48"),
        ((x.double(), payload, 4, 64, 0), "unsupported dtype"),
        ((x, payload[:, 1:], 4, 64, 0), "has 71 bytes a row; expected 72"),
    ):
        with pytest.raises(RuntimeError, match=message):
            compiled.encode(*arguments)
    payload, residual = payload[:, :72], torch.zeros(2, 66, dtype=torch.uint8, device=DEVICE)
    for arguments, message in (
        ((x, payload, residual[:1], 0.8, 4, 64, 0), "residual is not"),
        ((x, payload, residual.short(), 0.8, 4, 64, 0), "residual is neither"),
        ((x, payload, residual, 1.0, 4, 64, 0), "momentum is 1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            compiled.encode_feedback(*arguments)
    if DEVICE.type == "cuda":
        with pytest.raises(RuntimeError):
            compiled.encode(x, payload.cpu(), 4, 64, 0)
        with pytest.raises(RuntimeError):
            compiled.encode_feedback(x, payload, residual.cpu(), 0.8, 4, 64, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@device.needs_cuda
def test_above_2_to_the_31_elements() -> None:
    """Use 20 GB of a GPU's memory. The tensor repeats one block, so that the block alone gives the result."""
    block, count, c = gaussian(1 << 20).bfloat16(), (1 << 11) + 1, Format(2, 128)
    expected = encoded(block.view(1, -1), c, device.NO_DRAW)[0].to(DEVICE)
    x = block.to(DEVICE).repeat(count).view(1, -1)
    payload = torch.empty(1, c.payload_bytes(x.numel()), dtype=torch.uint8, device=DEVICE)
    compiled.encode(x, payload, 2, 128, 0)
    for row in payload.view(count, -1).split(256):
        assert torch.equal(row, expected.expand_as(row))
    decoded = torch.empty(1, len(block), dtype=torch.bfloat16)
    rows.decode(expected.cpu().view(1, -1), decoded, c)
    value = decoded[0].view(torch.int16).to(DEVICE)
    x.zero_()
    compiled.decode(payload, x, 2, 128, 0)
    for x_rows in x.view(torch.int16).view(count, -1).split(256):
        assert torch.equal(x_rows, value.expand_as(x_rows))
    x.zero_()
    compiled.decode_sum(payload.expand(2, -1), x[0], 0.5, 2, 128, 0)
    for x_rows in x.view(torch.int16).view(count, -1).split(256):
        assert torch.equal(x_rows, value.expand_as(x_rows))
