"""Resumed runs: bit for bit in new processes, or reset on all ranks, and rank 0 says why."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives.error_feedback import LOADED, NOT_FINITE
from flash_allreduce_plugin.runtime import checkpoint, groups
from tests.distributed import Ranks, run_ranks

WIDTH = 64
SAVED, LAST = 4, 9
# Each configuration carries different state from step to step; the last one all of it.
CONFIGS = {
    "feedback": fap.FlashConfig(bits=3, min_bytes=0, error_feedback=True),
    "stochastic": fap.FlashConfig(bits=3, min_bytes=0, rounding="stochastic"),
    "target": fap.FlashConfig(bits=2, min_bytes=0, target_sqnr_db=20.0, quality_interval=5),
    "warm-up": fap.FlashConfig(bits=3, min_bytes=0, warmup_steps=SAVED + 2),
    "all": fap.FlashConfig(
        bits=2,
        min_bytes=0,
        error_feedback=True,
        rounding="stochastic",
        target_sqnr_db=14.0,
        quality_interval=5,
        warmup_steps=1,
    ),
    "guard": fap.FlashConfig(bits=2, min_bytes=0, min_sqnr_db=20.0, quality_interval=3),
}


class Training:
    """A model in DistributedDataParallel, over a separate process group."""

    def __init__(self, config: fap.FlashConfig) -> None:
        torch.manual_seed(7)
        layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.model, self.group = nn.Sequential(*layers), dist.new_group()
        # find_unused_parameters: DDP keeps its buckets. Else a new process starts with buckets that change later.
        self.ddp = DistributedDataParallel(
            self.model, process_group=self.group, bucket_cap_mb=0.03, find_unused_parameters=True
        )
        self.hook = fap.ddp_hook(config)
        self.ddp.register_comm_hook(self.group, self.hook)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.2, momentum=0.9)

    def steps(self, first: int, last: int) -> torch.Tensor:
        for step in range(first, last):
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
            self.optimizer.zero_grad()
            (self.ddp(x) - x.flip(1)).square().mean().backward()
            self.optimizer.step()
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def straight(folder: str) -> dict[str, torch.Tensor]:
    """Train to the end, with a checkpoint on the way."""
    trainings = {name: Training(config) for name, config in CONFIGS.items()}
    for training in trainings.values():
        training.steps(0, SAVED)
    states = {name: training.state_dict() for name, training in trainings.items()}
    torch.save({"ours": fap.state_dict(), "theirs": states}, f"{folder}/{dist.get_rank()}.pt")
    checkpoint.save(folder, checkpoint.registered())
    return {name: training.steps(SAVED, LAST) for name, training in trainings.items()}


def resumed(folder: str, ours: str) -> dict[str, Any]:
    """Continue from the checkpoint. ours: "state", "folder", "none": with which state of the plugin's."""
    trainings = {name: Training(config) for name, config in CONFIGS.items()}
    state = torch.load(f"{folder}/{dist.get_rank() % 2}.pt", weights_only=True)
    for name, training in trainings.items():
        training.load_state_dict(state["theirs"][name])
    seen: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if ours == "folder":
            seen["went on"] = checkpoint.load(folder, checkpoint.registered())
        else:
            seen["went on"] = fap.load_state_dict(state["ours"] if ours == "state" else None)
    seen["told"] = [str(warning.message) for warning in caught if "flash_allreduce" in str(warning.message)]
    fap.reset_stats()
    seen["weights"] = {name: training.steps(SAVED, LAST) for name, training in trainings.items()}
    seen["stats"] = fap.stats()
    return seen


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(2, straight, str(folder))


def test_new_processes_resume_bit_for_bit(saved: tuple[Path, list[dict[str, torch.Tensor]]]) -> None:
    folder, expected = saved
    for ours in ("state", "folder"):
        for rank, seen in enumerate(run_ranks(2, resumed, str(folder), ours)):
            assert seen["went on"] and seen["told"] == []
            for name in CONFIGS:
                assert torch.equal(seen["weights"][name], expected[rank][name]), (ours, name)


def test_without_the_state_they_start_again_and_rank_0_prints_it(
    saved: tuple[Path, list[dict[str, torch.Tensor]]],
) -> None:
    folder, expected = saved
    for rank, seen in enumerate(run_ranks(2, resumed, str(folder), "none")):
        assert not seen["went on"]
        assert seen["told"] == [] if rank else "there is no state of the plugin (ranks 0, 1)" in seen["told"][0]
        for name in CONFIGS:
            assert not torch.equal(seen["weights"][name], expected[rank][name]), name


def test_more_ranks_carry_over_the_steps_alone(saved: tuple[Path, list[dict[str, torch.Tensor]]]) -> None:
    folder, _ = saved
    for rank, seen in enumerate(run_ranks(3, resumed, str(folder), "folder")):
        assert not seen["went on"]
        for name in CONFIGS:
            assert torch.isfinite(seen["weights"][name]).all()
        reasons = seen["stats"]["full_precision"]
        buckets = seen["stats"]["calls"] // (len(CONFIGS) * (LAST - SAVED))
        assert reasons == {"warm-up": 2 * buckets}, "two steps of one training are left"
        if rank == 0:
            [told] = seen["told"]
            assert told.startswith(f"flash_allreduce: {folder}/flash_allreduce: ")
            assert "it was saved by 2 ranks, and now there are 3 (ranks 0, 1)" in told
            assert "there is no file (rank 2)" in told


def spoilt(folder: str, damages: list[str]) -> list[tuple[bool, list[str], bool]]:
    """Return, for each damage to rank 1's state: True if the ranks continue, the messages, True if reset."""
    training, seen = Training(CONFIGS["all"]), []
    whole = torch.load(f"{folder}/flash_allreduce/rank_{dist.get_rank():05d}.pt", weights_only=True)
    name = next(name for name, kept in whole["groups"].items() if kept["sites"] and kept["draws"])
    whole["owners"], whole["groups"] = {"ddp.0": whole["owners"]["ddp.4"]}, {name: whole["groups"][name]}
    own = f"{folder}/spoilt/flash_allreduce/rank_{dist.get_rank():05d}.pt"
    os.makedirs(os.path.dirname(own), exist_ok=True)
    for damage in damages:
        state = copy.deepcopy(whole)
        if dist.get_rank() == 1:
            (group,) = state["groups"].values()
            if damage == "another checkpoint":
                group["draws"] += 1
            if damage == "another width":
                group["sites"][0]["bits"] = 9
            if damage == "another format":
                state["flash_allreduce"] = 1
            if damage == "another rank":
                state["rank"] = 0
            if damage == "other owners":
                state["owners"]["fsdp.0"] = state["owners"]["ddp.0"]
        torch.save(state, own)
        if dist.get_rank() == 1 and damage == "cut off":
            os.truncate(own, os.path.getsize(own) // 2)
        if dist.get_rank() == 1 and damage == "code":  # a type that weights_only=True refuses
            torch.save({"flash_allreduce": 1, "run": os.system}, own)
        dist.barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            went_on = checkpoint.load(f"{folder}/spoilt", checkpoint.registered())
        assert training.hook.feedback is not None
        anew = not training.hook.feedback.keys() and groups.state_dict() == {}
        seen.append((went_on, [str(one.message) for one in caught], anew))
    return seen


DAMAGES = {
    "none": "",
    "cut off": "the file cannot be read, ",
    "code": "the file cannot be read, UnpicklingError (rank 1)",
    "another checkpoint": "the ranks' states are not of one checkpoint (ranks 0, 1)",
    "another width": "['sites'][0]['bits'] (rank 1)",
    "another format": "it is of format 1, and this version reads 2 (rank 1)",
    "another rank": "it is of rank 0 (rank 1)",
    "other owners": "it is of ddp.0, fsdp.0, and there is ddp.0 (rank 1)",
}


def test_a_damaged_file_of_one_rank_is_one_sentence_and_all_start_without_state(
    saved: tuple[Path, list[dict[str, torch.Tensor]]],
) -> None:
    folder, _ = saved
    for rank, seen in enumerate(run_ranks(2, spoilt, str(folder), list(DAMAGES))):
        for (damage, why), (went_on, told, anew) in zip(DAMAGES.items(), seen, strict=True):
            assert went_on == (damage == "none") == (not anew), damage
            assert len(told) == (rank == 0 and damage != "none"), (damage, told)
            assert all(why in message and "start again, on all ranks." in message for message in told), told


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of everything in a state, the state itself included."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from leaves(inner, (*path, key))


def replaced(state: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    state = copy.copy(state)
    state[path[0]] = replaced(state[path[0]], path[1:], new)
    return state


def test_additional_entries_of_a_state_are_found(saved: tuple[Path, list[dict[str, torch.Tensor]]]) -> None:
    folder, _ = saved
    state = torch.load(folder / "flash_allreduce" / "rank_00000.pt", weights_only=True)
    state["world_size"] = 1
    owners: Any = dict.fromkeys(state["owners"])
    assert checkpoint._wrong(state, owners) is None
    paths = list(leaves(state))
    assert len(paths) > 60
    records = torch.zeros(2, 34, dtype=torch.uint8)
    tensors = (torch.zeros(3), records.to_sparse(), records.to("meta"), records[:, :1].expand(2, 34))
    for path in paths:
        for other in (b"bytes", -1, 10**5000, object(), *tensors):
            assert checkpoint._wrong(replaced(state, path, other), owners) is not None, (path, type(other))
        if path[-1:] == ("step",):
            assert checkpoint._wrong(replaced(state, path, math.nan), owners) is not None, path


def narrowed() -> tuple[bool, dict[str, int]]:
    """Check that a residual with tensors shorter than its layout is dropped, not read beyond its end."""
    config, x = fap.FlashConfig(bits=3, min_bytes=0, error_feedback=True), torch.ones(4096)
    owner, fresh = fap.Feedback(), x.clone()
    fap.all_reduce(x.clone(), config=config, feedback=owner.slot("x"))
    fap.all_reduce(fresh, config=config)
    state = owner.state_dict()
    state["residuals"]["x"]["before"] = state["residuals"]["x"]["before"][:1]
    owner.load_state_dict(state)
    fap.reset_stats()
    with warnings.catch_warnings(record=True):
        fap.all_reduce(x, config=config, feedback=owner.slot("x"))
    return torch.equal(x, fresh), fap.stats()["residuals_dropped"]


def test_a_residual_of_other_sizes_is_dropped(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(narrowed) == [(True, {"another layout": 1})] * 2


def not_finite() -> list[dict[str, int]]:
    """Count residuals dropped when the backward pass after the checkpoint begins, in the old process and a new one."""
    config, seen = fap.FlashConfig(bits=3, min_bytes=0, error_feedback=True), []
    first, second = fap.Feedback(), fap.Feedback()
    first.begin(0)
    fap.all_reduce(torch.full((4096,), math.nan), config=config, feedback=first.slot("x"))
    second.load_state_dict(first.state_dict())
    for owner in (first, second):
        fap.reset_stats()
        owner.begin(1)
        seen.append({**fap.stats()["residuals_dropped"], "left": len(owner.keys())})
    return seen


def test_a_checkpoint_after_an_overflow_records_it(ranks: Callable[[int], Ranks]) -> None:
    for old, new in ranks(2).run(not_finite):
        assert old == {NOT_FINITE: 1, "left": 0} and new == {"left": 0}, "a loaded one has no site yet to be counted at"


def fsdp(folder: str, resume: bool) -> tuple[bool, torch.Tensor]:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    torch.manual_seed(7)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    for block in net:
        fully_shard(block)
    fully_shard(net)
    config = fap.FlashConfig(bits=3, min_bytes=0, error_feedback=True, rounding="stochastic")
    comms = []
    for module in net.modules():
        if isinstance(module, FSDPModule):
            comms.append(fap.FlashReduceScatter(config))
            module.set_custom_reduce_scatter(comms[-1])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    went_on, file = False, f"{folder}/fsdp{dist.get_rank()}.pt"
    if resume:
        state = torch.load(file, weights_only=True)
        for parameter, kept in zip(net.parameters(), state["shards"], strict=True):
            parameter.to_local().detach().copy_(kept)
        went_on = fap.load_state_dict(state["ours"])
    for step in range(3 if resume else 0, 6):
        if step == 3 and not resume:
            shards = [parameter.to_local().detach().clone() for parameter in net.parameters()]
            torch.save({"shards": shards, "ours": fap.state_dict()}, file)
        optimizer.zero_grad()
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        (net(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
    return went_on, torch.cat([p.full_tensor().detach().flatten() for p in net.parameters()])


def test_fsdp_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight, again = (run_ranks(2, fsdp, str(tmp_path), resume) for resume in (False, True))
    for (_, expected), (went_on, found) in zip(straight, again, strict=True):
        assert went_on and torch.equal(found, expected)


def without_ranks() -> tuple[bool, int]:
    state = fap.state_dict()
    return fap.load_state_dict(state), len(state["owners"])


def test_one_process_without_a_group() -> None:
    assert not dist.is_initialized()
    assert without_ranks() == (True, len(checkpoint.registered()))


def moved_on() -> dict[str, int]:
    """Load in the middle of a run: newer counters and residuals are dropped."""
    config = fap.FlashConfig(bits=3, min_bytes=0, rounding="stochastic", quality_interval=7)
    before = groups.state_dict()
    group = dist.new_group()
    for _ in range(3):
        fap.all_reduce(torch.ones(4096), group=group, config=config)
    kept = fap.state_dict()
    (name,) = set(groups.state_dict()) - set(before)
    for _ in range(2):
        fap.all_reduce(torch.ones(4096), group=group, config=config)
    later = groups.state_dict()[name]
    assert fap.load_state_dict(kept)
    assert groups.state_dict()[name] == kept["groups"][name] != later
    found = {"kept": kept["groups"][name]["draws"], "later": later["draws"]}
    dist.destroy_process_group(group)
    return found


def test_loading_in_the_middle_of_a_run(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(moved_on) == [{"kept": 3, "later": 5}] * 2


def test_the_reason_is_a_key_of_the_counters() -> None:
    assert LOADED == "checkpoint loaded"
