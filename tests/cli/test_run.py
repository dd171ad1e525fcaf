"""`flash-allreduce run` on real programs: their environment, refusals before they start, and how they end."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.run.command import Option, options_of

ROOT = Path(__file__).resolve().parents[2]
RUN = (sys.executable, "-m", "flash_allreduce_plugin", "run")
# A training that does not use the plugin's API.
TRAIN = """
import gc
import hashlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: the defaults of its functions would keep it
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
print(f"trained on rank {dist.get_rank()}", flush=True)
del model, optimizer
gc.collect()
dist.destroy_process_group()  # and its threads, which may abort an interpreter that ends (pytorch #190489)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
# The environment, the arguments and the files that a program sees.
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), sys.stdin.read()]))"
BOX = re.compile(r"[│╭╮╰╯─\s]")  # of error messages, which are wrapped


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder that gives the package its entry point, installed or not."""
    info = tmp_path / "site" / "flash_allreduce_plugin-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-allreduce-plugin\nVersion: {fap.__version__}\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nflash_allreduce = flash_allreduce_plugin.autoload:load\n")
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def environment(folder: Path, **variables: str) -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("FLASH_ALLREDUCE_")}
    path = [str(folder / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), **variables}


@contextmanager
def started(folder: Path, *words: str, variables: dict[str, str] | None = None, **files: Any) -> Iterator[Any]:
    """Start the command in a separate process group. End the whole group afterwards."""
    files = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **files}
    process = subprocess.Popen(
        [*RUN, *words],
        cwd=folder,
        env=environment(folder, **(variables or {})),
        text=True,
        start_new_session=True,
        **files,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks, which have sessions of their own
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    with started(folder, *words, variables=variables) as process:
        out, err = process.communicate("typed", timeout=300)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def squeezed(text: str) -> str:
    return BOX.sub("", text)


@pytest.mark.timeout(600)
def test_a_training_is_served_and_reported(site: Path) -> None:
    options = ("--bits", "4", "--set", "min-bytes=16384", "--report", "run.jsonl")
    done = run(site, *options, "--", sys.executable, *TORCHRUN, "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"trained on rank (\d)", done.stdout)) == ["0", "1"]
    assert done.stdout.count("flash all-reduce: attached to") == 1
    row = next(line for line in done.stderr.splitlines() if "ddp.gradients" in line)
    assert "100 %" in row, row
    assert "ddp.gradients" not in done.stdout, "stdout is the program's own"
    log = (site / "run.jsonl").read_text()
    assert json.loads(log.splitlines()[0])["configuration"]["bits"] == 4
    assert str(site / "run.jsonl") in done.stderr


@pytest.mark.timeout(600)
def test_the_exit_status_of_a_failing_training_is_kept_with_a_report(site: Path) -> None:
    done = run(site, "--no-check", "--bits", "8", sys.executable, *TORCHRUN, "train.py", "3")
    assert done.returncode == 1, "torchrun's own, for a rank that failed"
    assert "ddp.gradients" in done.stderr
    assert "/0.jsonl" in done.stderr, "rank 0's log, of those of all ranks"


def test_the_program_gets_words_files_and_variables_untouched(site: Path) -> None:
    words = ("--bits", "4", "--preset", "x", "--", "a b", "--help")
    (site / "config.json").write_text("{}")
    options = ("--no-check", "--preset", "int8", "--config", "config.json", "--set", "group-size=64")
    done = run(site, *options, "--", sys.executable, "-c", SHOW, *words, FLASH_ALLREDUCE_MIN_BYTES="4096")
    assert done.returncode == 0, done.stderr
    seen, variables, typed = json.loads(done.stdout)
    assert seen == list(words) and typed == "typed"
    ours = {key: value for key, value in variables.items() if key.startswith("FLASH_ALLREDUCE_")}
    assert ours.pop("FLASH_ALLREDUCE_LOG").endswith("%r.jsonl")
    assert ours == {
        "FLASH_ALLREDUCE_ATTACH": "all",
        "FLASH_ALLREDUCE_CONFIG": str(site / "config.json"),
        "FLASH_ALLREDUCE_GROUP_SIZE": "64",
        "FLASH_ALLREDUCE_MIN_BYTES": "4096",
        "FLASH_ALLREDUCE_PRESET": "int8",
    }
    assert "nothing was attached" in done.stderr and sys.executable in done.stderr


@pytest.mark.parametrize(
    ("program", "status"),
    [("sys.exit(0)", 0), ("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("os.kill(os.getpid(), 15)", 143)],
)
def test_the_exit_status_is_the_commands_own(site: Path, program: str, status: int) -> None:
    done = run(site, "--no-check", "--", sys.executable, "-c", f"import os, sys; {program}")
    assert done.returncode == status
    said = f"ended with exit status {status} before anything was attached" if status else "nothing was attached"
    assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (("--bits", "9"), {}, "FLASH_ALLREDUCE_BITS=9 is not valid; expected a whole number from 2 to 8."),
        (("--preset", "int5"), {}, "FLASH_ALLREDUCE_PRESET='int5' is not valid"),
        (("--attach", "dpp"), {}, "dpp"),
        (("--set", "bitz=4"), {}, "--set bitz=4: bitz is not a known field; the nearest is bits."),
        (("--set", "bits"), {}, "--set bits: expected KEY=VALUE"),
        (("--set", "bits="), {}, "--set bits=: expected a value."),
        (("--bits", "4", "--set", "bits=8"), {}, "--bits 4 and --set bits=8 contradict each other"),
        (("--config", "none.json"), {}, "none.json"),
        (("--config", "bad.json"), {}, "bitz"),
        (("--report", "nowhere/run.jsonl"), {}, "nowhere/run.jsonl cannot be written"),
        (("--report", "train.py"), {}, "train.py cannot be written"),
        (("--bits", "4"), {"FLASH_ALLREDUCE_BITS": "8"}, "--bits 4 and FLASH_ALLREDUCE_BITS=8 contradict each other"),
        (("--attach", "ddp"), {"FLASH_ALLREDUCE_ATTACH": "fsdp"}, "contradict each other"),
        (("--report", "a"), {"FLASH_ALLREDUCE_LOG": "b"}, "--report a and FLASH_ALLREDUCE_LOG=b contradict"),
        ((), {"FLASH_ALLREDUCE_DISABLE": "1"}, "FLASH_ALLREDUCE_DISABLE=1: every call would run in full precision"),
        ((), {"FLASH_ALLREDUCE_AUTOLOAD": "0"}, "FLASH_ALLREDUCE_AUTOLOAD=0: nothing can be attached"),
        ((), {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "TORCH_DEVICE_BACKEND_AUTOLOAD=0: nothing can be attached"),
        ((), {"FLASH_ALLREDUCE_BITZ": "4"}, "FLASH_ALLREDUCE_BITZ='4' is not a known variable"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    site: Path, words: tuple[str, ...], variables: dict[str, str], said: str
) -> None:
    (site / "bad.json").write_text('{"bitz": 4}')
    program = (sys.executable, "-c", "open('started', 'w')")
    done = run(site, *words, "--", *program, **variables)
    assert done.returncode == 2
    assert squeezed(said) in squeezed(done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert not (site / "started").exists()
    assert sorted(path.name for path in site.iterdir()) == ["bad.json", "site", "train.py"], "no file is left"


@pytest.mark.parametrize(("words", "said"), [(("none-such",), "none-such: no such program"), ((), "Missing argument")])
def test_a_command_that_is_not_there(site: Path, words: tuple[str, ...], said: str) -> None:
    done = run(site, *words)
    assert done.returncode == 2 and squeezed(said) in squeezed(done.stderr)


def test_options_that_agree_with_the_environment_are_no_contradiction(site: Path) -> None:
    variables = {"FLASH_ALLREDUCE_BITS": " 4", "FLASH_ALLREDUCE_ATTACH": "fsdp, ddp"}
    words = ("--no-check", "--bits", "4", "--attach", "ddp,fsdp", "--", sys.executable, "-c", "")
    assert run(site, *words, **variables).returncode == 0


def test_a_problem_of_the_installation_is_found_first(site: Path) -> None:
    """Install a second copy of the package, with another version."""
    info = site / "site" / "flash_allreduce_plugin-0.dist-info"
    (info / "entry_points.txt").unlink()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-allreduce-plugin\nVersion: 0.0.1\n")
    program = (sys.executable, "-c", "open('started', 'w')")
    done = run(site, "--", *program)
    assert done.returncode == 1
    assert "versions, flash-allreduce-plugin:" in done.stderr and "installed is 0.0.1" in done.stderr
    assert "the command was not started; --no-check starts it without this check" in done.stderr
    assert not (site / "started").exists()
    assert run(site, "--no-check", "--", *program).returncode == 0
    assert (site / "started").exists()


# Prints how often it was interrupted; ends at SIGTERM.
LISTENS = """
import os, signal, sys, time
counts = {}
def count(number, frame):
    counts[number] = counts.get(number, 0) + 1
    os.write(1, f"{signal.Signals(number).name}\\n".encode())  # print may be what was interrupted
    if number == signal.SIGTERM:
        time.sleep(0.5)
        os.write(1, f"{ {signal.Signals(n).name: c for n, c in counts.items()} }\\n".encode())
        sys.exit(5)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, count)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def wait_for(read: Callable[[], str], text: str, seconds: float = 120) -> str:
    seen, deadline = "", time.monotonic() + seconds
    while text not in seen:
        assert time.monotonic() < deadline, seen
        seen += read()
    return seen


@pytest.mark.timeout(300)
def test_signals_are_forwarded(site: Path) -> None:
    with started(site, "--no-check", "--", sys.executable, "-c", LISTENS) as process:
        wait_for(process.stdout.readline, "ready")
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
            process.send_signal(number)
            wait_for(process.stdout.readline, number.name)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 5
    assert eval(out) == {"SIGINT": 1, "SIGHUP": 1, "SIGUSR1": 1, "SIGTERM": 1}
    assert "exit status 5" in err and "Traceback" not in err


@pytest.mark.timeout(300)
def test_ctrl_c_of_a_terminal_reaches_the_program_once(site: Path) -> None:
    """Send Ctrl-C as a terminal does, to the whole process group; typed text reaches the program as well."""
    ours, theirs = pty.openpty()
    script = "import os, sys; os.setsid(); import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    script += "os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", script, *RUN, "--no-check", "--", sys.executable, "-c", LISTENS]
    process = subprocess.Popen(command, cwd=site, env=environment(site), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        read = lambda: os.read(ours, 4096).decode()  # noqa: E731
        wait_for(read, "ready")
        os.write(ours, b"\x03")
        wait_for(read, "SIGINT")
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert "{'SIGINT': 1, 'SIGTERM': 1}" in wait_for(read, "}")
        wait_for(read, "before anything was attached")
        assert process.wait(60) == 5
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.timeout(600)
def test_a_training_that_is_stopped_leaves_no_rank_behind(site: Path) -> None:
    endless = TRAIN.replace("range(4)", "range(20_000)").replace(
        # Slow enough that the log has lines, which are written after a second and then ever more rarely.
        "    optimizer.step()",
        "    optimizer.step()\n    dist.get_rank() or print(step, flush=True)\n    __import__('time').sleep(0.4)",
    )
    (site / "endless.py").write_text(endless)
    words = ("--no-check", "--bits", "4", "--set", "min_bytes=16384", "--", sys.executable, *TORCHRUN, "endless.py")
    with started(site, *words, stderr=subprocess.STDOUT) as process:
        wait_for(process.stdout.readline, "\n12\n")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)  # which waits for the ranks, too: they hold the pipe
    assert process.returncode not in (0, None)
    assert "ddp.gradients" in out


def test_options_become_variables() -> None:
    options = options_of("4", None, None, "ddp", ["group-size=64", "exclude=*.head"])
    assert options == [
        Option("FLASH_ALLREDUCE_BITS", "4", "--bits 4"),
        Option("FLASH_ALLREDUCE_ATTACH", "ddp", "--attach ddp"),
        Option("FLASH_ALLREDUCE_GROUP_SIZE", "64", "--set group-size=64"),
        Option("FLASH_ALLREDUCE_EXCLUDE", "*.head", "--set exclude=*.head"),
    ]
