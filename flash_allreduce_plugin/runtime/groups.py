"""The state that is kept for a process group, and the agreement of its ranks about the configuration.

Everything here dies with the group; runtime/checkpoint.py brings what a resumed run goes on from.
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
        #: the same in every run that makes and uses its groups in the same order; "": it has none
        self.name = _name(group)
        self.sites = SiteStates(self.rank, self.world_size)
        #: calls of the group that were rounded stochastically; the same on all its ranks
        self.draws = 0
        #: quantized sends of a site from this rank; other ranks have counts of their own
        self.sends: Counter[str] = Counter()
        #: kinds of messages to and from other ranks that had a header, where not every message has one
        self.headed: set[tuple[int | None, bool, bytes]] = set()
        #: the ranks of every host, once they were asked for
        self.hosts: Nodes | None = None
        #: makes asynchronous calls progress where messages can
        self.helper = Helper()
        self._pools: dict[tuple[torch.device, int, bool], BufferPool] = {}
        self._windows: dict[torch.device, Allocate | None] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        #: (reason, bytes sent) of calls that went in full precision and will again; what the ids in a key name is kept
        #: beside it
        self.plain: dict[tuple[Any, ...], tuple[str, int, Any]] = {}
        #: by the facts of a call; the configuration whose id is among them is kept beside it
        self.plans: dict[tuple[Any, ...], tuple[Plan | FullPrecision, FlashConfig]] = {}
        #: of the last call: the log of the run knows it
        self.logged: FlashConfig | None = None
        self._layers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._layer_numbers = itertools.count()
        self._agreed: set[tuple[FlashConfig, bool]] = set()
        self._last: tuple[FlashConfig, bool] | None = None  # of them: spares a call of the same object its hash

    def pool(self, device: torch.device, windows_of: dist.ProcessGroup | None = None) -> BufferPool:
        """The buffers of the current stream: what is given back before it was read is used again behind that.

        windows_of: the group, for a call whose buffers have the same sizes on all ranks; they may be windows of NCCL.
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
        """That of the group's asynchronous calls, which follow one another on the wire as it is.

        Groups have streams of their own: a call of one does not wait for calls of another, and two ranks may issue
        calls of two groups in different orders. Of high priority: the codec's kernels are short, and the wire waits.
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
        """What a checkpoint keeps: the same on all ranks of the group, but for `sends` and `measured` of a site."""
        return {
            "size": self.world_size,
            "draws": self.draws,
            "sends": dict(self.sends),
            **self.sites.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what state_dict gave, or as a new group from an empty one."""
        self.draws, self.sends = state.get("draws", 0), Counter(state.get("sends", {}))
        self.sites.load_state_dict(state)


_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()
# Of a checkpoint, by the names of groups that have not been used yet.
_kept: dict[str, Mapping[str, Any]] = {}
_inherited: WeakSet[dist.ProcessGroup] = WeakSet()  # of the process that this one was forked from


def state_of(group: dist.ProcessGroup) -> GroupState:
    """Raises ValueError for a group that was made before this process was forked: gloo waits for ever on one."""
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
    """What a checkpoint keeps of the groups of this process, by their names."""
    found = {**_kept, **{state.name: state.state_dict() for state in _states.values() if state.name}}
    return {name: kept for name, kept in found.items() if any(map(kept.get, ("draws", "calls", "sends", "sites")))}


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Go on from what state_dict gave on this rank, in groups that are yet to be used too; {}: as new groups."""
    _kept.clear()
    _kept.update(state)
    for own in _states.values():
        own.load_state_dict(_kept.pop(own.name, {}))


def _name(group: dist.ProcessGroup) -> str:
    """Of its description, its ranks, and its place among living groups of the same, as they were first used."""
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # a group that torch.distributed does not know
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
    """The state of a group; None if it is no group, or has none yet."""
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
    switches = {environment.DISABLE: disabled, environment.NCCL_WINDOWS: windows.wanted()}
    fields = {**config.to_dict(), **switches, "wire version": WIRE_VERSION}
    text = json.dumps(fields, sort_keys=True).encode()
    # The length travels with the digest: if one differs, all ranks know how much to gather.
    digest = config.digest() + struct.pack("<??IQ", disabled, windows.wanted(), WIRE_VERSION, len(text))
    with nullcontext() if state._agreed else missing_ranks.first_use(label):
        digests = messages.gather(digest, label, device)
    if len(set(digests)) > 1:
        longest = min(messages.MOST_TEXT, max(struct.unpack("<Q", d[-8:])[0] for d in digests))
        raise mismatch(messages.gather(text[:longest].ljust(longest, b"\0"), label, device))
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
        return topology.neighbours(state.world_size, config.hierarchical.ranks_per_node)
    if state.hosts is None:
        mine = hashlib.sha256(topology.host().encode()).digest()
        state.hosts = topology.by_host(messages.gather(mine, label, device, "gathering the names of the hosts"))
    return state.hosts


def mismatch(texts: list[bytes]) -> MismatchError:
    """Of ranks whose configurations, as JSON, are these; what cannot be read counts as unknown."""
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
        + (", and ".join(lines) or "what they sent cannot be read")
        + ". Give every rank the same flags, file and environment."
    )
