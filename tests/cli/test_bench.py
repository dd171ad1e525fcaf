"""`flash-allreduce bench`: nccl-tests' columns, nothing wrong is timed, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("typer")

from typer.testing import CliRunner

from flash_allreduce_plugin.cli import checkout, ranks
from flash_allreduce_plugin.cli.bench import command as bench
from flash_allreduce_plugin.cli.bench import rank as bench_rank
from flash_allreduce_plugin.cli.main import app
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.config import FlashConfig
from lab.benchmarks import netlab

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["-n", "2", "--rounds", "2"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def rows_of(file: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    rows = json.loads(file.read_text())["rows"]
    return {(row["collective"], row["size"], row["variant"]): row for row in rows}


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("4096", 4096), ("64K", 65536), ("1.5m", 3 << 19), (" 2G ", 2 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert bench.parse_size("-b", text) == size


def test_steps() -> None:
    assert bench.sizes("1K", "20K", 4) == [1024, 4096, 16384]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-b", "x"], "-b x: expected a number of bytes, 1 or more, such as 4096, 64K"),
        (["-e", "1MB"], "-e 1MB: expected a number of bytes"),
        (["-b", "0"], "-b 0: expected a number of bytes, 1 or more"),
        (["-b", "8K", "-e", "4K"], "the first size is larger"),
        (["-b", "4"], "expected at least 8 bytes, one float32 a rank"),
        (["-f", "1"], "not in the range x>=2|greater than or equal to 2"),
        (["-d", "int8"], "expected one of float32, bfloat16, float16"),
        (["-d", "float32,float16"], "expected one of float32, bfloat16, float16"),
        (
            ["-d", "float16", "-n", "21"],
            "so many all-reduces in place on 2 ranks overflow float16; expected at most 20",
        ),
        (["--collective", "broadcast"], "of all_reduce, reduce_scatter, all_gather, all_to_all, codec"),
        (["--algorithm", "tree"], "of two-step, ring"),
        (["--algorithm", "ring", "--collective", "all_gather"], "expected --collective all_reduce"),
        (["--algorithm", "ring", "--config", '{"gather_bits": 8}'], "it has one width"),
        (["--bits", "9"], "bits=9 is not valid; expected a whole number from 2 to 8"),
        (["--bits", "8,four"], "expected whole numbers from 2 to 8"),
        (["--config", "[1]"], "expected a JSON object"),
        (["--config", '{"rang": "mse"}'], "the nearest is range"),
        (["--config", '{"target_sqnr_db": 20, "quality_interval": 1}'], "give --bits"),
        (["--config", "no-such-file"], "--config no-such-file: cannot be read (No such file"),
        (["--ranks", "1"], "--ranks 1: expected whole numbers from 2 to 250"),
        (["--ranks", "2,x"], "--ranks 2,x: expected whole numbers"),
        (["--link", "fast"], "rate 'fast' is not a number"),
        (["--device", "tpu"], "expected cpu or cuda"),
        (["--device", "cuda", "--ranks", "99"], "99 ranks need a GPU each"),
        (["-c", "2"], "not in the range 0<=x<=1|less than or equal to 1"),
    ],
)
def test_bad_usage_is_answered_before_anything_starts(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(ranks, "run", lambda *_, **__: pytest.fail("it started"))
    done = run(*arguments)
    text = " ".join(done.stderr.replace("│", " ").split())
    assert done.exit_code == 2, text
    assert any(part in text for part in says.split("|")), text


def test_a_link_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = run("--link", "1gbit", "--ranks", "4")
    assert done.exit_code == 2
    assert "--link 1gbit: rate-limited hosts are network namespaces, which need root" in " ".join(
        done.stderr.replace("│", " ").split()
    )


def test_ranks_of_a_launcher_are_not_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    done = run("--ranks", "2")
    text = " ".join(done.stderr.replace("│", " ").split())
    assert done.exit_code == 2 and "bench starts no ranks under a launcher" in text


def test_every_collective(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    collectives = "all_reduce,reduce_scatter,all_gather,all_to_all,codec"
    sizes = ["-b", "3000", "-e", "192000", "-f", "64", "-d", "bfloat16", "--bits", "8,3"]
    options = ["--config", '{"group_size": 64, "gather_bits": 5, "hadamard": true}']
    done = run("--collective", collectives, *sizes, *options, *SHORT, "--ranks", "3", "--json", str(file))
    assert done.exit_code == 0, done.output
    result, rows = json.loads(file.read_text()), rows_of(file)
    assert {"date", "command", "machine", "cores", "instruction_set", "torch"} <= set(result["about"])
    shard = {3000: 500, 192000: 32000}
    assert len(rows) == 2 * (4 * 3 + 8)
    for (collective, size, variant), row in rows.items():
        parts = 3 if collective in ("reduce_scatter", "all_gather", "all_to_all") else 1
        assert row["count"] == size // 2 // parts and row["ranks"] == 3
        assert row["seconds"] > 0 and row["algbw"] == pytest.approx(size / row["seconds"])
        if collective == "codec":
            continue
        assert row["wrong"] == 0
        factor = 4 / 3 if collective == "all_reduce" else 2 / 3
        assert row["busbw"] == pytest.approx(row["algbw"] * factor)
        full = rows[collective, size, "full precision"]
        assert row["speedup"] == pytest.approx(full["seconds"] / row["seconds"])
        assert full["wire_bytes"] == size * factor
        if variant != "full precision":
            before, after = (8, 5) if variant == "INT8+5" else (3, 5)
            groups = -(-(size // 2 if parts == 1 else shard[size]) // 64)
            sent = {"reduce_scatter": before, "all_reduce": before + after}.get(collective, after)
            bytes_ = groups * (sent * 8 + 4 * (1 + (collective == "all_reduce")))
            share = 2 if parts == 3 else 2 / 3
            assert row["wire_bytes"] == pytest.approx(bytes_ * share, rel=0.07 if parts == 1 else 0)  # padded shards
            assert 8 < row["sqnr_db"] < 50
            assert row["rival_sqnr_db"] == full["sqnr_db"]
            assert (full["sqnr_db"] is None) == (collective in ("all_gather", "all_to_all"))
            assert (row["sqnr_db"] > 25) == (collective in ("all_gather", "all_to_all") or before == 8)
    encode = rows["codec", 192000, "INT8+5 encode"]
    assert encode["wrong"] == 0 and encode["sqnr_db"] > 40 and encode["wire_bytes"] == 96000 / 64 * 68
    assert encode["speedup"] == pytest.approx(rows["codec", 192000, "copy_"]["seconds"] / encode["seconds"])
    # Header once a collective, one line a row, the times those of the JSON.
    assert (
        len(
            re.findall(
                r"# +size +count +type +redop +variant +time +algbw +busbw +#wrong +wire +SQNR +rival", done.stdout
            )
        )
        == 5
    )
    row = rows["all_reduce", 192000, "INT3+5"]
    line = next(line for line in done.stdout.splitlines() if re.match(r" +192000 .* INT3\+5 ", line))
    assert line.split()[:6] == ["192000", "96000", "bfloat16", "sum", "INT3+5", f"{1e6 * row['seconds']:.1f}"]
    assert "# wrong elements: 0" in done.stdout


def test_a_ring_and_two_steps_with_several_numbers_of_ranks(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    sizes = ["-b", "64K", "-e", "64K", "--bits", "4"]
    done = run("--algorithm", "ring,two-step", "--ranks", "2,4", *sizes, *SHORT, "--json", str(file))
    assert done.exit_code == 0, done.output
    rows = {(row["ranks"], row["variant"]): row for row in json.loads(file.read_text())["rows"]}
    assert len(rows) == 6
    for n in (2, 4):
        ring, two_step = rows[n, "INT4 ring"], rows[n, "INT4"]
        assert (ring["steps"], two_step["steps"]) == (2 * (n - 1), 2)
        assert (ring["roundings"], two_step["roundings"]) == (n, 2)
        assert ring["wire_bytes"] == two_step["wire_bytes"] == ring["wire_bytes_formula"]
    assert rows[4, "INT4 ring"]["sqnr_db"] < rows[2, "INT4 ring"]["sqnr_db"] - 1.5
    assert abs(rows[4, "INT4"]["sqnr_db"] - rows[2, "INT4"]["sqnr_db"]) < 0.4


def test_a_preset_is_measured_as_it_stands(tmp_path: Path) -> None:
    (config,) = bench.configs(None, '{"preset": "int4"}').values()
    assert config == FlashConfig(preset="int4", min_bytes=0)
    file = tmp_path / "flash.json"
    file.write_text('{"preset": "thin", "group_size": 64}')
    assert list(bench.configs(None, str(file)).values()) == [FlashConfig(preset="thin", group_size=64)]
    wider = bench.configs("8,6", '{"preset": "int4"}')
    assert list(wider.values()) == [FlashConfig(preset="int4", min_bytes=0, bits=bits) for bits in (8, 6)]


def test_a_file_is_measured_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"bits": 6, "min_bytes": 65536, "target_sqnr_db": 20, "quality_interval": 5}')
    file = tmp_path / "x.json"
    sizes = ["-b", "4K", "-e", "64K", "-f", "16"]
    done = run("--config", str(tmp_path / "c.json"), *sizes, *SHORT, "--json", str(file))
    assert done.exit_code == 0, done.output
    rows = rows_of(file)
    small, large = rows["all_reduce", 4096, "INT6"], rows["all_reduce", 65536, "INT6"]
    assert small["full_precision"] == "message below min_bytes" and small["wire_bytes"] == 4096
    assert small["wrong"] == 0 and "INT6*" in done.stdout
    assert "full_precision" not in large and large["wire_bytes"] == 65536 // 4 // 128 * 100


def break_something(settings: dict[str, Any], say: ranks.Say) -> Any:
    """Run bench_rank.measure with the part that BREAK names broken."""
    encode, plain = rows.encode, dist.all_reduce
    decode = rows.decode

    def decode_on_rank_1(payload: torch.Tensor, output: torch.Tensor, *rest: Any) -> None:
        decode(payload, output, *rest)
        output[0, 3] *= 1 + 2e-3 * dist.get_rank()  # far less than a step: only the other rank's bits show it

    def encode_too_much(input: torch.Tensor, payload: torch.Tensor, wire: Any, *rest: Any) -> None:
        encode(input * 1.5 if wire.bits == 4 else input, payload, wire, *rest)

    def add_one(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        work = plain(tensor, *rest, **named)
        if tensor.dtype == torch.float32 and tensor.numel() > 1000 and not named:
            tensor[5] += 1
        return work

    if os.environ["BREAK"] == "one rank":
        rows.decode = decode_on_rank_1
    elif os.environ["BREAK"] == "the codec":
        rows.encode = encode_too_much
    else:
        dist.all_reduce = add_one
    return bench_rank.measure(settings, say)


@pytest.mark.parametrize(
    ("what", "wrong"),
    [("one rank", {"INT8", "INT4"}), ("the codec", {"INT4"}), ("full precision", {"full precision"})],
)
def test_wrong_results_are_counted_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, wrong: set[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(ROOT)]))
    monkeypatch.setenv("BREAK", what)
    monkeypatch.setattr(bench, "MEASURE", f"{Path(__file__).stem}:break_something")
    file = tmp_path / "x.json"
    done = run("-b", "64K", "-e", "64K", *SHORT, "--json", str(file))
    assert done.exit_code == 1, done.output
    for (_, _, variant), row in rows_of(file).items():
        assert (row["wrong"] > 0) == (variant in wrong), variant
        assert (row["seconds"] is None) == (variant in wrong), variant
    total = sum(row["wrong"] for row in rows_of(file).values())
    assert f"# wrong elements: {total}" in done.stdout
    if what == "one rank":  # element 3 of either half, on the rank that differs
        assert total <= 2 * 2


def test_unchecked_it_does_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(ROOT)]))
    monkeypatch.setenv("BREAK", "the codec")
    monkeypatch.setattr(bench, "MEASURE", f"{Path(__file__).stem}:break_something")
    done = run("-b", "64K", "-e", "64K", *SHORT, "-c", "0", "--json", str(tmp_path / "x.json"))
    assert done.exit_code == 0, done.output
    row = rows_of(tmp_path / "x.json")["all_reduce", 65536, "INT4"]
    assert row["wrong"] is None and row["sqnr_db"] is None and row["wire_bytes"] > 0 and row["seconds"] > 0


def test_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "flash_allreduce_plugin", "bench", "-b", "64K", "-e", "64K", *SHORT, "--json", str(file)]
    done = subprocess.run(
        [*launch, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# all_reduce, 2 ranks") == done.stdout.count("# wrong elements: 0") == 1
    assert len(rows_of(file)) == 3


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from descendants(child)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("link", ["loopback", "1gbit"])
def test_interrupted_it_leaves_nothing(link: str) -> None:
    if link != "loopback":
        try:
            with netlab.hosts(1, link):
                pass
        except netlab.NetlabError as error:
            pytest.skip(f"no rate-limited hosts here: {error}")
    command = [sys.executable, "-m", "flash_allreduce_plugin", "bench", "-b", "1K", "-e", "256M", "-f", "2"]
    command += ["--link", link]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        started: set[int] = set()
        for line in process.stdout:  # the row before is printed while the next is measured
            if not line.startswith("#"):
                started.update(descendants(process.pid))
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode != 0
    assert len(started) >= 2
    deadline = time.monotonic() + 20
    while not all(map(ended, started)):
        assert time.monotonic() < deadline, "a rank outlived bench"
        time.sleep(0.05)
    if link != "loopback":
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert f"{netlab.PREFIX}-{process.pid}-" not in listed


def test_piped_stdout_has_rows_alone_and_json_is_pure() -> None:
    command = [sys.executable, "-m", "flash_allreduce_plugin", "bench", "-b", "64K", "-e", "64K", "--bits", "8", *SHORT]
    text, pure = (
        subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=90)
        for more in ([], ["--json", "-"])
    )
    assert text.returncode == pure.returncode == 0, text.stderr + pure.stderr
    rows = [line.split() for line in text.stdout.splitlines() if not line.startswith("#")]
    assert [row[:2] for row in rows] == [["65536", "16384"]] * 2
    assert all(line.startswith("# all_reduce of 64K") for line in text.stderr.splitlines())
    assert [row["variant"] for row in json.loads(pure.stdout)["rows"]] == ["full precision", "INT8"]
    assert "# wrong elements: 0" in pure.stderr


def test_progress_goes_to_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_SILENCE", 0.0)
    assert run("-b", "64K", "-e", "64K", "--bits", "8", *SHORT).stderr.startswith("# all_reduce of 64K: checking\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--link", "1gbit"], "--link 1gbit needs lab/benchmarks/netlab.py, which is only in a checkout of the plugin"),
        (["--algorithm", "ring"], "--algorithm ring needs lab/benchmarks/ring.py, which is only in a checkout"),
    ],
)
def test_installed_without_the_checkout_it_names_the_missing_checkout(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    monkeypatch.setattr(ranks, "run", lambda *_, **__: pytest.fail("it started"))
    done = run(*arguments)
    text = " ".join(done.stderr.replace("│", " ").split())
    assert done.exit_code == 2 and says in text and "git clone it and run `pip install" in text


def test_without_benchmarks_the_commands_run(tmp_path: Path) -> None:
    """Run without benchmarks, as from a wheel, which has none."""
    script = "import sys; sys.modules['lab'] = None\nfrom flash_allreduce_plugin.cli import run; run()"
    for command in (["bench", "-b", "64K", "-e", "64K", "-c", "0", *SHORT], ["plan", "--list"], ["tune", "--help"]):
        done = subprocess.run([sys.executable, "-c", script, *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
