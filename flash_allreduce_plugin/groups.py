"""What is remembered of a process group, and the agreement of its ranks about the configuration.

Everything here dies with the group.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import hierarchy, run_log, switches, transport
from flash_allreduce_plugin.adaptive import SiteWidth, Sums
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import MismatchError
from flash_allreduce_plugin.guard import SiteGuard
from flash_allreduce_plugin.hierarchy import Nodes
from flash_allreduce_plugin.transport import BufferPool, Label
from flash_allreduce_plugin.wire import WIRE_VERSION


class GroupState:
    """Buffers, agreed configurations and call counters of one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        #: quantized calls of a site on this group; the same on all its ranks
        self.calls: Counter[str] = Counter()
        #: calls of the group that were rounded stochastically; the same on all its ranks
        self.draws = 0
        #: the ranks of every host, once they were asked for
        self.hosts: Nodes | None = None
        #: of a site under a configuration, where it adapts
        self._widths: dict[tuple[str, FlashConfig], SiteWidth] = {}
        #: of a site under a configuration, where it is guarded
        self._guards: dict[tuple[str, FlashConfig], SiteGuard] = {}
        #: of a site: what was measured locally, and the ranks have not added up yet
        self._errors: dict[str, Sums] = {}
        self._pools: dict[tuple[torch.device, int], BufferPool] = {}
        #: (reason, bytes sent) of calls that went in full precision and will again; what the ids in a key name is kept
        #: beside it
        self.plain: dict[tuple[Any, ...], tuple[str, int, Any]] = {}
        self._agreed: set[tuple[FlashConfig, bool]] = set()
        self._last: tuple[FlashConfig, bool] | None = None  # of them: spares a call of the same object its hash

    def pool(self, device: torch.device) -> BufferPool:
        """The buffers of the current stream: what is given back before it was read is used again behind that."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return self._pools.setdefault((device, stream), BufferPool(device))

    def width(self, site: str, config: FlashConfig, bits: int) -> SiteWidth:
        """The width of a site, which starts at `bits`."""
        width = self._widths.get((site, config))
        if width is None:
            assert config.target_sqnr_db is not None
            width = self._widths[site, config] = SiteWidth(site, bits, config.target_sqnr_db, config.symmetric)
        return width

    def guard(self, site: str, config: FlashConfig, bits: int) -> SiteGuard:
        """The guard of a site, whose calls have `bits` or more as they are configured."""
        guard = self._guards.get((site, config))
        if guard is None:
            assert config.min_sqnr_db is not None
            guard = self._guards[site, config] = SiteGuard(site, bits, config.min_sqnr_db, config.symmetric)
        return guard

    def error(self, site: str) -> Sums:
        """What was measured at a site since the ranks last added it up."""
        return self._errors.setdefault(site, Sums())


_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()


def state_of(group: dist.ProcessGroup) -> GroupState:
    state = _states.get(group)
    if state is None:
        state = _states[group] = GroupState(group)
    return state


def known(group: Any) -> GroupState | None:
    """What is remembered of a group, if it is one and anything is."""
    return _states.get(group) if isinstance(group, dist.ProcessGroup) else None


def agree(label: Label, config: FlashConfig, disabled: bool, device: torch.device) -> None:
    """Compare the configuration across the label's group, once a configuration and group.

    Two gathers at most: of digests, and only where they differ of the configurations themselves, so that the
    sentence can name the field. `disabled` (FLASH_ALLREDUCE_DISABLE) is compared like a field: a rank that
    goes another way than its peers must be found out as well.

    Raises:
        MismatchError: on every rank, naming the fields that differ and each rank's value.
    """
    state = state_of(label.group)
    if state._last is not None and state._last[0] is config and state._last[1] is disabled:
        return
    key = (config, disabled)
    if state.world_size == 1 or not config.check_ranks:
        return
    if key in state._agreed:
        state._last = key
        return
    run_log.start(config)
    fields = {**config.to_dict(), switches.DISABLE: disabled, "wire version": WIRE_VERSION}
    text = json.dumps(fields, sort_keys=True).encode()
    # The length travels with the digest: if one differs, all ranks know how much to gather.
    digest = config.digest() + struct.pack("<?IQ", disabled, WIRE_VERSION, len(text))
    digests = _gather(digest, label, device)
    if len(set(digests)) > 1:
        longest = max(struct.unpack("<Q", d[-8:])[0] for d in digests)
        ranks = [json.loads(t.rstrip(b"\0")) for t in _gather(text.ljust(longest, b"\0"), label, device)]
        raise MismatchError(_differences(ranks))
    state._agreed.add(key)
    state._last = key


def nodes_of(label: Label, config: FlashConfig, device: torch.device) -> Nodes | None:
    """The nodes of the label's group, as config.hierarchical has them; None: it is off.

    "auto": the ranks that share a host are a node. Hosts are gathered at the first such call of a group.
    """
    if config.hierarchical == "off" or not config.enabled:
        return None
    state = state_of(label.group)
    if state.world_size == 1:
        return None
    if config.hierarchical != "auto":
        return hierarchy.neighbours(state.world_size, config.hierarchical.ranks_per_node)
    if state.hosts is None:
        mine = hashlib.sha256(host().encode()).digest()
        state.hosts = hierarchy.by_host(_gather(mine, label, device, "gathering the names of the hosts"))
    return state.hosts


def add_up(mine: tuple[float, ...], label: Label, device: torch.device) -> tuple[float, ...]:
    """Sums over the ranks of the label's group, added in rank order: the same bits on every rank."""
    layout = f"<{len(mine)}d"
    ranks = [
        struct.unpack(layout, row) for row in _gather(struct.pack(layout, *mine), label, device, "adding up errors")
    ]
    return tuple(map(sum, zip(*ranks, strict=True)))


def host() -> str:
    """A name for this machine, that no other one has. Containers with host names of their own count as machines."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"


def _gather(
    mine: bytes, label: Label, device: torch.device, doing: str = "gathering the configurations"
) -> list[bytes]:
    """`mine` of every rank; of one length."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    received: Tensor = sent.new_empty(label.group.size() * sent.numel())
    transport.all_gather(received, sent, label, doing).wait()
    return [bytes(row) for row in received.view(label.group.size(), -1).tolist()]


def _differences(ranks: list[dict[str, Any]]) -> str:
    lines = []
    for field in sorted({f for fields in ranks for f in fields}):
        values: dict[str, list[int]] = {}
        for rank, fields in enumerate(ranks):
            values.setdefault(json.dumps(fields.get(field, "unknown")), []).append(rank)
        if len(values) > 1:
            who = "; ".join(f"{v} on rank{'s' * (len(r) > 1)} {_shown(r)}" for v, r in values.items())
            lines.append(f"{field} is {who}")
    return (
        "the ranks of a group have different configurations of flash_allreduce: "
        + ", and ".join(lines)
        + ". Give every rank the same flags, file and environment."
    )


def _shown(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
