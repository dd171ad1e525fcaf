"""The state of a process group, and the agreement of its ranks about the configuration.

The state ends with the group. runtime/checkpoint.py saves and loads the part that a resumed run needs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import struct
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.codec.format import WIRE_VERSION
from flash_allreduce_plugin.collectives import messages, missing_ranks, windows
from flash_allreduce_plugin.collectives.missing_ranks import shown
from flash_allreduce_plugin.collectives.transport import BufferPool, Label
from flash_allreduce_plugin.collectives.windows import Allocate
from flash_allreduce_plugin.collectives.work import Helper
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import MismatchError
from flash_allreduce_plugin.policy import FullPrecision, Plan, topology
from flash_allreduce_plugin.policy.topology import Nodes
from flash_allreduce_plugin.quality.control import SiteStates

_log = logging.getLogger("flash_allreduce_plugin")


class GroupState:
    """Buffers, agreed configurations and call counters of one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        #: equal in every run that creates and uses its groups in the same order; "": none
        self.name = _name(group)
        self.sites = SiteStates(self.rank, self.world_size)
        #: number of calls of the group with stochastic rounding; equal on all its ranks
        self.draws = 0
        #: quantized sends of a site from this rank; other ranks have counts of their own
        self.sends: Counter[str] = Counter()
        #: kinds of messages that already had a header, on backends where not every message has one
        self.headed: set[tuple[int | None, bool, bytes]] = set()
        #: the ranks of every host, after the first request
        self.hosts: Nodes | None = None
        #: thread of asynchronous calls over messages
        self.helper = Helper()
        self._pools: dict[tuple[torch.device, int, bool], BufferPool] = {}
        self._windows: dict[torch.device, Allocate | None] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        #: cached answers "full precision": (reason, bytes sent); with the objects whose ids are in the key
        self.plain: dict[tuple[Any, ...], tuple[str, int, Any]] = {}
        #: cached plans by the facts of a call; with the configuration whose id is among the facts
        self.plans: dict[tuple[Any, ...], tuple[Plan | FullPrecision, FlashConfig]] = {}
        #: digest of the last call's configuration, which the log of the run has
        self.logged: FlashConfig | None = None
        self._layers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._layer_numbers = itertools.count()
        self._agreed: set[tuple[FlashConfig, bool]] = set()
        self._last: tuple[FlashConfig, bool] | None = None  # of the last agreement: the same object needs no hash

    def pool(self, device: torch.device, windows_of: dist.ProcessGroup | None = None) -> BufferPool:
        """Return the buffers of the current stream. A returned buffer is reused behind its pending reads.

        windows_of: the group, for a call with equal buffer sizes on all ranks; they may be windows of NCCL.
        """
        on_gpu = device.type == "cuda"
        stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
        allocate = None
        if windows_of is not None and on_gpu and windows.wanted():
            if device not in self._windows:
                self._windows[device] = windows.open(windows_of, device)
            allocate = self._windows[device]
        key = device, stream, allocate is not None
        if key not in self._pools:
            self._pools[key] = BufferPool(device, allocate)
        return self._pools[key]

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of the group's asynchronous calls, which use the wire one after another anyway.

        Each group has one: a call of one group does not wait for another group, and two ranks may issue calls of two
        groups in different orders. Its priority is high: the codec's kernels are short, and the wire waits for them.
        """
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        return self._streams[device]

    def layer(self, module: object) -> int:
        """Return the number of a layer in this group (Site.layer), by the order of the layers' first exchanges.

        The order is the same on all ranks of the group, because they make its exchanges together.
        """
        if module not in self._layers:
            self._layers[module] = next(self._layer_numbers)
        return self._layers[module]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: equal on all ranks of the group, except a site's `sends`, `measured`."""
        return {
            "size": self.world_size,
            "draws": self.draws,
            "sends": dict(self.sends),
            **self.sites.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that state_dict returned; empty: as a new group."""
        self.draws, self.sends = state.get("draws", 0), Counter(state.get("sends", {}))
        self.sites.load_state_dict(state)


_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()
# Loaded states of groups that were not used yet, by name.
_kept: dict[str, Mapping[str, Any]] = {}
_inherited: WeakSet[dist.ProcessGroup] = WeakSet()  # groups created before this process was forked


def state_of(group: dist.ProcessGroup) -> GroupState:
    """Return the state of a group.

    Raises ValueError for a group that was created before this process was forked: gloo would wait for ever.
    """
    state = _states.get(group)
    if state is None:
        if group in _inherited:
            raise ValueError(
                "this process was forked from the one that made the group, and lacks its connections and threads; "
                "start it by spawn, or before init_process_group."
            )
        state = _states[group] = GroupState(group)
        state.load_state_dict(_kept.pop(state.name, {}))
    return state


def state_dict() -> dict[str, Any]:
    """Return the states of the groups of this process for a checkpoint, by name."""
    found = {**_kept, **{state.name: state.state_dict() for state in _states.values() if state.name}}
    return {name: kept for name, kept in found.items() if any(map(kept.get, ("draws", "calls", "sends", "sites")))}


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Load the states that state_dict returned on this rank, also for groups not used yet; {}: as new groups."""
    _kept.clear()
    _kept.update(state)
    for own in _states.values():
        own.load_state_dict(_kept.pop(own.name, {}))


def _name(group: dist.ProcessGroup) -> str:
    """Return a name of the description, the ranks, and the position among equal living groups, by first use."""
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # not registered with torch.distributed
        return ""
    same = f"{group.group_desc} of {len(ranks)} ranks {hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"
    taken = {state.name for state in _states.values()}
    return next(name for name in (f"{same} {number}" for number in itertools.count()) if name not in taken)


def _forked() -> None:
    _inherited.update(_states)
    if dist.is_available() and dist.is_initialized():
        _inherited.add(cast(dist.ProcessGroup, dist.group.WORLD))
    _states.clear()


os.register_at_fork(after_in_child=_forked)


def known(group: Any) -> GroupState | None:
    """Return the state of a group; None if it is no group or has no state yet."""
    return _states.get(group) if isinstance(group, dist.ProcessGroup) else None


def agree(label: Label, config: FlashConfig, disabled: bool, device: torch.device) -> None:
    """Compare the configuration across the label's group, once a configuration and group.

    One gather of digests, and one of the configurations if the digests differ, so that the error can name the field.
    `disabled` (FLASH_ALLREDUCE_DISABLE) is compared like a field: all ranks must quantize or none.

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
    switches = {environment.DISABLE: disabled, environment.NCCL_WINDOWS: windows.wanted()}
    fields = {**config.to_dict(), **switches, "wire version": WIRE_VERSION}
    text = json.dumps(fields, sort_keys=True).encode()
    # The length is sent with the digest: if one differs, all ranks have the size of the second gather.
    digest = config.digest() + struct.pack("<??IQ", disabled, windows.wanted(), WIRE_VERSION, len(text))
    with nullcontext() if state._agreed else missing_ranks.first_use(label):
        digests = messages.gather(digest, label, device)
    if len(set(digests)) > 1:
        longest = min(messages.MOST_TEXT, max(struct.unpack("<Q", d[-8:])[0] for d in digests))
        raise mismatch(messages.gather(text[:longest].ljust(longest, b"\0"), label, device))
    state._agreed.add(key)
    state._last = key


def nodes_of(label: Label, config: FlashConfig, device: torch.device) -> Nodes | None:
    """Return the nodes of the label's group by config.hierarchical; None if it is off.

    "auto": the ranks of one host are a node. Hosts are gathered at the first such call of a group.
    """
    if config.hierarchical == "off" or not config.enabled:
        return None
    state = state_of(label.group)
    if state.world_size == 1:
        return None
    if config.hierarchical != "auto":
        return topology.neighbours(state.world_size, config.hierarchical.ranks_per_node)
    if state.hosts is None:
        mine = hashlib.sha256(topology.host().encode()).digest()
        state.hosts = topology.by_host(messages.gather(mine, label, device, "gathering the names of the hosts"))
    return state.hosts


def mismatch(texts: list[bytes]) -> MismatchError:
    """Build the error for the configurations of the ranks, as JSON. An unreadable one counts as unknown."""
    return MismatchError(_differences([_fields(text) for text in texts]))


def _fields(text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text.rstrip(b"\0"))
    except (ValueError, RecursionError):
        fields = None
    return fields if isinstance(fields, dict) else {}


def _differences(ranks: list[dict[str, Any]]) -> str:
    lines = []
    for field in sorted({f for fields in ranks for f in fields}):
        values: dict[str, list[int]] = {}
        for rank, fields in enumerate(ranks):
            values.setdefault(json.dumps(fields.get(field, "unknown")), []).append(rank)
        if len(values) > 1:
            who = "; ".join(f"{v} on {shown(r)}" for v, r in values.items())
            lines.append(f"{field} is {who}")
    return (
        "the ranks of a group have different configurations of flash_allreduce: "
        + (", and ".join(lines) or "the sent configurations cannot be read")
        + ". Give every rank the same flags, file and environment."
    )
