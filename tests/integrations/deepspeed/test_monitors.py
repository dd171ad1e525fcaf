"""DeepSpeed's monitors get our scalars along with its own, and the log knows the engine's steps."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed_training import EIGHT, OFF, deepspeed, engine, step

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.report.log import read
from flash_allreduce_plugin.policy import Site
from flash_allreduce_plugin.telemetry import counters, run_log
from flash_allreduce_plugin.telemetry.counters import record_full_precision
from tests.distributed import Ranks

STEPS = 3
EVERY_CALL = {"quality_interval": 1, "quality_measure": "exact"}  # measured immediately


def trains(folder: str, stage: int, flash: dict[str, Any] | None, accumulation: int = 1) -> dict[str, bool]:
    """Train with DeepSpeed's own CSV monitor, which rank 0 writes to."""
    fap.reset_stats()
    counters._forgotten.clear()  # a log begins with the process, and this one has run other tests
    os.environ["FLASH_ALLREDUCE_LOG"] = f"{folder}/%r.jsonl"
    options = {
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": accumulation,
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
    }
    try:
        built = engine(options, flash)
        ours = "write_events" in vars(built.monitor)
        for number in range(STEPS):
            if number == 1:  # a line of the user's own, amid the second step
                record_full_precision(Site("own"), "in between", 1)
                built.monitor.write_events([("Train/own", 1.0, 3)])
            step(built, number)
        fap.deepspeed.disable()
        released = "write_events" not in vars(built.monitor)
        step(built, STEPS)
        built.destroy()
    finally:
        del os.environ["FLASH_ALLREDUCE_LOG"]
        run_log.close()
        deepspeed()  # attached again
    return {"ours": ours, "released": released}


def files(folder: Path) -> dict[str, list[list[str]]]:
    """Return the rows of every file of the monitor, behind its heading."""
    return {file.stem: list(csv.reader(file.open()))[1:] for file in (folder / "job").glob("*.csv")}


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (2, 1), (2, 2), (3, 1)])
def test_scalars_come_with_every_step(
    engines: Callable[[int], Ranks], tmp_path: Path, stage: int, accumulation: int
) -> None:
    for seen in engines(2).run(trains, str(tmp_path), stage, {**EIGHT, **EVERY_CALL}, accumulation):
        assert seen == {"ours": True, "released": True}
    found = files(tmp_path)
    site = f"deepspeed.stage{stage}.gradients"
    samples = [str(16 * accumulation * number) for number in range(1, STEPS + 1)]
    assert [row[0] for row in found["Train_Samples_lr"]][:STEPS] == samples, "as DeepSpeed counts them"
    saved = (0.85, 0.88) if stage == 2 else (0.7, 0.76)  # DeepSpeed's own at stage 2 is an all-reduce
    for name, low, high in (("bytes_saved", *saved), ("sqnr_db", 30, 60), ("bits", 8, 8), ("quantized_share", 1, 1)):
        rows = found.pop(f"flash_allreduce_{site}_{name}")
        assert [row[0] for row in rows] == samples, "none after disable"
        assert all(low <= float(value) <= high for _, value in rows), (name, rows)
    assert not [name for name in found if site in name]
    assert found["flash_allreduce_own_quantized_share"] == [[samples[1], "0.0"]], "with the step that it belongs to"
    for rank in range(2):
        log = read(tmp_path / f"{rank}.jsonl")
        assert log.steps == STEPS + 1 and log.starts[0].header["rank"] == rank
        assert log.starts[0].header["versions"]["deepspeed"]


def test_an_engine_without_a_section_writes_deepspeeds_own_files(
    engines: Callable[[int], Ranks], tmp_path: Path
) -> None:
    for seen in engines(2).run(trains, str(tmp_path), 1, None):
        assert not seen["ours"]
    assert files(tmp_path) and not [name for name in files(tmp_path) if "flash_allreduce" in name]


def test_one_that_is_switched_off_says_so(engines: Callable[[int], Ranks], tmp_path: Path) -> None:
    engines(2).run(trains, str(tmp_path), 1, OFF)
    rows = files(tmp_path)["flash_allreduce_deepspeed.stage1.gradients_quantized_share"]
    assert [value for _, value in rows] == ["0.0"] * STEPS
    assert read(tmp_path / "0.jsonl").sites["deepspeed.stage1.gradients"].full_precision == {
        "disabled by configuration": STEPS
    }


def refused(folder: str) -> str:
    os.environ["FLASH_ALLREDUCE_LOG"] = f"{folder}/none/%r.jsonl"
    theirs = deepspeed()
    try:
        with pytest.raises(theirs.runtime.config.DeepSpeedConfigError) as error:
            engine({}, EIGHT)
    finally:
        del os.environ["FLASH_ALLREDUCE_LOG"]
    return str(error.value)


def test_a_log_that_cannot_be_written_is_refused_before_anything_is_built(
    engines: Callable[[int], Ranks], tmp_path: Path
) -> None:
    for rank, said in enumerate(engines(2).run(refused, str(tmp_path))):
        assert said.startswith(f"FLASH_ALLREDUCE_LOG: {tmp_path}/none/{rank}.jsonl cannot be written (No such file")
