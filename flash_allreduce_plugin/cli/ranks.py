"""The ranks of a measuring command: those of a launcher such as torchrun, or its own.

A rank runs a function `measure(settings, say)`, named "module:function". settings: JSON. say(**content): sends a
message of rank 0 for the progress. The return value of rank 0, in JSON types, is the result. The process group exists
before measure is called.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flash_allreduce_plugin.cli import checkout, launch
from flash_allreduce_plugin.cli.launch import LOOPBACK

Say = Callable[..., None]
OnMessage = Callable[[dict[str, Any]], None]

_MARK = "flash-allreduce "  # the start of a line of rank 0 that is a message
_TIMEOUT = datetime.timedelta(seconds=120)  # of a collective


class RanksError(RuntimeError):
    """A rank failed, or the ranks could not be started. The message has the rank and the reason."""


def launched() -> bool:
    """Return True if a launcher has started this process as one of its ranks."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def speaks() -> bool:
    """Return True if this process prints: the command itself, or rank 0 of a launcher."""
    return not launched() or os.environ["RANK"] == "0"


def run(
    measure: str,
    settings: Mapping[str, Any],
    *,
    world_size: int,
    link: str = LOOPBACK,
    device: str = "cpu",
    on_message: OnMessage = lambda content: None,
    timeout: float = 3600.0,
) -> Any:
    """Run `measure` in every rank. Return the result of rank 0, or None in a launcher's other ranks.

    Args:
        world_size, link: of the command's own ranks: on this machine, or with a rate such as "1gbit" on as many hosts
            (lab/benchmarks/netlab.py; needs a checkout and root). Not used under a launcher.
        device: "cpu" (gloo) or "cuda" (NCCL, a GPU a rank).
        on_message: receives the messages of rank 0, in a separate thread.
        timeout: seconds of the whole run, for the command's own ranks.

    Raises:
        RanksError: a rank failed, or the hosts cannot be created here. None of the command's own ranks is left.
        ValueError: a bad world size or link, or a link without a checkout.
    """
    if launched():
        return _measure(measure, settings, device, on_message)
    results: list[Any] = []

    def on_line(line: str) -> None:
        if line.startswith(_MARK):
            message = json.loads(line.removeprefix(_MARK))
            if "result" in message:
                results.append(message["result"])
            else:
                on_message(message["said"])

    command = [sys.executable, "-m", __name__, measure, json.dumps(settings), device]
    with _hosts(world_size, link) as hosts:
        try:
            hosts.run(command, timeout=timeout, on_line=on_line)
        except launch.RankError as error:
            raise RanksError(str(error)) from error
    if not results:
        raise RanksError("rank 0 ended without a result")
    return results[0]


@contextlib.contextmanager
def _hosts(world_size: int, link: str) -> Iterator[launch.Ranks]:
    if link == LOOPBACK:
        with launch.on_this_machine(world_size) as here:
            yield here
        return
    checkout.need(f"--link {link}", "netlab")
    from lab.benchmarks import netlab

    try:
        with netlab.hosts(world_size, link) as lab:
            yield lab
    except netlab.NetlabError as error:
        raise RanksError(str(error)) from error


def _measure(measure: str, settings: Mapping[str, Any], device: str, on_message: OnMessage) -> Any:
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=_TIMEOUT)
    rank = dist.get_rank()

    def say(**content: Any) -> None:
        if rank == 0:
            on_message(content)

    module, _, function = measure.partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(dict(settings), say)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return result if rank == 0 else None


def _rank(measure: str, settings: str, device: str) -> None:
    """Run one of the command's own ranks. Ends with os._exit: gloo's threads can crash at the interpreter's end."""

    def tell(**message: Any) -> None:
        print(_MARK + json.dumps(message), flush=True)

    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    status = 0
    try:
        result = _measure(measure, json.loads(settings), device, lambda content: tell(said=content))
        if os.environ["RANK"] == "0":
            tell(result=result)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    _rank(*sys.argv[1:])
