"""Megatron-LM's TensorBoard and Weights & Biases writers get our scalars where it writes its own.

A stub of its training package serves everywhere; with MEGATRON_LM_PATH=<a checkout, core_v0.16.1> and the package
tensorboard its own pretrain_gpt.py writes event files, which are read back.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import types
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import monitor, scopes
from flash_allreduce_plugin.policy import Site
from flash_allreduce_plugin.telemetry import counters, run_log
from tests.distributed import MEGATRON, run_ranks
from tests.integrations.megatron.test_launch import ARGUMENTS, CHECKOUT, FLAGS, PRECISIONS, ROOT, TORCHRUN, run, why_not

SITE = Site("megatron.g.forward")
OLDER = "loss_dict, total_loss_dict, learning_rate, decoupled_learning_rate, iteration, loss_scale"
NEWER = "loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, pg_collection=None"
UNKNOWN = "losses, iteration"


class Board:
    """Both kinds of writer."""

    def __init__(self) -> None:
        self.given: list[tuple[str, float, int]] = []
        self.logged: list[tuple[dict[str, float], int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.given.append((tag, value, step))

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))


def training_package(parameters: str, writer: Board | None, other: Board | None) -> types.ModuleType:
    """Import a megatron.training of a few lines and return the module that logs."""
    package, training, theirs = (
        types.ModuleType(f"megatron.training{rest}") for rest in ("", ".training", ".global_vars")
    )
    package.__path__ = []
    theirs.get_args = lambda: SimpleNamespace(tensorboard_log_interval=2)  # type: ignore[attr-defined]
    theirs.get_tensorboard_writer = lambda: writer  # type: ignore[attr-defined]
    theirs.get_wandb_writer = lambda: other  # type: ignore[attr-defined]
    exec(f"def training_log({parameters}): return 'theirs', iteration", vars(training))
    for module in (package, training, theirs):
        sys.modules[module.__name__] = module
    return training


def logs(parameters: str, has_writer: bool) -> dict[str, Any]:
    writer, other = (Board(), Board()) if has_writer else (None, None)
    training = training_package(parameters, writer, other)
    own = training.training_log
    counters.record_quantized(SITE, 1, 1, bits=2)  # before anything was enabled: not of this training
    megatron.enable(FlashConfig(bits=4, min_bytes=0))
    seen: dict[str, Any] = {
        "replaced": training.training_log is not own,
        "rows": list(megatron.report()),
        "answers": [],
    }
    for iteration in range(1, 6):
        counters.record_quantized(SITE, 100, 800, bits=4)
        arguments = [{}, {}, 1e-3, *[None] * (parameters == OLDER), iteration, 1.0]
        keywords = {} if parameters == OLDER else {"pg_collection": None}
        seen["answers"].append(training.training_log(*arguments, **keywords))
    megatron.disable()
    seen["restored"] = training.training_log is own
    training.training_log(*arguments)
    seen["given"] = None if writer is None else writer.given
    seen["logged"] = None if other is None else other.logged
    return seen


@pytest.mark.parametrize("parameters", [OLDER, NEWER], ids=["0.13", "0.16"])
def test_scalars_come_at_megatrons_interval(parameters: str) -> None:
    [seen] = run_ranks(1, logs, parameters, True, preload=MEGATRON)
    assert seen["replaced"] and seen["restored"]
    assert seen["answers"] == [("theirs", iteration) for iteration in range(1, 6)]
    values = {"quantized_share": 1.0, "bytes_saved": 0.875, "bits": 4}
    mine = [(tag, value, step) for tag, value, step in seen["given"] if SITE.name in tag]
    assert mine == [(f"flash_allreduce/{SITE.name}/{name}", values[name], step) for step in (2, 4) for name in values]
    assert [(step, len(given)) for given, step in seen["logged"]] == [(2, 3), (4, 3)]
    assert "megatron.monitor" not in seen["rows"], "it moves nothing that could be counted"


def test_a_rank_without_a_writer_writes_nothing() -> None:
    [seen] = run_ranks(1, logs, NEWER, False, preload=MEGATRON)
    assert seen["replaced"] and len(seen["answers"]) == 5 and seen["given"] is None


def does_not_fit() -> dict[str, Any]:
    training = training_package(UNKNOWN, None, None)
    own = training.training_log
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        megatron.enable(FlashConfig())
    in_place = all(entry["in_place"] for entry in megatron.report().values())
    kept = training.training_log is own
    megatron.disable()
    del sys.modules["megatron.training.training"]
    return {"told": [str(one.message) for one in told], "kept": kept, "in place": in_place, "seams": monitor.seams()}


def test_an_unsupported_training_package_is_a_warning_and_not_patched() -> None:
    [seen] = run_ranks(1, does_not_fit, preload=MEGATRON)
    [told] = [line for line in seen["told"] if "monitors" in line]
    assert told.startswith("flash_allreduce: Megatron-LM's monitors get no scalars: megatron: cannot patch ")
    assert "expected the parameters (loss_dict, total_loss_dict, learning_rate, iteration, ...)" in told
    assert seen["kept"] and seen["in place"] and seen["seams"] == []


def writes_a_log(folder: str) -> None:
    import os

    os.environ["FLASH_ALLREDUCE_LOG"] = f"{folder}/run.jsonl"
    megatron.enable(FlashConfig(bits=4))
    scopes.set_step(17)
    counters.record_quantized(SITE, 100, 800, bits=4)
    assert run_log._running is not None
    run_log._running._counts("interval")
    megatron.disable()  # which forgets the steps
    run_log.close()


def test_the_log_has_the_step(tmp_path: Path) -> None:
    from flash_allreduce_plugin.cli.report.log import read

    run_ranks(1, writes_a_log, str(tmp_path), preload=MEGATRON)
    log = read(tmp_path / "run.jsonl")
    assert log.steps == 17 and log.sites[SITE.name].quantized == 1
    assert log.starts[0].header["versions"]["megatron-core"] and log.starts[0].configurations[0]["bits"] == 4


def why_no_event_files() -> str:
    if why_not():
        return why_not()
    return (
        "" if importlib.util.find_spec("tensorboard") else "tensorboard is not installed, with which Megatron-LM writes"
    )


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_no_event_files()), reason=why_no_event_files())
@pytest.mark.parametrize("precision", PRECISIONS)
def test_megatron_lm_writes_them_to_its_event_files(tmp_path: Path, precision: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(ROOT / "tests" / "integrations" / "megatron" / "cuda_shim.py", site / "sitecustomize.py")
    words = ["--train-iters", "6", "--tensorboard-dir", str(tmp_path / "board"), "--tensorboard-log-interval", "2"]
    words += ["--flash-allreduce-quality-interval", "3"]
    environment = {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["FLASH_ALLREDUCE_LOG"] = str(tmp_path / "run.jsonl")
    script = Path(CHECKOUT, "pretrain_gpt.py").resolve()
    words = [*ARGUMENTS, *PRECISIONS[precision], *FLAGS, *words]
    done = run(tmp_path, *TORCHRUN, str(script), *words, timeout=500, **environment)
    assert done.returncode == 0, done.stdout[-8000:]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from flash_allreduce_plugin.cli.report.log import read

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("flash_allreduce/")]
    print("\n".join(f"{tag}: {[(e.step, round(e.value, 3)) for e in events.Scalars(tag)]}" for tag in tags))
    saved = 1 - (1 + 4 / 128) / (2 if precision == "bf16" else 4)  # a code an element, a step and a zero a group
    saving = ("bytes_saved", saved - 0.01, saved + 0.01)
    for name, low, high in (saving, ("sqnr_db", 30, 60), ("bits", 8, 8), ("quantized_share", 1, 1)):
        found = events.Scalars(f"flash_allreduce/{SITE.name}/{name}")
        assert [event.step for event in found] == [2, 4, 6]
        assert all(low <= event.value <= high for event in found)
    log = read(tmp_path / "run.jsonl")
    assert log.steps == 6 and log.starts[0].ended and log.sites[SITE.name].quantized == 6 * 4
