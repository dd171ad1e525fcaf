"""Error feedback by the reference. The fused operators must equal it, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import reference, rows
from flash_allreduce_plugin.codec.format import NO_DRAW, Draw, Format
from tests.codecs import GROUP_SIZES

OWN = {g: Format(8, g, symmetric=True) for g in GROUP_SIZES}
KINDS = (torch.uint8, torch.bfloat16)


def sum_format(c: Format) -> Format:
    """Return the format in which a sum is encoded again: without rotation, unless short spikes need it."""
    return c if c.codebook and c.spikes else replace(c, hadamard=False)


def composed(x: Tensor, residual: Tensor, momentum: float, c: Format, draw: Draw = NO_DRAW) -> tuple[Tensor, Tensor]:
    """Encode x [numel] by the reference. Return the payload and the new residual; residual keeps its value."""
    payload, after = torch.empty(1, c.payload_bytes(len(x)), dtype=torch.uint8), residual.clone()
    reference.encode_feedback(x.view(1, -1), payload, after, momentum, c, draw)
    return payload[0], after


def residual_like(lost: Tensor, c: Format, kind: torch.dtype) -> Tensor:
    """Return lost [numel] as a residual of whole groups."""
    filled = torch.zeros(c.groups(len(lost)), c.group_size)
    filled.view(-1)[: len(lost)] = lost
    if kind is torch.bfloat16:
        return filled.bfloat16()
    records = torch.empty(len(filled), OWN[c.group_size].record_bytes, dtype=torch.uint8)
    rows.encode(filled.view(1, -1), records.view(1, -1), OWN[c.group_size])
    return records
