"""The log of a run: FLASH_ALLREDUCE_LOG=FILE, JSON lines that `flash-allreduce report` reads (docs/use/monitoring.md).

Rank 0 writes; with %r in the name every rank writes its own file. The first line describes the program, the others have
each site's counts since the line before. A thread writes them, so that a slow disk does not block the training: a
second after the start, then less and less often, at most a minute apart. Without the variable there is no thread.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.codec.format import WIRE_VERSION
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.counters import Counters, sqnr_db

LOG_VERSION = 1
#: How every log begins; a file that begins otherwise is not written to.
BEGINNING = f'{{"flash_allreduce_log": {LOG_VERSION},'
LONGEST_PAUSE = 60.0  # seconds

StepSource = Callable[[], int | None]

_log = logging.getLogger("flash_allreduce_plugin")
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_running: RunLog | None = None
_finished_steps: StepSource | None = None


def start(config: FlashConfig, step: StepSource | None = None) -> None:
    """Begin the log that the environment asks for, if this rank is to write it; once it runs, add `config` to it.

    step: gives the number of finished training steps, None while it is unknown; the last one given counts. Does nothing
    without the variable. While the rank is not known nothing happens: call it again later. Raises ConfigError if the
    file cannot be written.
    """
    if not os.environ.get(environment.LOG):
        return
    global _running, _finished_steps
    with _lock:
        _finished_steps = _finished_steps if step is None else step
        if _running is None or _running.pid != os.getpid():
            ranks = rank_and_world()
            name = os.environ[environment.LOG]
            if ranks is None or (ranks[0] != 0 and "%r" not in name):
                return
            _running = RunLog(name.replace("%r", str(ranks[0])), *ranks, config)
        _running.add(config)


def close() -> None:
    """Write the last line. Does nothing without a log. The end of the process calls it too."""
    global _running
    with _lock:
        running, _running = _running, None
    if running is not None and running.pid == os.getpid():
        running.close()


def decided(decision: dict[str, Any]) -> None:
    """Add a decision of enabled "auto". Does nothing if no log runs."""
    with _lock:
        if _running is not None and _running.pid == os.getpid():
            _running.decided(decision)


def refuse_unwritable(path: str) -> None:
    """Raises ConfigError if `path` cannot become such a log; leaves no file that was not there."""
    new = not os.path.lexists(path)
    os.close(_open(path)[0])
    if new:
        os.unlink(path)


class RunLog:
    """One file that is being written."""

    def __init__(self, path: str, rank: int, world: int, config: FlashConfig) -> None:
        self.pid = os.getpid()
        self._step: int | None = None  # as it was last known
        self._path = path
        self._started = time.monotonic()
        self._configs = {config}
        self._told: dict[str, Counters] = {}  # the counts of earlier lines
        self._told_beside: dict[str, Counters] = {}
        self._warned = False
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._file, self._cut_off = _open(path)
        try:
            self._write(_header(rank, world, config))
        except OSError as error:
            os.close(self._file)
            raise _cannot_be_written(path, error.strerror) from error
        self._thread = threading.Thread(target=self._run, name="flash_allreduce_log", daemon=True)
        self._thread.start()
        # Not atexit, which does not run in processes that multiprocessing forked.
        Finalize(None, close, exitpriority=0)

    def add(self, config: FlashConfig) -> None:
        """Say so if a configuration is new."""
        if config not in self._configs and self._line("configuration", {"configuration": config.to_dict()}):
            self._configs.add(config)

    def decided(self, decision: dict[str, Any]) -> None:
        step = None if _finished_steps is None else _finished_steps()
        self._line("auto", {**({} if step is None else {"step": step}), **decision})

    def close(self) -> None:
        self._closing.set()
        self._thread.join(10)
        self._counts("end")
        os.close(self._file)

    def _run(self) -> None:
        while not self._closing.wait(min(LONGEST_PAUSE, max(1.0, (time.monotonic() - self._started) / 50))):
            self._counts("interval")

    def _counts(self, kind: str) -> None:
        """The counts since the last line; without any there is no line, except the last."""
        now, beside = counters.totals(), counters.beside()
        sites = counters.difference(now, self._told)
        others = counters.difference(beside, self._told_beside)
        if not sites and not others and kind != "end":
            return
        step = None if _finished_steps is None else _finished_steps()
        self._step = self._step if step is None else step  # the source of the steps may no longer exist at the end
        fields: dict[str, Any] = {} if self._step is None else {"step": self._step}
        if others:
            fields["beside"] = {name: {"calls": c.calls, "bytes_sent": c.bytes_sent} for name, c in others.items()}
        if self._line(kind, {**fields, "sites": {name: _site(counters) for name, counters in sites.items()}}):
            self._told, self._told_beside = now, beside

    def _line(self, kind: str, fields: dict[str, Any]) -> bool:
        """Write a line. After a failed write a later line has the counts, and the training continues."""
        try:
            self._write({"kind": kind, "seconds": round(time.monotonic() - self._started, 3), **fields})
        except OSError as error:
            if not self._warned:
                _log.warning(
                    "%s: cannot be written (%s); the training continues, and so do the attempts",
                    self._path,
                    error.strerror,
                )
            self._warned = True
            return False
        return True

    def _write(self, line: dict[str, Any]) -> None:
        """Append a line with one write, so that an interrupted write damages no other line."""
        data = (b"\n" if self._cut_off else b"") + json.dumps(line).encode() + b"\n"
        with self._writing:
            self._cut_off = True
            if os.write(self._file, data) < len(data):
                raise OSError(0, "the disk may be full")
            self._cut_off = False


def _open(path: str) -> tuple[int, bool]:
    """A descriptor, and whether the last line that is there was cut off. A log that exists is continued."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _cannot_be_written(path, error.strerror) from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise _cannot_be_written(path, "it is no regular file")
        size = os.fstat(file).st_size
        if size and os.pread(file, len(BEGINNING), 0) != BEGINNING.encode():
            raise _cannot_be_written(path, "it is there already and no log of this version")
        return file, size > 0 and os.pread(file, 1, size - 1) != b"\n"
    except BaseException:
        os.close(file)
        raise


def _cannot_be_written(path: str, why: str | None) -> ConfigError:
    return ConfigError(
        f"{environment.LOG}: {path} cannot be written ({why}); expected a file that is new, empty or such a log, in a "
        "folder that exists."
    )


def rank_and_world() -> tuple[int, int] | None:
    """Return this rank and the number of ranks, None while they are unknown.

    A launcher's variables go before a group of one rank, which each rank may make to convert weights.
    """
    import torch.distributed as dist  # here, because a report of a log needs no torch

    made = None
    if dist.is_available() and dist.is_initialized():
        made = dist.get_rank(), dist.get_world_size()
        if made[1] > 1:
            return made
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return made


def _header(rank: int, world: int, config: FlashConfig) -> dict[str, Any]:
    return {
        "flash_allreduce_log": LOG_VERSION,
        "kind": "start",
        "time": time.time(),
        "rank": rank,
        "world": world,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": _versions(),
        "wire": WIRE_VERSION,
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(environment.PREFIX)
        },
        "configuration": config.to_dict(),
    }


def _versions() -> dict[str, str]:
    """Return the versions of Python, this package, torch, and the loaded frameworks."""
    packages = {"flash_allreduce_plugin": "flash-allreduce-plugin", "torch": "torch", "megatron.core": "megatron-core"}
    packages |= {"deepspeed": "deepspeed", "transformer_engine": "transformer-engine", "apex": "apex"}
    found = {"python": platform.python_version()}
    for module, package in packages.items():
        if module in sys.modules:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:  # a checkout on the path
                found[package] = str(getattr(sys.modules[module], "__version__", "unknown"))
    return found


def _site(counters: Counters) -> dict[str, Any]:
    """The counters of a site, for a line: optional keys that are zero or unknown are left out."""
    fields: dict[str, Any] = {
        "calls": counters.calls,
        "quantized": counters.quantized,
        "full_precision": dict(counters.full_precision),
        "bytes_sent": counters.bytes_sent,
        "bytes_full_precision": counters.bytes_full_precision,
    }
    if counters.bytes_plain:
        fields["bytes_plain"] = counters.bytes_plain
    if counters.bits is not None:
        fields["bits"] = counters.bits
    if counters.bytes_between_nodes:
        fields["bytes_between_nodes"] = counters.bytes_between_nodes
    if counters.residuals_dropped:
        fields["residuals_dropped"] = dict(counters.residuals_dropped)
    if counters.guard:
        fields["guard"] = dict(counters.guard)
    if counters.measured and math.isfinite(counters.signal) and math.isfinite(counters.noise):
        fields["measured"], fields["signal"], fields["noise"] = counters.measured, counters.signal, counters.noise
        decibels = sqnr_db(counters.signal, counters.noise)
        fields["sqnr_db"] = round(decibels, 3) if math.isfinite(decibels) else None
    return fields
