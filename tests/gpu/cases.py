"""Codecs and inputs, and one comparison of everything the device does with the CPU's result."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw, Format
from tests.codecs import CODEBOOK, LAYOUTS, gaussian, same_bits
from tests.feedback import KINDS, composed, residual_like, sum_format
from tests.gpu import device

DRAW = Draw(rows.draw_key(3, 5), first_group=7, groups_a_row=11)
OPTIONS = [
    {**layout, "spikes": spikes, "hadamard": hadamard, **last}
    for layout, spikes, hadamard in itertools.product(LAYOUTS, (False, True), (False, True))
    for last in ({}, {"mse": True}, {"stochastic": True})
] + [
    {**CODEBOOK, "spikes": spikes, "hadamard": hadamard, "mse": mse}
    for spikes, hadamard, mse in itertools.product((False, True), repeat=3)
]
NAMES = ["+".join(name for name, on in options.items() if on) or "plain" for options in OPTIONS]


def encoded(x: Tensor, c: Format, draw: Draw = DRAW) -> Tensor:
    """Encode on the CPU."""
    payload = torch.empty(len(x), c.payload_bytes(x.shape[1]), dtype=torch.uint8)
    rows.encode(x, payload, c, draw)
    return payload


def check(x: Tensor, c: Format, dtype: torch.dtype, gather_bits: int) -> None:
    """Run x [ranks, numel] of the CPU through the operators on the device; dtype: of the decoded tensor."""
    numel, what = x.shape[1], f"{c}, {x.dtype} [{len(x)}, {x.shape[1]}] -> {dtype}"
    payloads = encoded(x, c)
    ours = device.encode(x.to(device.DEVICE), c, DRAW)
    differing = (ours != payloads).nonzero()
    assert not len(differing), f"encode, {what}: {len(differing)} bytes, the first at {differing[:4].tolist()}"
    there = payloads.to(device.DEVICE)

    decoded = torch.empty(len(x), numel, dtype=dtype)
    rows.decode(payloads, decoded, c)
    assert same_bits(device.decode(there, numel, dtype, c), decoded), f"decode, {what}"

    total = torch.empty(numel, dtype=dtype)
    rows.decode_sum(payloads, total, c, 1 / 3)
    assert same_bits(device.decode_sum(there, numel, dtype, c, 1 / 3), total), f"decode_sum, {what}"

    gather = replace(c, bits=gather_bits)
    sent = torch.empty(c.groups(numel) * gather.record_bytes, dtype=torch.uint8)
    rows.decode_sum_encode(payloads, sent, c, gather, 0.5, DRAW)
    ours = device.decode_sum_encode(there, c, gather, 0.5, DRAW)
    assert torch.equal(ours, sent), f"decode_sum_encode to {gather_bits} bits, {what}"

    if numel:
        check_feedback(x, payloads, c, gather, KINDS[(c.bits + numel) % 2])


def check_feedback(
    x: Tensor, payloads: Tensor, c: Format, gather: Format, kind: torch.dtype, momentum: float = 0.8, offset: int = 0
) -> None:
    """Check feedback of the first row, then of the sum of all. offset: bytes by which outputs miss 64."""
    what = f"{c}, {x.dtype} [{len(x)}, {x.shape[1]}], a residual of {kind}, + {offset}"
    residual = residual_like(0.1 * gaussian(x.shape[1], seed=1), c, kind)
    row = x[:1].clone()
    row[:, 3::8] = 0.0  # these keep their earlier errors
    expected = composed(row[0], residual, momentum, c, DRAW)
    ours = device.encode_feedback(row.to(device.DEVICE), residual, momentum, c, DRAW, offset)
    for name, mine, theirs in zip(("payload", "residual"), ours, expected, strict=True):
        assert same_bits(mine, theirs), f"encode_feedback, {what}: the {name}"
    plain, left = sum_format(c), sum_format(gather)
    sums = torch.empty(len(residual) * c.group_size)
    rows.decode_sum(payloads, sums, plain, 0.5)
    expected = composed(sums, residual, momentum, left, DRAW)
    ours = device.decode_sum_encode_feedback(
        payloads.to(device.DEVICE), residual, c, gather, 0.5, momentum, DRAW, offset
    )  # fmt: skip
    for name, mine, theirs in zip(("payload", "residual"), ours, expected, strict=True):
        assert same_bits(mine, theirs), f"decode_sum_encode_feedback to {gather.bits} bits, {what}: the {name}"
