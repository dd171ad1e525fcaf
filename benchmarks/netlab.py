"""N hosts on one Linux machine: network namespaces on a switch, joined by links of a chosen rate.

    host 0  eth0 --(veth)-- port0 \\
    host 1  eth0 --(veth)-- port1  +- bridge, in a namespace of its own
    ...                           /

Every host limits what it sends at its own end of the link (`tc ... tbf`); the two directions do not share
a limit, so a link is full duplex. What a host receives is not limited again: three hosts that send to a
fourth at once reach it at three times the rate, which a real switch port would not let through.

"loopback" in place of a rate: the same ranks on this machine's own loopback, without namespaces, limits or root.

Else it needs root and iproute2. All interfaces and addresses exist inside the namespaces only: nothing of it shows
in the machine's own `ip link`, and nothing leaves the machine.

    python -m benchmarks.netlab --hosts 2 --rate 1gbit -- python script.py
    python -m benchmarks.netlab --clean
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

LOOPBACK = "loopback"
PREFIX = "fapnet"  # a namespace is PREFIX-<pid>-<start time of that process>-<lab>-<h0, h1, ... or switch>

# What a TCP stream can carry of a rate as tbf counts it: a full frame is 14 (Ethernet) + 1500 bytes, of which
# 20 are IP and 32 TCP with timestamps. tbf counts every segment of a GSO packet with its headers.
PAYLOAD_SHARE = 1448 / 1514

# The bucket must hold the largest GSO packet (64 KiB and headers), or tbf cuts packets up itself: at 1gbit,
# both ways at once, on two cores, 256kb, 128kb and 72kb reach 0.999 of goodput(), 32kb 0.76 and 8kb 0.55.
# Leave TSO and GSO on: without them the same hosts reach 0.27, with tbf hardly ever holding a packet back.
# An idle link fills its bucket and then sends that much for free: a lone exchange of 0.5 MB each way takes
# 0.61 of its ideal time, 1 MB 0.87, 4.5 MB 0.98 (72kb: 0.93, 0.96, 0.99). Distrust shares of small messages.
# Slower links get less, or they would carry whole messages for free; cutting packets up costs nothing there.
BURST_BYTES = 256 << 10
BURST_SECONDS = 2.1e-3

_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-\d+-(?:h\d+|switch)")
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TIMED_OUT = 124  # exit status, as timeout(1) has it
_labs = itertools.count()


class NetlabError(RuntimeError):
    """The lab cannot be built or removed here; the message says what is missing."""


class RankError(NetlabError):
    """A rank failed or did not end in time.

    `rank` is the first to fail (or, out of time, the first still running), `status` its exit status
    (128 + n if signal n ended it, 124 if time ran out), `stderr` what it wrote there.
    """

    def __init__(self, rank: int, status: int, what: str, stderr: str) -> None:
        tail = f":\n{stderr[-4000:].rstrip()}" if stderr.strip() else ""
        super().__init__(f"rank {rank} {what}{tail}")
        self.rank, self.status, self.stderr = rank, status, stderr


def parse_rate(text: str) -> float:
    """Bits per second of a rate as tc writes it ("1gbit", "2.5gbit"); inf for "none" and "unlimited".

    Raises ValueError for anything else, tc's "mbps" included: it means bytes there and bits elsewhere.
    """
    cleaned = text.strip().lower()
    if cleaned in ("none", "unlimited"):
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", cleaned)
    if match is None:
        raise ValueError(f"rate {text!r} is not a number with kbit, mbit or gbit (such as 1gbit), nor none")
    bits = float(match[1]) * _UNITS[match[2]]
    if not 1e3 <= bits <= 1e11:
        raise ValueError(f"rate {text!r} must lie between 1kbit and 100gbit; write none for no limit")
    return bits


def burst(bits: float) -> int:
    """Bytes of the bucket of a link of `bits` per second: BURST_SECONDS of it, from 16 KiB to BURST_BYTES."""
    return round(min(BURST_BYTES, max(16 << 10, bits / 8 * BURST_SECONDS)))


def goodput(rate: str) -> float:
    """Payload bits per second that one direction of a link of that rate carries over TCP; inf for "none", "loopback".

    On a real Ethernet of that rate it is 1448/1538: preamble, checksum and gap count there, but not for tbf.
    """
    return math.inf if rate == LOOPBACK else parse_rate(rate) * PAYLOAD_SHARE


@dataclass(frozen=True)
class Lab:
    """The hosts of one `hosts()` block."""

    prefix: str
    count: int
    rate: str
    _runs: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def namespace(self, rank: int) -> str:
        return f"{self.prefix}-h{rank}"

    def address(self, rank: int) -> str:
        return "127.0.0.1" if self.rate == LOOPBACK else f"10.77.0.{rank + 1}"

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """That command, on that rank's host."""
        return [*command] if self.rate == LOOPBACK else ["ip", "netns", "exec", self.namespace(rank), *command]

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float = 300.0,
        env: Mapping[str, str] | None = None,
        capture: bool = True,
        on_line: Callable[[str], None] | None = None,
    ) -> list[str]:
        """Run one process per host and return what each rank wrote to stdout (empty with capture=False).

        on_line is given every line that rank 0 writes to stdout as it comes, from a thread of its own; rank 0's
        output is then empty in the result.

        Each process finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and
        OMP_NUM_THREADS=1 in its environment (`env` is added last) and is bound to one core, dealt round
        robin: ranks share a core where there are more ranks than cores. With capture=False the ranks write
        straight to this process's stdout and stderr.

        Raises RankError at the first rank that fails, or after `timeout` seconds. However the call ends,
        no process that it started is left.
        """
        cores = sorted(os.sched_getaffinity(0))
        # A new one for each run: the last one may linger in TIME_WAIT.
        port = _free_port() if self.rate == LOOPBACK else 29500 + next(self._runs)
        ranks: list[subprocess.Popen[bytes]] = []
        with contextlib.ExitStack() as stack:
            files = [
                [stack.enter_context(tempfile.TemporaryFile()) if capture else None for _ in range(2)]
                for _ in range(self.count)
            ]
            stack.callback(self._kill, ranks)
            for rank, (out, err) in enumerate(files):
                live = rank == 0 and on_line is not None
                variables = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(self.count),
                    "LOCAL_RANK": str(rank if self.rate == LOOPBACK else 0),
                    "LOCAL_WORLD_SIZE": str(self.count if self.rate == LOOPBACK else 1),
                    "MASTER_ADDR": self.address(0),
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo" if self.rate == LOOPBACK else "eth0",
                    "OMP_NUM_THREADS": "1",
                }
                with _bound_to(cores[rank % len(cores)]):  # before the start: every thread inherits it
                    ranks.append(
                        subprocess.Popen(
                            self.command(rank, command),
                            env={**os.environ, **variables, **(env or {})},
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE if live else out,
                            stderr=err,
                            start_new_session=True,  # Ctrl-C reaches only us, and we end the ranks
                        )
                    )
            if on_line is not None:
                reader = threading.Thread(target=_read, args=(ranks[0].stdout, on_line), daemon=True)
                reader.start()
            self._wait(ranks, [err for _, err in files], timeout, stack)
            if on_line is not None:
                reader.join(10)
            return [_text(out) for out, _ in files]

    def measure_rate(self, seconds: float = 1.0) -> tuple[float, float]:
        """Payload bits per second host 0 -> 1 and host 1 -> 0, both at once over one TCP connection."""
        if self.count < 2:
            raise NetlabError("measure_rate needs two hosts: build the lab with count=2 or more")
        command = [sys.executable, str(Path(__file__).resolve()), "--probe", str(seconds)]
        received = self.run(command, timeout=seconds + 30)
        return float(received[1]), float(received[0])

    def _wait(
        self,
        ranks: list[subprocess.Popen[bytes]],
        errors: list[IO[bytes] | None],
        timeout: float,
        stack: contextlib.ExitStack,
    ) -> None:
        # pidfds, not a polling loop: peers of a crashed rank fail a few milliseconds after it, and the
        # error should name the one that went first.
        running: dict[int, int] = {}
        for rank, process in enumerate(ranks):
            pidfd = os.pidfd_open(process.pid)
            stack.callback(os.close, pidfd)
            running[pidfd] = rank
        deadline = time.monotonic() + timeout
        while running:
            ready, _, _ = select.select(list(running), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                rank = min(running.values())
                what = f"was still running after {timeout:g} s"
                raise RankError(rank, _TIMED_OUT, what, _text(errors[rank]))
            for pidfd in ready:
                rank = running.pop(pidfd)
                code = ranks[rank].wait()
                if code:
                    what = f"ended with exit status {code}" if code > 0 else f"was ended by signal {-code}"
                    raise RankError(rank, code if code > 0 else 128 - code, what, _text(errors[rank]))

    def _kill(self, ranks: list[subprocess.Popen[bytes]]) -> None:
        for process in ranks:
            process.kill()
        for rank, process in enumerate(ranks):  # children of the ranks
            if self.rate == LOOPBACK:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            else:
                _kill_inside(self.namespace(rank))
        for process in ranks:
            process.wait()


@contextlib.contextmanager
def hosts(count: int = 2, rate: str = "1gbit") -> Iterator[Lab]:
    """Build `count` hosts whose links run at `rate` each way, and remove them however the block ends.

    rate "loopback": nothing is built, every rank runs on this machine.

    SIGTERM and SIGHUP raise SystemExit inside the block (if it runs in the main thread), so that they clean
    up as Ctrl-C does. Only SIGKILL leaves hosts behind; `clean()` finds those.

    Raises ValueError for a bad count or rate, NetlabError without root or iproute2, or where the kernel
    refuses (no namespaces, bridge or tbf).
    """
    if not 1 <= count <= 250:
        raise ValueError(f"count is {count}, but a lab has 1 to 250 hosts")
    if rate == LOOPBACK:
        with _signals(_exit_on_signal, signal.SIGTERM, signal.SIGHUP):
            yield Lab("", count, rate)
        return
    bits = parse_rate(rate)
    _require_root_and_iproute2()
    pid = os.getpid()
    lab = Lab(f"{PREFIX}-{pid}-{_start_time(pid)}-{next(_labs)}", count, rate)
    with _signals(_exit_on_signal, signal.SIGTERM, signal.SIGHUP):
        try:
            _build(lab, bits)
            yield lab
        finally:
            with _signals(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                _remove([name for name in _namespaces() if name.startswith(lab.prefix + "-")])


def clean() -> list[str]:
    """Remove the namespaces (and the processes in them) whose owner no longer runs; returns their names."""
    _require_root_and_iproute2()
    stale = []
    for name in _namespaces():
        match = _NAME.fullmatch(name)
        if match and _start_time(int(match[1])) != match[2]:
            stale.append(name)
    _remove(stale)
    return stale


def _build(lab: Lab, bits: float) -> None:
    switch = f"{lab.prefix}-switch"
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for rank in range(lab.count):
        host, port = lab.namespace(rank), f"port{rank}"
        _ip("netns", "add", host)
        _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", host)
        _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", host, "address", "add", f"{lab.address(rank)}/24", "dev", "eth0")
        _ip("-n", host, "link", "set", "lo", "up")
        _ip("-n", host, "link", "set", "eth0", "up")
        if bits < math.inf:
            tbf = ("tbf", "rate", f"{round(bits)}bit", "burst", f"{burst(bits)}b", "latency", "50ms")
            _command("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", *tbf)


def _remove(names: list[str]) -> None:
    failures = []
    for name in names:
        try:
            _kill_inside(name)
            _ip("netns", "delete", name)  # its interfaces, and so their peers, go with it
        except NetlabError as error:
            failures.append(str(error))
    if failures:
        raise NetlabError(f"could not remove every host, try --clean later: {'; '.join(failures)}")


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.startswith(f"{PREFIX}-")]


def _kill_inside(namespace: str) -> None:
    for pid in _ip("netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _ip(*arguments: str) -> str:
    return _command("ip", *arguments)


def _command(*command: str) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip() or f"exit status {done.returncode}"
        raise NetlabError(f"`{' '.join(command)}` failed: {reason}")
    return done.stdout


def _require_root_and_iproute2() -> None:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise NetlabError("network namespaces need Linux and root: run this as root")
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        names = " and ".join(missing)
        raise NetlabError(f"{names} not found: install iproute2 (apt-get install -y iproute2)")


def _start_time(pid: int) -> str:
    """When the process started, in clock ticks since boot; "" if there is none: tells a reused pid apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[19]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _read(stream: IO[bytes] | None, on_line: Callable[[str], None]) -> None:
    assert stream is not None
    with stream:
        for line in stream:
            on_line(line.decode(errors="replace").rstrip("\n"))


def _text(file: IO[bytes] | None) -> str:
    if file is None:
        return ""
    file.seek(0)
    return file.read().decode(errors="replace")


@contextlib.contextmanager
def _bound_to(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _exit_on_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals(handler: Callable[[int, Any], None] | signal.Handlers, *numbers: int) -> Iterator[None]:
    """Handle the signals so in the block; not those ignored before (nohup), nor outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {n: h for n in numbers if (h := signal.getsignal(n)) not in (signal.SIG_IGN, None)}
    try:
        for number in kept:
            signal.signal(number, handler)
        yield
    finally:
        for number, before in kept.items():
            signal.signal(number, before)


def _probe(seconds: float) -> None:
    """One end of measure_rate, in its host: prints the payload bits per second that it received."""
    rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank > 1:
        return
    if rank == 0:
        with socket.create_server(address) as server:
            server.settimeout(20)
            connection, _ = server.accept()
    else:
        connection = _connect(address, time.monotonic() + 20)
    connection.settimeout(20)
    start = time.monotonic()
    settled = start + 0.3  # past slow start and the first full bucket

    def send() -> None:
        block = bytes(1 << 18)
        while time.monotonic() < settled + seconds + 0.1:  # longer than the peer counts
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    buffer = bytearray(1 << 18)
    received, first, last = 0, 0.0, 0.0
    while size := connection.recv_into(buffer):
        now = time.monotonic()
        if first and now <= settled + seconds:
            received, last = received + size, now
        elif not first and now >= settled:
            first = now
    sender.join()
    connection.close()
    print(8 * received / (last - first) if last > first else 0.0)


def _connect(address: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status of the first failing rank, 124 out of time, 2 for bad usage or no lab here."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.netlab",
        usage="%(prog)s [--hosts N] [--rate RATE] [--timeout S] -- COMMAND ...\n       %(prog)s --clean",
        description="Run one process per host, on hosts made of network namespaces with rate-limited links.",
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many hosts (default 2)")
    parser.add_argument("--rate", default="1gbit", help="each link's rate each way, none or loopback (default 1gbit)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds (default 300)")
    parser.add_argument("--clean", action="store_true", help="remove what crashed runs left behind")
    parser.add_argument("--probe", type=float, help=argparse.SUPPRESS)
    options, command = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    try:
        if options.probe is not None:
            _probe(options.probe)
        elif options.clean:
            print("\n".join(f"removed {name}" for name in clean()) or "nothing to remove")
        elif not command:
            parser.error("no command: put it behind --")
        else:
            with hosts(options.hosts, options.rate) as lab:
                lab.run(command, timeout=options.timeout, capture=False)
    except RankError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return error.status
    except (NetlabError, ValueError) as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
