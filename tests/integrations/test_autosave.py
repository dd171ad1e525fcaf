"""FLASH_ALLREDUCE_AUTOSAVE: programs that save and resume without a reference to the plugin's state."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.integrations.optimizer_steps import optimizer_steps
from tests.distributed import run_ranks

WIDTH, SAVED, STEPS = 64, 4, 7
CONFIG = fap.FlashConfig(bits=4, min_bytes=0, error_feedback=True, rounding="stochastic")


def build(kind: str) -> Any:
    torch.manual_seed(7)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    world = dist.get_world_size()
    if kind == "ddp":  # which forms its buckets once (docs/use/checkpoints.md)
        return DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    shapes = {"hsdp": (2, world // 2), "replicas": (world, 1)}
    shape, names = (shapes[kind], ("replicate", "shard")) if kind in shapes else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if kind == "part":
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("other", "shard"))["shard"]
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model


def train(kind: str, folder: Path, begin: int, end: int, sgd: bool = False, every: str = "2") -> tuple[Any, ...]:
    """Return weights, warnings and counted steps of a run from step `begin`, of its own checkpoint, to `end`."""
    os.environ["FLASH_ALLREDUCE_AUTOSAVE"] = f"{folder / 'flash'}:{every}"
    fap.ddp.enable(CONFIG.model_copy(update={"error_feedback": kind != "fsdp1"}))
    fap.fsdp.enable(CONFIG.model_copy(update={"error_feedback": kind != "fsdp1"}))
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if sgd else torch.optim.AdamW(model.parameters(), lr=1e-2)
    if begin:  # get_state_dict is for DDP too. FSDP2's programs use torch.distributed.checkpoint
        kept = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(kept, checkpoint_id=folder / "checkpoint")
        set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        for step in range(begin, end):
            optimizer.zero_grad()
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            (model(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
            if step + 1 == SAVED:
                kept = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
                dcp.save(kept, checkpoint_id=folder / "checkpoint")
    weights = [getattr(one, "_local_tensor", one).detach().clone() for one in model.parameters()]
    said = [str(one.message) for one in caught if "flash_allreduce" in str(one.message)]
    said += [line for line in printed.getvalue().splitlines() if "AUTOSAVE: " in line]
    return torch.cat([one.flatten() for one in weights]), said, optimizer_steps.finished


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4), ("replicas", 4)])
def test_a_resumed_run_continues_bit_for_bit(kind: str, world: int, tmp_path: Path) -> None:
    whole = run_ranks(world, train, kind, tmp_path, 0, STEPS, kind == "fsdp2")
    resumed = run_ranks(world, train, kind, tmp_path, SAVED, STEPS, kind == "fsdp2")
    for (weights, _, steps), (again, _, counted) in zip(whole, resumed, strict=True):
        assert torch.equal(weights, again)
        assert steps == counted == STEPS
    assert [said for _, said, _ in whole] == [[]] * world
    assert [len(said) for _, said, _ in resumed] == [1] + [0] * (world - 1)
    assert f"resumes from the state of step {SAVED}" in resumed[0][1][0]
    files = sorted(path.name.partition("-")[0] for path in (tmp_path / "flash" / "rank_00000").iterdir())
    assert files == ["4", "6"], "the last two are kept, under the names of their steps"


def test_without_the_states_it_is_another_run(tmp_path: Path) -> None:
    """Check that the compared weights can differ. One rank's lost file resets the state of all, with a warning."""
    whole = run_ranks(2, train, "fsdp2", tmp_path, 0, STEPS)
    lost = next((tmp_path / "flash" / "rank_00001").glob("4-*.pt"))
    lost.unlink()
    resumed = run_ranks(2, train, "fsdp2", tmp_path, SAVED, STEPS)
    assert not any(torch.equal(one[0], other[0]) for one, other in zip(whole, resumed, strict=True))
    assert len(resumed[0][1]) == 1 and "there is no file (rank 1)" in resumed[0][1][0]
    assert [steps for _, _, steps in resumed] == [STEPS, STEPS]


def test_steps_continue_from_adams_count(tmp_path: Path) -> None:
    """Check a run without a saved state. The step with zeros of torch.distributed.checkpoint does not count."""
    run_ranks(2, train, "fsdp2", tmp_path, 0, SAVED, False, "100")
    resumed = run_ranks(2, train, "fsdp2", tmp_path, SAVED, STEPS, False, "100")
    assert [steps for _, _, steps in resumed] == [STEPS, STEPS]


def test_other_weights_start_without_state_and_get_a_line(tmp_path: Path) -> None:
    first = run_ranks(2, train, "ddp", tmp_path, 0, SAVED)
    second = run_ranks(2, train, "ddp", tmp_path, 0, SAVED)
    for (weights, said, _), (again, _, _) in zip(first, second, strict=True):
        assert torch.equal(weights, again) and said == []
    assert ["no state in" in line for _, then, _ in second for line in then] == [True], "of rank 0"


def refused(kind: str, text: str) -> object:
    os.environ["FLASH_ALLREDUCE_AUTOSAVE"] = text
    fap.ddp.enable(CONFIG)
    fap.fsdp.enable(CONFIG.model_copy(update={"error_feedback": False}))
    try:
        model = build(kind)
        if kind == "fsdp1":
            model(torch.zeros(1, WIDTH))
    except SystemExit as error:
        return error.code
    return None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ddp", "flash"),
        ("fsdp2", "flash:0"),
        ("ddp", ":500"),
        ("fsdp2", "flash:1e3"),
        ("fsdp1", "f:1"),
        ("part", "f:1"),
    ],
)
def test_unsupported_models_end_the_program(kind: str, text: str) -> None:
    assert run_ranks(2, refused, kind, text) == [2, 2]


def saved_after_disable(folder: Path) -> tuple[bool, int, int]:
    train("ddp", folder, 0, 2)
    there = (folder / "flash" / f"rank_{dist.get_rank():05d}", optimizer_steps.after)
    before = len(list(there[0].iterdir())), len(there[1])
    fap.ddp.disable()
    fap.fsdp.disable()
    parameter = nn.Parameter(torch.ones(2, requires_grad=True))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(4):
        parameter.grad = torch.ones(2)
        optimizer.step()
    return before == (1, 1), len(list(there[0].iterdir())), len(there[1])


def test_undone_it_saves_nothing(tmp_path: Path) -> None:
    assert run_ranks(2, saved_after_disable, tmp_path) == [(True, 1, 0)] * 2


def test_where_nothing_is_attached_the_end_says_so() -> None:
    script = "import torch.distributed as dist; "
    script += "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    variables = {"FLASH_ALLREDUCE_AUTOSAVE": "flash:5", "RANK": "0", "WORLD_SIZE": "1"}
    path = f"{Path(fap.__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; from flash_allreduce_plugin import autoload; autoload.load()"],
        env={**os.environ, **variables, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("FLASH_ALLREDUCE_AUTOSAVE is set, and has saved nothing") == 1


def unwritable(folder: Path) -> list[str]:
    (folder / "flash").write_text("a file where a folder is needed") if dist.get_rank() == 0 else None
    dist.barrier()
    return list(train("ddp", folder, 0, 3, every="1")[1])


def test_a_full_disk_does_not_end_the_training(tmp_path: Path) -> None:
    for said in run_ranks(2, unwritable, tmp_path):
        assert len(said) == 3 and all("training continues" in line for line in said)
