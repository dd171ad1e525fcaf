"""lab/benchmarks/netlab.py: hosts come up, the rate holds both ways, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.benchmarks import netlab

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "lab.benchmarks.netlab"]


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return sorted(line.split()[0] for line in listed.splitlines())


def links() -> list[str]:
    listed = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return sorted(line.split(":")[1].strip() for line in listed.splitlines())


def processes_in(namespace: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def ended(pid: int) -> bool:
    """Return True if a process has ended, or is a zombie that its new parent has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition: Callable[[], object], what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def available() -> None:
    try:
        with netlab.hosts(1, "1gbit"):
            pass
    except netlab.NetlabError as error:
        reason = f"no lab on this machine: {error}"
        print(reason)
        pytest.skip(reason)


@pytest.fixture
def nothing_left(available: None) -> Iterator[None]:
    before = namespaces(), links()
    yield
    assert (namespaces(), links()) == before


@pytest.fixture
def sleeping_cli(nothing_left: None) -> Iterator[tuple[subprocess.Popen[str], list[str], list[int]]]:
    """Yield a running `netlab -- sleep 60`: the process, its namespaces, the pids of its two ranks."""
    with subprocess.Popen(
        [*COMMAND, "--hosts", "2", "--rate", "none", "--", "sleep", "60"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:

        def own() -> list[str]:
            return [name for name in namespaces() if name.startswith(f"{netlab.PREFIX}-{process.pid}-")]

        def ranks() -> list[int]:
            return [pid for name in own() for pid in processes_in(name)]

        try:
            wait_until(lambda: len(ranks()) == 2, "both ranks to start")
            yield process, own(), ranks()
        finally:
            process.kill()
            process.wait()
            netlab.clean()


# --- without root


@pytest.mark.parametrize(
    ("text", "bits"),
    [("1gbit", 1e9), ("200mbit", 2e8), ("2.5Gbit", 2.5e9), (" 64kbit ", 64e3), ("none", float("inf"))],
)
def test_parse_rate(text: str, bits: float) -> None:
    assert netlab.parse_rate(text) == bits
    assert netlab.goodput(text) == pytest.approx(bits * 1448 / 1514)


@pytest.mark.parametrize("text", ["", "fast", "1", "gbit", "-1gbit", "1e3gbit", "100mbps", "0mbit", "900gbit", "nan"])
def test_parse_rate_refuses_nonsense(text: str) -> None:
    with pytest.raises(ValueError, match="rate"):
        netlab.parse_rate(text)


@pytest.mark.parametrize(
    "arguments", [[], ["--hosts", "2"], ["--hosts", "0", "--", "true"], ["--rate", "fast", "--", "true"]]
)
def test_bad_usage_exits_with_2(arguments: list[str]) -> None:
    done = subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_missing_root_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netlab.main(["--", "true"]) == 2
    assert netlab.main(["--clean"]) == 2
    assert "root" in capsys.readouterr().err


def test_missing_iproute2_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert netlab.main(["--", "true"]) == 2
    assert "ip and tc not found: install iproute2" in capsys.readouterr().err


# --- with root


def test_each_rank_gets_its_environment_and_one_core(nothing_left: None) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME OMP_NUM_THREADS EXTRA"
    source = f"import os; print(*(os.environ[n] for n in {names.split()}), *os.sched_getaffinity(0))"
    cores = sorted(os.sched_getaffinity(0))
    with netlab.hosts(3, "none") as lab:
        for port in ("29500", "29501"):
            printed = lab.run(python(source), timeout=20, env={"EXTRA": "x"})
            for rank, line in enumerate(printed):
                core = str(cores[rank % len(cores)])
                assert line.split() == [str(rank), "3", "0", "10.77.0.1", port, "eth0", "1", "x", core]
    assert sorted(os.sched_getaffinity(0)) == cores


def test_every_host_reaches_every_other(nothing_left: None) -> None:
    source = """
import os, socket
rank, world, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"])
server = socket.create_server((f"10.77.0.{rank + 1}", port))
server.settimeout(10)
peers = []
for peer in range(rank):
    while True:
        try:
            peers.append(socket.create_connection((f"10.77.0.{peer + 1}", port), timeout=10))
            break
        except ConnectionRefusedError:
            pass
peers += [server.accept()[0] for _ in range(rank + 1, world)]
for peer in peers:
    peer.sendall(bytes([rank]))
print(*sorted(peer.recv(1)[0] for peer in peers))
"""
    with netlab.hosts(3, "1gbit") as lab:
        assert [line.split() for line in lab.run(python(source), timeout=20)] == [
            ["1", "2"],
            ["0", "2"],
            ["0", "1"],
        ]


def test_the_rate_holds_in_both_directions_together(nothing_left: None) -> None:
    with netlab.hosts(2, "200mbit") as lab:
        rates = lab.measure_rate(seconds=1.0)
    for rate in rates:
        assert rate == pytest.approx(netlab.goodput("200mbit"), rel=0.15)


def test_no_limit_is_faster(nothing_left: None) -> None:
    with netlab.hosts(2, "none") as lab:
        assert min(lab.measure_rate(seconds=0.3)) > 2 * netlab.goodput("200mbit")


def test_an_exception_in_the_body_takes_everything_down(nothing_left: None) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), netlab.hosts(2, "1gbit") as lab:
        assert lab.namespace(0) in namespaces()
        _ = 1 / 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_lab_that_cannot_be_finished_takes_everything_down(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netlab, "burst", lambda bits: "nonsense")
    with pytest.raises(netlab.NetlabError, match="tbf"), netlab.hosts(2, "1gbit"):
        pass


def test_the_first_failing_rank_is_named_and_the_others_are_killed(nothing_left: None) -> None:
    source = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("no such tensor")
time.sleep(60)
"""
    start = time.monotonic()
    with netlab.hosts(2, "none") as lab:
        with pytest.raises(netlab.RankError, match=r"rank 1 ended with exit status 1:\nno such tensor") as caught:
            lab.run(python(source), timeout=30)
        assert not processes_in(lab.namespace(0))
    assert (caught.value.rank, caught.value.status) == (1, 1)
    assert time.monotonic() - start < 10


def test_a_timeout_kills_the_ranks_and_their_children(nothing_left: None) -> None:
    source = """
import subprocess, sys, time
subprocess.Popen(["sleep", "60"], start_new_session=True)
print("stuck here", file=sys.stderr, flush=True)
time.sleep(60)
"""
    with netlab.hosts(2, "none") as lab:
        with pytest.raises(netlab.RankError, match=r"rank 0 was still running after 1 s:\nstuck here") as caught:
            lab.run(python(source), timeout=1.0)
        left = [pid for rank in range(2) for pid in processes_in(lab.namespace(rank))]
        wait_until(lambda: all(ended(pid) for pid in left), "the children of the ranks to end")
    assert caught.value.status == 124


def test_cli_passes_output_and_exit_status_on(nothing_left: None) -> None:
    source = "import os, sys; print('rank', os.environ['RANK'], flush=True); sys.exit(7)"
    done = subprocess.run(
        [*COMMAND, "--rate", "1gbit", "--", *python(source)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 7
    assert "rank" in done.stdout
    assert "ended with exit status 7" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_cli_takes_everything_down(
    sleeping_cli: tuple[subprocess.Popen[str], list[str], list[int]], number: signal.Signals
) -> None:
    process, own, ranks = sleeping_cli
    process.send_signal(number)
    assert process.wait(10) == 128 + number
    assert not set(own) & set(namespaces())
    assert all(ended(pid) for pid in ranks)


def test_clean_removes_what_a_killed_run_left_and_nothing_else(
    sleeping_cli: tuple[subprocess.Popen[str], list[str], list[int]],
) -> None:
    process, own, ranks = sleeping_cli
    with netlab.hosts(1, "none") as lab:
        process.kill()
        process.wait()
        assert set(own) <= set(namespaces())
        done = subprocess.run([*COMMAND, "--clean"], cwd=ROOT, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr
        assert all(f"removed {name}" in done.stdout for name in own)
        assert not set(own) & set(namespaces())
        assert lab.namespace(0) in namespaces()
    wait_until(lambda: all(ended(pid) for pid in ranks), "the ranks of the killed run to end")
