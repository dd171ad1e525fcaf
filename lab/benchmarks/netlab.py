"""N hosts on one Linux machine: network namespaces on a switch, joined by links of a chosen rate.

    host 0  eth0 --(veth)-- port0 \\
    host 1  eth0 --(veth)-- port1  +- bridge, in a namespace of its own
    ...                           /

Every host limits its sends at its end of the link (`tc ... tbf`). The two directions do not share a limit, so a link is
full duplex. Receives are not limited: three hosts that send to a fourth reach it at three times the rate, which a real
switch port would not allow.

The lab needs root and iproute2. All interfaces and addresses exist inside the namespaces only: the machine's `ip link`
does not show them, and no packet leaves the machine.

    python -m lab.benchmarks.netlab --hosts 2 --rate 1gbit -- python script.py
    python -m lab.benchmarks.netlab --clean
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flash_allreduce_plugin.cli import launch
from flash_allreduce_plugin.cli.launch import RankError

PREFIX = "fapnet"  # a namespace is PREFIX-<pid>-<start time of that process>-<lab>-<h0, h1, ... or switch>

# The payload share of a rate over TCP, as tbf counts: a full frame is 14 (Ethernet) + 1500 bytes, with 20 bytes of IP
# and 32 of TCP with timestamps. tbf counts every segment of a GSO packet with its headers.
PAYLOAD_SHARE = 1448 / 1514

# The bucket must hold the largest GSO packet (64 KiB and headers), or tbf cuts packets up itself: at 1gbit,
# in both directions together, on two cores, 256kb, 128kb and 72kb reach 0.999 of goodput(), 32kb 0.76 and 8kb 0.55.
# Leave TSO and GSO on: without them the same hosts reach 0.27, with tbf hardly ever holding a packet back.
# An idle link fills its bucket and then sends that much for free: a lone exchange of 0.5 MB each way takes
# 0.61 of its ideal time, 1 MB 0.87, 4.5 MB 0.98 (72kb: 0.93, 0.96, 0.99). Distrust shares of small messages.
# Slower links get less, or they would carry whole messages for free; cutting packets up costs nothing there.
BURST_BYTES = 256 << 10
BURST_SECONDS = 2.1e-3

_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-\d+-(?:h\d+|switch)")
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_labs = itertools.count()


class NetlabError(RuntimeError):
    """The lab cannot be built or removed here. The message has the reason."""


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
    """Payload bits per second that one direction of a link of that rate carries over TCP; inf for "none".

    On a real Ethernet of that rate it is 1448/1538: preamble, checksum and gap count there, but not for tbf.
    """
    return parse_rate(rate) * PAYLOAD_SHARE


@dataclass(frozen=True)
class Lab(launch.Ranks):
    """The hosts of one `hosts()` block, with one rank on each."""

    prefix: str
    _runs: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def namespace(self, rank: int) -> str:
        return f"{self.prefix}-h{rank}"

    def address(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def port(self) -> int:
        return 29500 + next(self._runs)  # a new one for each run: the last one may linger in TIME_WAIT

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(rank), *command]

    def variables(self, rank: int) -> dict[str, str]:
        return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0"}

    def kill_children(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        _kill_inside(self.namespace(rank))

    def measure_rate(self, seconds: float = 1.0) -> tuple[float, float]:
        """Return the payload bits a second host 0 -> 1 and host 1 -> 0, together over one TCP connection."""
        if self.count < 2:
            raise NetlabError("measure_rate needs two hosts: build the lab with count=2 or more")
        command = [sys.executable, str(Path(__file__).with_name("netlab_probe.py").resolve()), str(seconds)]
        received = self.run(command, timeout=seconds + 30)
        return float(received[1]), float(received[0])


def set_rate(rate: str) -> None:
    """Set another rate for this host, the namespace of the process ("none": no limit).

    Raises ValueError for a bad rate, NetlabError where tc refuses.
    """
    bits = parse_rate(rate)
    subprocess.run(["tc", "qdisc", "del", "dev", "eth0", "root"], capture_output=True)  # there may be none
    if bits != math.inf:
        _command("tc", "qdisc", "add", "dev", "eth0", "root", *_limit(bits))


def _limit(bits: float) -> tuple[str, ...]:
    return ("tbf", "rate", f"{round(bits)}bit", "burst", f"{burst(bits)}b", "latency", "50ms")


@contextlib.contextmanager
def hosts(count: int = 2, rate: str = "1gbit") -> Iterator[Lab]:
    """Build `count` hosts with links of `rate` in each direction, and remove them at the end of the block.

    SIGTERM and SIGHUP raise SystemExit inside the block (if it runs in the main thread), so that they clean
    up as Ctrl-C does. Only SIGKILL leaves hosts behind; `clean()` finds those.

    Raises ValueError for a bad count or rate, NetlabError without root or iproute2, or where the kernel
    refuses (no namespaces, bridge or tbf).
    """
    launch.check_count(count)
    bits = parse_rate(rate)
    _require_root_and_iproute2()
    pid = os.getpid()
    lab = Lab(count, f"{PREFIX}-{pid}-{_start_time(pid)}-{next(_labs)}")
    with launch.ending_on_signals():
        try:
            _build(lab, bits)
            yield lab
        finally:
            with launch.handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                _remove([name for name in _namespaces() if name.startswith(lab.prefix + "-")])


def clean() -> list[str]:
    """Remove the namespaces, and the processes in them, of owners that no longer run. Return their names."""
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
            tbf = _limit(bits)
            _command("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", *tbf)


def _remove(names: list[str]) -> None:
    failures = []
    for name in names:
        try:
            _kill_inside(name)
            _ip("netns", "delete", name)  # removes its interfaces and their peers too
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


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status of the first failing rank, 124 out of time, 2 for bad usage or no lab here."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m lab.benchmarks.netlab",
        usage="%(prog)s [--hosts N] [--rate RATE] [--timeout S] -- COMMAND ...\n       %(prog)s --clean",
        description="Run one process per host, on hosts made of network namespaces with rate-limited links.",
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many hosts (default 2)")
    parser.add_argument("--rate", default="1gbit", help="rate of each link in each direction, or none (default 1gbit)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds (default 300)")
    parser.add_argument("--clean", action="store_true", help="remove what crashed runs left behind")
    options, command = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    try:
        if options.clean:
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
