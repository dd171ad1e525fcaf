"""FLASH_ALLREDUCE_LOG: its content, its writer, its timing, and its behaviour after an error."""

from __future__ import annotations

import errno
import gc
import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.report.log import read
from flash_allreduce_plugin.policy import Site
from flash_allreduce_plugin.telemetry import counters, run_log
from flash_allreduce_plugin.telemetry.counters import (
    record_full_precision,
    record_quantized,
    record_residual_dropped,
    record_sqnr,
)
from tests.distributed import run_ranks

CONFIG = fap.FlashConfig(bits=4, quality_interval=2)


@pytest.fixture
def site() -> Site:
    """Return a site that no other test counts for, in this process."""
    return Site(uuid.uuid4().hex)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the log of this process, which is rank 0 of 4."""
    file = tmp_path / "run.jsonl"
    monkeypatch.setenv("FLASH_ALLREDUCE_LOG", str(file))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    yield file
    run_log.close()
    run_log._finished_steps = None


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def of(site: Site, file: Path) -> list[dict[str, Any]]:
    """Return the lines' entries for one site."""
    return [line["sites"][site.name] for line in lines(file) if site.name in line.get("sites", {})]


def write_now() -> None:
    """Write a line as the thread does periodically."""
    assert run_log._running is not None
    run_log._running._counts("interval")


def test_the_first_line_names_the_command(path: Path) -> None:
    before = time.time()
    run_log.start(CONFIG)
    [header] = lines(path)
    assert path.read_text().startswith(run_log.BEGINNING)
    assert header["kind"] == "start" and header["rank"] == 0 and header["world"] == 4
    assert before <= header["time"] <= time.time() and header["pid"] == os.getpid()
    assert header["versions"]["torch"] == importlib.metadata.version("torch")
    assert header["environment"] == {"FLASH_ALLREDUCE_LOG": str(path)}
    assert fap.FlashConfig.from_dict(header["configuration"]) == CONFIG


def test_every_line_has_the_counts_since_the_last_one(path: Path, site: Site) -> None:
    steps = iter((7, 8, None))
    run_log.start(CONFIG, lambda: next(steps))
    record_full_precision(site, "warm-up", 400)
    write_now()
    record_quantized(site, 50, 400, 20, bits=4)
    record_sqnr(site, 100.0, 1.0)
    record_residual_dropped(site, "loss scale changed")
    fap.reset_stats()  # leaves the log's counts unchanged
    record_quantized(site, 60, 400, bits=5)
    write_now()
    write_now()  # nothing new: no line
    record_full_precision(site, "empty message", 0)
    run_log.close()
    assert of(site, path) == [
        {
            **{"calls": 1, "quantized": 0, "full_precision": {"warm-up": 1}},
            **{"bytes_sent": 400, "bytes_full_precision": 400, "bytes_plain": 400},
        },
        {
            **{"calls": 2, "quantized": 2, "full_precision": {}, "bytes_sent": 110, "bytes_full_precision": 800},
            **{"bits": 5, "bytes_between_nodes": 20, "residuals_dropped": {"loss scale changed": 1}},
            **{"measured": 1, "signal": 100.0, "noise": 1.0, "sqnr_db": 20.0},
        },
        {
            **{"calls": 1, "quantized": 0, "full_precision": {"empty message": 1}},
            **{"bytes_sent": 0, "bytes_full_precision": 0},
        },
    ]
    _, *rest = lines(path)
    assert [line["kind"] for line in rest] == ["interval", "interval", "end"]
    assert [line["step"] for line in rest] == [7, 8, 8]  # the counter of steps is removed at the end
    assert sorted(line["seconds"] for line in rest) == [line["seconds"] for line in rest]


def test_other_traffic_has_a_line(path: Path, site: Site) -> None:
    run_log.start(CONFIG)
    what = f"all_gather, {site.name} of 2 ranks"
    counters.record_beside(what, 400)
    write_now()
    write_now()
    counters.record_beside(what, 100)
    counters.record_beside(what, 100)
    run_log.close()
    found = [line["beside"][what] for line in lines(path)[1:] if what in line.get("beside", {})]
    assert found == [{"calls": 1, "bytes_sent": 400}, {"calls": 2, "bytes_sent": 200}]


def test_a_thread_writes_within_seconds(path: Path, site: Site) -> None:
    run_log.start(CONFIG)
    record_quantized(site, 50, 400, bits=4)
    deadline = time.monotonic() + 20
    while not of(site, path):
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.05)


def test_configurations_are_printed_once(path: Path) -> None:
    other = fap.FlashConfig(bits=2)
    for config in (CONFIG, other, CONFIG, other):
        run_log.start(config)
    header, *rest = lines(path)
    assert [line["kind"] for line in rest] == ["configuration"]
    assert header["configuration"]["bits"] == 4 and rest[0]["configuration"]["bits"] == 2


def test_without_the_variable_there_is_nothing(
    tmp_path: Path, path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threading.active_count()
    monkeypatch.setenv("FLASH_ALLREDUCE_LOG", "")  # counts as not set
    run_log.start(CONFIG)
    monkeypatch.delenv("FLASH_ALLREDUCE_LOG")
    run_log.start(CONFIG)
    run_log.close()
    assert run_log._running is None and threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_write_only_where_the_name_has_the_rank(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    run_log.start(CONFIG)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("FLASH_ALLREDUCE_LOG", str(tmp_path / "rank-%r.jsonl"))
    run_log.start(CONFIG)
    assert [file.name for file in tmp_path.iterdir()] == ["rank-3.jsonl"]
    assert lines(tmp_path / "rank-3.jsonl")[0]["rank"] == 3


def test_a_rank_that_is_not_known_yet_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK")
    run_log.start(CONFIG, lambda: 5)
    assert not path.exists()
    monkeypatch.setenv("RANK", "0")
    run_log.start(CONFIG)
    run_log.close()
    assert lines(path)[-1]["step"] == 5


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none/run.jsonl", "No such file or directory"),
        ("", "Is a directory"),
        ("pipe", "it is no regular file"),
        ("script.py", "it is there already and no log of this version"),
        ("later.jsonl", "it is there already and no log of this version"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_at_the_start(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    foreign = {"script.py": "print('mine')\n", "later.jsonl": '{"flash_allreduce_log": 9, "kind": "start"}\n'}
    for file, text in foreign.items():
        (tmp_path / file).write_text(text)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("FLASH_ALLREDUCE_LOG", str(tmp_path / name))
    threads = threading.active_count()
    with pytest.raises(fap.ConfigError) as refused:
        run_log.start(CONFIG)
    assert str(refused.value).startswith(f"FLASH_ALLREDUCE_LOG: {tmp_path / name} cannot be written ({why}); expected ")
    assert "\n" not in str(refused.value)
    assert {file: (tmp_path / file).read_text() for file in foreign} == foreign
    assert run_log._running is None and threading.active_count() == threads


def test_a_log_is_continued_behind_a_line_that_was_cut_off(path: Path, site: Site) -> None:
    run_log.start(CONFIG)
    run_log.close()
    whole = path.read_text()
    path.write_text(whole + '{"kind": "inter')
    run_log.start(CONFIG)
    run_log.close()
    text = path.read_text()
    assert text.startswith(whole + '{"kind": "inter\n{"flash_allreduce_log": ')
    assert [json.loads(line)["kind"] for line in text.splitlines() if line.endswith("}")] == ["start", "end"] * 2


@pytest.mark.parametrize("half", [False, True], ids=["nothing is written", "half a line is written"])
def test_a_full_disk_never_stops_the_training(
    path: Path, site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, half: bool
) -> None:
    run_log.start(CONFIG)
    write = os.write

    def full(file: int, data: bytes) -> int:
        if half:
            return write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    record_quantized(site, 50, 400, bits=4)
    with caplog.at_level(logging.WARNING, "flash_allreduce_plugin"), monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        write_now()
        write_now()
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and said[0].startswith(f"{path}: cannot be written (")
    record_quantized(site, 50, 400, bits=4)
    write_now()
    whole = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [line["sites"][site.name]["calls"] for line in whole[1:]] == [2], "what was not written comes later"


def test_a_forked_child_leaves_the_log_alone(path: Path) -> None:
    run_log.start(CONFIG)
    before = path.read_text()
    child = os.fork()
    if child == 0:
        run_log.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert path.read_text() == before
    run_log.close()
    assert lines(path)[-1]["kind"] == "end"


# A process that counts for a site and ends.
SCRIPT = """
import multiprocessing, sys, time
import flash_allreduce_plugin as fap
from flash_allreduce_plugin.telemetry import run_log
from flash_allreduce_plugin.telemetry import counters

def rank():
    run_log.start(fap.FlashConfig())
    counters.record_quantized(fap.Site("here"), 50, 400, bits=4)
    print("counted", flush=True)

if __name__ == "__main__":
    if sys.argv[1] == "child":
        process = multiprocessing.get_context("fork").Process(target=rank)
        process.start()
        process.join()
    else:
        rank()
    if sys.argv[1] == "wait":
        time.sleep(60)
    if sys.argv[1] == "raise":
        raise RuntimeError("as a training may")
"""


def a_process(tmp_path: Path, how: str) -> tuple[subprocess.Popen[str], Path]:
    script, file = tmp_path / "script.py", tmp_path / "run.jsonl"
    script.write_text(SCRIPT)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "FLASH_ALLREDUCE_LOG": str(file)}
    path = os.pathsep.join([str(Path(fap.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, str(script), how],
        env={**os.environ, **variables, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, file


@pytest.mark.parametrize("how", ["end", "raise", "child"])
def test_the_last_line_comes_when_the_process_ends(tmp_path: Path, how: str) -> None:
    process, file = a_process(tmp_path, how)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == (how == "raise"), errors
    _, last = lines(file)
    assert last["kind"] == "end" and last["sites"]["here"]["calls"] == 1


def test_lines_of_a_killed_process_are_kept(tmp_path: Path) -> None:
    process, file = a_process(tmp_path, "wait")
    deadline = time.monotonic() + 60
    while not file.exists() or len(file.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    _, last = lines(file)
    assert last["kind"] == "interval" and last["sites"]["here"]["calls"] == 1


def reduces(folder: str, begin: Callable[[], Any], check_ranks: bool = True) -> None:
    os.environ["FLASH_ALLREDUCE_LOG"] = f"{folder}/%r.jsonl"
    begin()
    config = fap.FlashConfig(bits=4, min_bytes=4096, quality_interval=1, quality_measure="exact")
    config = config.model_copy(update={"check_ranks": check_ranks})
    fap.all_reduce(torch.randn(5000, generator=torch.Generator().manual_seed(dist.get_rank())), config=config)
    fap.all_reduce(torch.ones(3), config=config)
    run_log.close()


@pytest.mark.parametrize("check_ranks", [True, False])
def test_real_ranks_with_direct_calls(tmp_path: Path, check_ranks: bool) -> None:
    """Check that the first call begins the log, with and without a comparison of the configurations."""
    run_ranks(2, reduces, str(tmp_path), int, check_ranks)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0.jsonl", "1.jsonl"]
    for rank in range(2):
        header, *_, last = lines(tmp_path / f"{rank}.jsonl")  # a line between them after a second
        assert (header["rank"], header["world"]) == (rank, 2) and header["configuration"]["bits"] == 4
        assert last["kind"] == "end"
        site = read(tmp_path / f"{rank}.jsonl").sites["all_reduce"]
        assert (site.calls, site.quantized, site.bits) == (2, 1, 4)
        assert site.full_precision == {"message below min_bytes": 1}
        assert site.bytes_sent < 0.15 * site.bytes_full_precision
        assert 15 < counters.sqnr_db(site.signal, site.noise) < 25


def trains_with_ddp(folder: str) -> None:
    os.environ["FLASH_ALLREDUCE_LOG"] = f"{folder}/%r.jsonl"
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig(bits=8, min_bytes=0)))
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    del model
    gc.collect()
    run_log.close()


def test_the_steps_of_ddp_are_known_to_the_last(tmp_path: Path) -> None:
    run_ranks(2, trains_with_ddp, str(tmp_path))
    for rank in range(2):
        file = tmp_path / f"{rank}.jsonl"
        counted = sum(site["quantized"] for site in of(Site("ddp.gradients"), file))  # after a second in several lines
        assert lines(file)[-1]["step"] == 3 and counted >= 3


def test_functions_that_take_a_configuration_start_the_log(tmp_path: Path) -> None:
    """Check that the log begins before anything is sent, so that a bad name is found out early."""
    for number, begin in enumerate((fap.ddp_hook, fap.FlashReduceScatter)):
        folder = tmp_path / str(number)
        folder.mkdir()
        run_ranks(2, reduces, str(folder), begin)
        header, configuration, _ = lines(folder / "1.jsonl")
        assert header["configuration"] == fap.FlashConfig().to_dict()
        assert configuration["configuration"]["bits"] == 4


def in_a_group_of_one(rank: int) -> tuple[int, int] | None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="4")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return run_log.rank_and_world()


def test_groups_of_one_rank_do_not_make_each_rank_the_first() -> None:
    assert run_ranks(1, in_a_group_of_one, 3) == [(3, 4)]
