"""Error feedback out of the codec's own operators and torch's: what the fused operators are held to, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import NO_DRAW, Draw, Format
from tests.codecs import GROUP_SIZES

OWN = {g: Format(8, g, symmetric=True) for g in GROUP_SIZES}
KINDS = (torch.uint8, torch.bfloat16)


def composed(x: Tensor, residual: Tensor, momentum: float, c: Format, draw: Draw = NO_DRAW) -> tuple[Tensor, Tensor]:
    """x [numel] -> the payload and the new residual, by the codec's operators and torch's, one rounding a line."""
    row, own, numel = x.view(1, -1), OWN[c.group_size], len(x)
    carried, arrives = torch.empty(1, numel), torch.empty(1, numel)
    if residual.dtype is torch.uint8:
        rows.decode(residual.view(1, -1), carried, own)
    else:
        carried.copy_(residual.view(1, -1)[:, :numel])
    is_zero = row == 0
    sent = (carried + row).masked_fill(is_zero, 0.0)
    payload = torch.empty(1, c.payload_bytes(numel), dtype=torch.uint8)
    rows.encode(sent, payload, c, draw)
    rows.decode(payload, arrives, c)
    now = (sent - arrives).masked_fill(is_zero & ~arrives.isnan(), 0.0)
    now = now * (1 - momentum)
    stays = torch.where(is_zero, carried, carried * momentum)
    lost = (now + stays).nan_to_num(0.0, 0.0, 0.0)
    after = torch.empty_like(residual).view(1, -1)
    if residual.dtype is torch.uint8:
        rows.encode(lost, after, own)
    else:
        after[:, numel:] = lost[:, (numel - 1) // c.group_size * c.group_size]
        after[:, :numel] = lost
    return payload[0], after.view_as(residual)


def residual_like(lost: Tensor, c: Format, kind: torch.dtype) -> Tensor:
    """lost [numel], as a residual of whole groups."""
    filled = torch.zeros(c.groups(len(lost)), c.group_size)
    filled.view(-1)[: len(lost)] = lost
    if kind is torch.bfloat16:
        return filled.bfloat16()
    records = torch.empty(len(filled), OWN[c.group_size].record_bytes, dtype=torch.uint8)
    rows.encode(filled.view(1, -1), records.view(1, -1), OWN[c.group_size])
    return records
