"""Small messages between the ranks of a group: sums of numbers, names, configurations."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.collectives.transport import Label

MOST_TEXT = 1 << 20  # most bytes that a rank sends, for any length that a peer asks for


def gather(mine: bytes, label: Label, device: torch.device, doing: str = "gathering the configurations") -> list[bytes]:
    """Return `mine` of every rank, in rank order. All must have one length."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    received: Tensor = sent.new_empty(label.group.size() * sent.numel())
    transport.all_gather(received, sent, label, doing).wait()
    return [bytes(row) for row in received.view(label.group.size(), -1).tolist()]


def add_up(mine: Tensor, label: Label, device: torch.device) -> Tensor:
    """Return the sums over the ranks of the label's group, float64, added in rank order: the same bits on every rank.

    mine: float64, on the CPU. device: of the messages.
    """
    sent = mine.reshape(-1).view(torch.uint8).to(device)
    received = sent.new_empty(label.group.size() * sent.numel())
    transport.all_gather(received, sent, label, "adding up errors").wait()
    total = torch.zeros_like(mine)
    for one in received.cpu().view(torch.float64).view(-1, *mine.shape):
        total += one
    return total


def gather_json(
    mine: Mapping[str, Any], label: Label, doing: str, device: torch.device | None = None
) -> list[dict[str, Any]]:
    """Return `mine`, a value that JSON can hold, of every rank of the label's group, in rank order.

    device: of the messages; None: the CPU if the group has a backend for it, else the current GPU.
    """
    device = _device_of(label) if device is None else device
    text = json.dumps(mine).encode()
    said = max(struct.unpack("<Q", n)[0] for n in gather(struct.pack("<Q", len(text)), label, device, doing))
    longest = min(MOST_TEXT, said)
    return [json.loads(t.rstrip(b"\0")) for t in gather(text[:longest].ljust(longest, b"\0"), label, device, doing)]


def _device_of(label: Label) -> torch.device:
    try:
        label.group._get_backend(device := torch.device("cpu"))
    except RuntimeError:
        return torch.device("cuda", torch.cuda.current_device())
    return device
