"""Codecs and inputs, and one comparison of everything the device does with what the CPU does."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw, Format
from tests.codecs import CODEBOOK, LAYOUTS, same_bits
from tests.gpu import device

DRAW = Draw(rows.draw_key(3, 5), first_group=7, groups_a_row=11)
OPTIONS = [
    {**layout, "spikes": spikes, "hadamard": hadamard, **last}
    for layout, spikes, hadamard in itertools.product(LAYOUTS, (False, True), (False, True))
    for last in ({}, {"mse": True}, {"stochastic": True})
] + [{**CODEBOOK, "hadamard": on, "mse": mse} for on, mse in itertools.product((False, True), (False, True))]
NAMES = ["+".join(name for name, on in options.items() if on) or "plain" for options in OPTIONS]


def encoded(x: Tensor, c: Format, draw: Draw = DRAW) -> Tensor:
    """On the CPU."""
    payload = torch.empty(len(x), c.payload_bytes(x.shape[1]), dtype=torch.uint8)
    rows.encode(x, payload, c, draw)
    return payload


def check(x: Tensor, c: Format, dtype: torch.dtype, gather_bits: int) -> None:
    """x [ranks, numel] on the CPU, through the four operators on the device; dtype: of what is decoded."""
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
