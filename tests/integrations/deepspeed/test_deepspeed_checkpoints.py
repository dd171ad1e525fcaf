"""DeepSpeed's checkpoints have the state that a resumed run needs, at every stage."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_training import deepspeed, engine, model, release, stats, step, weights
from test_overflow import FP16, skip_defects_of_older_releases

import flash_allreduce_plugin as fap
from tests.distributed import Ranks

SAVED, LAST = 4, 8
ON = {
    "bits": 2,
    "min_bytes": 0,
    "error_feedback": True,
    "rounding": "stochastic",
    "target_sqnr_db": 12.0,
    "quality_interval": 3,
    "warmup_steps": 2,
}


def _pools(engines: Callable[[int], Ranks]) -> Iterator[Callable[[int], Ranks]]:
    engines(2)  # skips where there is no DeepSpeed
    started: dict[int, Ranks] = {}
    yield lambda world: started.get(world) or started.setdefault(world, Ranks(world))
    for pool in started.values():
        pool.close()


# As engines, in processes of their own: in one that other tests have trained in, DeepSpeed's ZeRO 2 has put gradients
# into its buckets in another order than in a new one.
begun = pytest.fixture(scope="module")(_pools)
restarted = pytest.fixture(scope="module")(_pools)


def options(zero: dict[str, Any], accumulate: int) -> dict[str, Any]:
    return {"zero_optimization": zero, "gradient_accumulation_steps": accumulate}


def straight(zero: dict[str, Any], accumulate: int, folder: str) -> torch.Tensor:
    built = engine(options(zero, accumulate), ON)
    for number in range(SAVED):
        step(built, number)
    built.save_checkpoint(folder)
    for number in range(SAVED, LAST):
        step(built, number)
    found = weights(built)
    built.destroy()
    return found


def resumed(
    zero: dict[str, Any], accumulate: int, folder: str, flash: dict[str, Any] = ON, **how: Any
) -> dict[str, Any]:
    """Resume from a checkpoint; how: arguments of load_checkpoint."""
    net = model()
    for parameter in net.parameters():
        parameter.data.zero_()
    built = engine(options(zero, accumulate), flash, net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path, _ = built.load_checkpoint(folder, **how)
    assert path is not None
    told = [str(one.message) for one in caught if str(one.message).startswith("flash_allreduce: ")]
    owner = fap.deepspeed.feedback(built)
    assert owner is not None
    seen: dict[str, Any] = {"told": told, "keys": owner.keys()}
    fap.reset_stats()
    for number in range(SAVED, LAST):
        step(built, number)
    seen |= {"weights": weights(built), "stats": stats()}
    built.destroy()
    return seen


@pytest.mark.parametrize("stage", range(4))
def test_new_processes_resume_bit_for_bit(
    begun: Callable[[int], Ranks], restarted: Callable[[int], Ranks], stage: int, tmp_path: Path
) -> None:
    zero, accumulate = {"stage": stage}, 1 + (stage == 3)
    expected = begun(2).run(straight, zero, accumulate, str(tmp_path))
    for rank, seen in enumerate(restarted(2).run(resumed, zero, accumulate, str(tmp_path))):
        assert seen["told"] == [] and seen["keys"]
        assert torch.equal(seen["weights"], expected[rank])
    shutil.rmtree(tmp_path / f"global_step{SAVED}" / "flash_allreduce")
    for rank, seen in enumerate(restarted(2).run(resumed, zero, accumulate, str(tmp_path))):
        assert seen["keys"] == []
        assert seen["told"] == [] if rank else "there is no file (ranks 0, 1)" in seen["told"][0]
        assert not torch.equal(seen["weights"], expected[rank])
        assert seen["stats"]["full_precision"] == {}, "DeepSpeed knows the steps of the warm-up"


def test_missing_and_damaged_files(
    begun: Callable[[int], Ranks], restarted: Callable[[int], Ranks], tmp_path: Path
) -> None:
    zero = {"stage": 1}
    begun(2).run(straight, zero, 1, str(tmp_path))
    for how in ({"load_optimizer_states": False}, {"load_module_only": True}):
        for seen in restarted(2).run(_loaded_with, zero, str(tmp_path), how):
            assert seen["told"] == seen["keys"] == []
    (tmp_path / f"global_step{SAVED}" / "flash_allreduce" / "rank_00001.pt").write_bytes(b"PK\3\4 no zip")
    first, second = restarted(2).run(resumed, zero, 1, str(tmp_path))
    [told] = first["told"]
    assert "the file cannot be read" in told and "(rank 1)" in told and "global_step4/flash_allreduce" in told
    assert second["told"] == first["keys"] == second["keys"] == []


def _loaded_with(zero: dict[str, Any], folder: str, how: dict[str, Any]) -> dict[str, Any]:
    return resumed(zero, 1, folder, **how)


def test_another_number_of_ranks_starts_without_state(
    begun: Callable[[int], Ranks], restarted: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """Check stage 0: DeepSpeed itself loads its checkpoints on any number of ranks."""
    begun(2).run(straight, {"stage": 0}, 1, str(tmp_path))
    first, *others = restarted(3).run(resumed, {"stage": 0}, 1, str(tmp_path))
    [told] = first["told"]
    assert "it was saved by 2 ranks, and now there are 3 (ranks 0, 1); there is no file (rank 2)" in told
    for seen in (first, *others):
        assert seen["keys"] == [] and torch.equal(seen["weights"], first["weights"])


def over_an_overflow(stage: int, folder: str, resume: bool) -> tuple[torch.Tensor, dict[str, int]]:
    """Save between a step that overflows and the next one; return the weights and the residuals dropped after it."""
    deepspeed()
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda _: True
    flash = {"bits": 4, "min_bytes": 0, "error_feedback": True}
    built = engine({"zero_optimization": {"stage": stage}, "fp16": FP16}, flash, lr=0.01)
    now = 3 if resume else 0

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf if now == 2 and dist.get_rank() == 1 else gradient

    next(iter(built.module.parameters())).register_hook(spoil)
    if resume:
        built.load_checkpoint(folder)
    while now < 5:
        if now == 3 and not resume:
            built.save_checkpoint(folder)
        fap.reset_stats() if now == 3 else None
        step(built, now)
        now += 1
    found, owner = weights(built), fap.deepspeed.feedback(built)
    assert owner is not None and built.skipped_steps == 1
    built.destroy()
    return found, fap.stats()["residuals_dropped"]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_checkpoint_after_an_overflow_records_it(
    begun: Callable[[int], Ranks], restarted: Callable[[int], Ranks], stage: int, tmp_path: Path
) -> None:
    skip_defects_of_older_releases({"stage": stage}, 1)
    straight = begun(2).run(over_an_overflow, stage, str(tmp_path), False)
    again = restarted(2).run(over_an_overflow, stage, str(tmp_path), True)
    for (expected, dropped), (found, _) in zip(straight, again, strict=True):
        assert set(dropped) == {"step skipped"} and torch.equal(found, expected), release()
