"""The state of a rank with which a resumed run continues bit for bit, in files next to a framework's checkpoint.

The state has
    process groups       call counts, random numbers, the widths of target_sqnr_db and min_sqnr_db (runtime/groups.py)
    the decision         of enabled "auto" (runtime/auto.py)
    owners of gradients  finished steps, and the residuals of error feedback

as dicts of tensors, numbers and strings, which torch.load reads with weights_only=True.

Most of the state must be equal on the ranks of a group. So all ranks load their states or none does: they exchange the
reasons against loading.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flash_allreduce_plugin.codec.format import MAX_BITS, MIN_BITS
from flash_allreduce_plugin.collectives import messages, sample
from flash_allreduce_plugin.collectives.error_feedback import LOADED, STATE, Feedback
from flash_allreduce_plugin.collectives.missing_ranks import shown
from flash_allreduce_plugin.collectives.state_shapes import misshapen
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.quality.guard import FULL
from flash_allreduce_plugin.runtime import auto, groups

VERSION = 2
FOLDER = "flash_allreduce"  # in the folder of a checkpoint
STEP = "step"  # an owner's number that is kept where the rest of the state is dropped

_KEY = "flash_allreduce"


class Owner(Protocol):
    """An owner of gradients: a hook of DDP, Megatron's buffers, an engine."""

    @property
    def feedback(self) -> Feedback | None: ...

    def numbers(self) -> dict[str, float]:
        """Return the numbers that it keeps from step to step, besides residuals."""

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        """Load the numbers. A missing one keeps its value or starts again."""


Owners = Mapping[str, Owner]

# By kind, in the order of creation.
_registered: dict[str, list[weakref.ref[Owner]]] = {}


def register(kind: str, owner: Owner) -> None:
    """Add an owner to state_dict and load_state_dict while it lives, as the n-th living owner of its kind."""
    unregister(kind, owner)
    _registered.setdefault(kind, []).append(weakref.ref(owner))


def unregister(kind: str, owner: Owner) -> None:
    """Remove an owner. Does nothing if it is not registered."""
    kept = _registered.get(kind, [])
    kept[:] = [reference for reference in kept if reference() not in (None, owner)]


def registered() -> dict[str, Owner]:
    """Return the living owners by name. A run that creates them in the same order has the same names."""
    found = {}
    for kind, references in _registered.items():
        living = [owner for owner in (reference() for reference in references) if owner is not None]
        found.update({f"{kind}.{number}": owner for number, owner in enumerate(living)})
    return found


def state_dict() -> dict[str, Any]:
    """Return this rank's state, copied to the CPU, for torch.save next to the model. Call it between steps.

    The state covers the process groups, the hooks of DistributedDataParallel, FSDP's FlashReduceScatters and
    FlashAllReduces, and fap.megatron. DeepSpeed's engines save theirs in their own checkpoints.
    """
    return state_of(registered())


def load_state_dict(state: Mapping[str, Any] | None) -> bool:
    """Load a state that state_dict returned on this rank. All ranks call it, after creating hooks, before a step.

    state: None if this rank has none.

    Returns:
        True if all ranks loaded their states. False if a rank has no state, a damaged one, or one of another number of
        ranks: then all ranks start again, except for the count of finished steps, and rank 0 warns with the reason.
    """
    return resume(state, registered(), "the state that was loaded")


def save(folder: str, owners: Owners) -> None:
    """Write this rank's state into the folder of a checkpoint. The file is replaced atomically."""
    write(_path(folder), owners)


def load(folder: str, owners: Owners, step: int | None = None) -> bool:
    """Call load_state_dict from the folder of a checkpoint. step: finished steps, if no rank's file has them."""
    return load_file(_path(folder), owners, os.path.join(folder, FOLDER), step)


def write(path: str | os.PathLike[str], owners: Owners) -> None:
    """Write this rank's state into a file of any name."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part = f"{os.fspath(path)}.part"
    torch.save(state_of(owners), part)
    os.replace(part, path)


def load_file(path: str | os.PathLike[str] | None, owners: Owners, source: str, step: int | None = None) -> bool:
    """Load from a file of any name. path: None if this rank has none. source: its name in warnings."""
    state, wrong = None, None
    try:
        if path is None:
            raise FileNotFoundError
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        wrong = "there is no file"
    except Exception as error:  # damaged bytes can make torch.load raise anything
        wrong = f"the file cannot be read, {type(error).__name__}"
    return resume(state, owners, source, wrong, step)


def state_of(owners: Owners) -> dict[str, Any]:
    rank, world = _rank_and_world()
    return {
        _KEY: VERSION,
        "rank": rank,
        "world_size": world,
        "groups": groups.state_dict(),
        "auto": auto.state_dict(),
        "owners": {
            name: {
                "numbers": owner.numbers(),
                "feedback": None if owner.feedback is None else owner.feedback.state_dict(),
            }
            for name, owner in owners.items()
        },
    }


def resume(
    state: Mapping[str, Any] | None, owners: Owners, source: str, wrong: str | None = None, step: int | None = None
) -> bool:
    """Call load_state_dict for these owners. wrong: why there is no state, if known."""
    rank, _ = _rank_and_world()
    wrong = wrong or _wrong(state, owners)
    said = {"groups": {}, "auto": {}} if wrong is not None else {"groups": _digests(state), "auto": _decision(state)}
    ranks = _told({"wrong": wrong, "steps": _steps(state), **said})
    reasons: dict[str, list[int]] = {}
    for number, told in enumerate(ranks):
        if told["wrong"] is not None:
            reasons.setdefault(told["wrong"], []).append(number)
    if not reasons and not _are_of_one(ranks):
        reasons["the ranks' states are not of one checkpoint"] = list(range(len(ranks)))
    if reasons:
        groups.load_state_dict({})
        auto.load_state_dict({})
        steps = {name: count for told in ranks for name, count in sorted(told["steps"].items())}
        for name, owner in owners.items():
            if owner.feedback is not None:
                owner.feedback.reset(LOADED)
            count = steps.get(name, step)
            owner.set_numbers({} if count is None else {STEP: count})
        if rank == 0:
            why = "; ".join(f"{reason} ({shown(who)})" for reason, who in reasons.items())
            _warn(f"{source}: {why}. Residuals, widths, random numbers and counters start again, on all ranks.")
        return False
    assert state is not None
    groups.load_state_dict(state["groups"])
    # A rank without such calls takes its peers' decision too.
    auto.load_state_dict(next((told["auto"] for told in ranks if told["auto"]), {}))
    for name, owner in owners.items():
        kept = state["owners"][name]
        owner.set_numbers(kept["numbers"])
        if owner.feedback is not None and kept["feedback"] is not None:
            owner.feedback.load_state_dict(kept["feedback"])
        elif rank == 0 and (owner.feedback is None) != (kept["feedback"] is None):
            was = "off" if kept["feedback"] is None else "on"
            _warn(f"{source}: error_feedback was {was} when it was saved and is not now; there are no residuals.")
    return True


def _warn(message: str) -> None:
    warnings.warn(f"flash_allreduce: {message}", stacklevel=4)


def _rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _path(folder: str) -> str:
    return os.path.join(folder, FOLDER, f"rank_{_rank_and_world()[0]:05d}.pt")


def _told(mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `mine` of every rank."""
    if _rank_and_world()[1] == 1:
        return [mine]
    group = dist.group.WORLD
    assert group is not None
    return messages.gather_json(mine, Label("all_gather", "checkpoint", group), "agreeing on a checkpoint")


# ---- the shape of a state (collectives/state_shapes.py) ----


def _is_measurement(value: Any) -> bool:
    """Return True for None, a measurement (collectives/sample.py), and the two sums of earlier versions."""
    return misshapen(value, [float]) is None and len(value) in (0, 2, sample.nothing().numel())


def _is_nothing(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


_SITE = {"site": str, "config": str, "measured": _is_measurement}
_WIDTH = {"kind": "width", **_SITE, "bits": range(MIN_BITS, MAX_BITS + 1), "spare": bool, "missed": bool}
_STAND = {"bits": range(MIN_BITS, FULL + 1), "low": int, "good": int, "patience": int, "came_down": bool}
_GUARD = {"kind": "guard", **_SITE, **_STAND}
_GROUP = {"size": int, "draws": int, "calls": {...: int}, "sends": {...: int}, "sites": [(_WIDTH, _GUARD)]}
_OWNER = {"numbers": {STEP: int, ...: (int, float)}, "feedback": (None, STATE)}
_AUTO = ({"on": bool, "but": [str]}, _is_nothing)
_STATE = {
    **{_KEY: int, "rank": int, "world_size": int},
    **{"groups": {...: _GROUP}, "owners": {...: _OWNER}, "auto": _AUTO},
}


def _wrong(state: Any, owners: Owners) -> str | None:
    """Return why this rank cannot load a state, or None."""
    if not isinstance(state, Mapping) or _KEY not in state:
        return "there is no state of the plugin"
    if misshapen(state[_KEY], int) is None and state[_KEY] != VERSION:
        return f"it is of format {state[_KEY]!r}, and this version reads {VERSION}"
    where = misshapen({"auto": {}, **state}, _STATE)  # earlier versions had none
    if where is not None:
        return f"it is damaged at state{where}"
    rank, world = _rank_and_world()
    if state["world_size"] != world:
        return f"it was saved by {state['world_size']} ranks, and now there are {world}"
    if state["rank"] != rank:
        return f"it is of rank {state['rank']}"
    if set(state["owners"]) != set(owners):
        return f"it is of {_listed(state['owners'])}, and there is {_listed(owners)}"
    return None


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "no owner of gradients"


# ---- the comparison between ranks ----


def _steps(state: Any) -> dict[str, int]:
    """Return the finished steps of each owner, as far as a state has them. It may be of another run."""
    if not isinstance(state, Mapping) or misshapen(state.get("owners"), _STATE["owners"]) is not None:
        return {}
    return {n: kept["numbers"][STEP] for n, kept in state["owners"].items() if type(kept["numbers"].get(STEP)) is int}


def _digests(state: Any) -> dict[str, list[Any]]:
    """Return for each group the digest of the state that its ranks share, and their number."""
    found: dict[str, list[Any]] = {}
    for name, kept in state["groups"].items():
        sites = [{key: value for key, value in site.items() if key != "measured"} for site in kept["sites"]]
        sites.sort(key=lambda site: (site["kind"], site["site"], site["config"]))
        text = json.dumps([kept["draws"], sorted(kept["calls"].items()), sites], sort_keys=True)
        found[_short(name)] = [_short(text), kept["size"]]
    return found


def _decision(state: Any) -> Any:
    return state.get("auto", {})


def _are_of_one(ranks: list[dict[str, Any]]) -> bool:
    """Return True if the states are of one checkpoint: equal on all ranks of every group, with one decision."""
    decisions = [told["auto"] for told in ranks if told["auto"]]
    if any(decision != decisions[0] for decision in decisions):
        return False
    groups_said: dict[str, list[Any]] = {}
    for told in ranks:
        for name, said in told["groups"].items():
            groups_said.setdefault(name, []).append(said)
    return all(said.count(said[0]) == len(said) == said[0][1] for said in groups_said.values())


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
