"""Start one process per rank on this machine, and end them together.

lab/benchmarks/netlab.py does the same on hosts with rate-limited links.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

LOOPBACK = "loopback"  # in place of a link's rate: ranks on this machine, without a limit
_TIMED_OUT = 124  # exit status, as of timeout(1)


class RankError(RuntimeError):
    """A rank failed or did not end in time.

    rank: the first to fail; after the timeout, the first still running. status: its exit status (128 + n if signal n
    ended it, 124 after the timeout). stderr: its output there.
    """

    def __init__(self, rank: int, status: int, what: str, stderr: str) -> None:
        tail = f":\n{stderr[-4000:].rstrip()}" if stderr.strip() else ""
        super().__init__(f"rank {rank} {what}{tail}")
        self.rank, self.status, self.stderr = rank, status, stderr


@dataclass(frozen=True)
class Ranks:
    """`count` ranks on this machine."""

    count: int

    def address(self, rank: int) -> str:
        return "127.0.0.1"

    def port(self) -> int:
        """Return a free port for the rendezvous of one run."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` as this rank."""
        return [*command]

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables of a rank."""
        return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.count), "GLOO_SOCKET_IFNAME": "lo"}

    def kill_children(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float = 300.0,
        env: Mapping[str, str] | None = None,
        capture: bool = True,
        on_line: Callable[[str], None] | None = None,
    ) -> list[str]:
        """Run one process per rank and return the stdout of each (empty with capture=False).

        on_line: receives every line of rank 0's stdout, in a separate thread; the result then has no output of rank 0.

        Each process has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and
        OMP_NUM_THREADS=1 in its environment (`env` is added last) and is bound to one core, round robin: with more
        ranks than cores, ranks share a core. With capture=False the ranks write to this process's stdout and stderr.

        Raises RankError at the first rank that fails, or after `timeout` seconds. The call never leaves a process
        behind.
        """
        port = self.port()
        ranks: list[subprocess.Popen[bytes]] = []
        with contextlib.ExitStack() as stack:
            files = [
                [stack.enter_context(tempfile.TemporaryFile()) if capture else None for _ in range(2)]
                for _ in range(self.count)
            ]
            stack.callback(self._kill, ranks)
            for rank, (out, err) in enumerate(files):
                live = rank == 0 and on_line is not None
                ranks.append(self._start(rank, command, port, env or {}, subprocess.PIPE if live else out, err))
            if on_line is not None:
                reader = threading.Thread(target=_read, args=(ranks[0].stdout, on_line), daemon=True)
                reader.start()
            self._wait(ranks, [err for _, err in files], timeout, stack)
            if on_line is not None:
                reader.join(10)
            return [_text(out) for out, _ in files]

    def _start(
        self,
        rank: int,
        command: Sequence[str],
        port: int,
        env: Mapping[str, str],
        out: IO[bytes] | int | None,
        err: IO[bytes] | None,
    ) -> subprocess.Popen[bytes]:
        cores = sorted(os.sched_getaffinity(0))
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            **self.variables(rank),
        }
        with _bound_to(cores[rank % len(cores)]):  # before the start, so that every thread inherits it
            return subprocess.Popen(
                self.command(rank, command),
                env={**os.environ, **variables, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the ranks
            )

    def _wait(
        self,
        ranks: list[subprocess.Popen[bytes]],
        errors: list[IO[bytes] | None],
        timeout: float,
        stack: contextlib.ExitStack,
    ) -> None:
        # pidfds, not a polling loop: peers of a crashed rank fail a few milliseconds later, and the error should name
        # the first rank.
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
        for rank, process in enumerate(ranks):
            self.kill_children(rank, process)
        for process in ranks:
            process.wait()


@contextlib.contextmanager
def on_this_machine(count: int) -> Iterator[Ranks]:
    """Yield `count` ranks. SIGTERM and SIGHUP raise SystemExit inside the block, so that they clean up as Ctrl-C does.

    Raises ValueError for a bad count.
    """
    check_count(count)
    with ending_on_signals():
        yield Ranks(count)


def check_count(count: int) -> None:
    if not 1 <= count <= 250:
        raise ValueError(f"count is {count}; expected 1 to 250 ranks")


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


def ending_on_signals() -> contextlib.AbstractContextManager[None]:
    """Raise SystemExit on SIGTERM and SIGHUP in the block, in the main thread."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    return handling(leave, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def handling(handler: Callable[[int, Any], None] | signal.Handlers, *numbers: int) -> Iterator[None]:
    """Set a signal handler in the block, except for ignored signals (nohup) and outside the main thread."""
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
