"""Between the ranks of a benchmark and the process that starts them: how they are started, and one result.

The process starts this module on every rank, through torchrun or on the hosts of netlab, with the name of a function
and its settings. The rank calls the function, and rank 0 prints the result.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lab.benchmarks.command import module

_RESULT = "RESULT "
#: Called in every rank with the settings. It starts the process group.
InRank = Callable[[argparse.Namespace], Any]


def command(in_rank: InRank, arguments: argparse.Namespace, **more: Any) -> list[str]:
    """Return the arguments of python in a rank. The settings are the options and `more`; a path becomes text."""
    name = module() if in_rank.__module__ == "__main__" else in_rank.__module__
    settings = json.dumps({**vars(arguments), **more}, default=str)
    return ["-m", "lab.benchmarks.ranks", f"{name}:{in_rank.__name__}", settings]


def start(**group: Any) -> None:
    """In a rank: the process group of gloo, on one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", **group)


def start_deepspeed(attach: bool = True) -> None:
    """In a rank: DeepSpeed on gloo, on one thread, without its messages and without a compilation of a minute.

    attach: attach the plugin, which the autoload does not do in these ranks.
    """
    import deepspeed

    if attach:
        import flash_allreduce_plugin.integrations.deepspeed.attach  # noqa: F401
    torch.set_num_threads(1)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.utils.logging.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo")


def start_engine(engine: str, attach: bool = True) -> None:
    """In a rank: DeepSpeed for the engine "zero2", else the process group."""
    if engine == "zero2":
        start_deepspeed(attach)
    else:
        start()


def finish(result: Any) -> NoReturn:
    """In every rank, at its end: rank 0 prints the result, a value that JSON knows, for `result_of`."""
    if dist.get_rank() == 0:
        print(_RESULT + json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # a thread of gloo that frees a tensor while the interpreter ends aborts the process: seen once


def result_of(output: str) -> Any:
    """Return rank 0's argument of `finish`, from its standard output. Raises ValueError if it is not there."""
    lines = [line for line in output.splitlines() if line.startswith(_RESULT)]
    if len(lines) != 1:
        raise ValueError(f"expected one result in what the ranks have printed, not {len(lines)}")
    return json.loads(lines[0].removeprefix(_RESULT))


def torchrun(
    in_rank: InRank,
    nproc_per_node: int,
    arguments: argparse.Namespace,
    environment: Mapping[str, str] | None = None,
    **more: Any,
) -> Any:
    """Call a function in ranks of this machine, without the plugin's autoload. Return its result on rank 0.

    Raises SystemExit with the end of the ranks' errors if they fail or print no result.
    """
    line = command(in_rank, arguments, **more)
    with tempfile.TemporaryDirectory() as logs:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={nproc_per_node}", "--log-dir", logs]
        variables = {**os.environ, "FLASH_ALLREDUCE_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu", **(environment or {})}
        done = subprocess.run([sys.executable, "-m", *launcher, *line], env=variables, capture_output=True, text=True)
    try:
        done.check_returncode()
        return result_of(done.stdout)
    except (subprocess.CalledProcessError, ValueError) as error:
        raise SystemExit(f"{' '.join(line)}: {error}\n{_of_ranks(done.stderr)[-4000:]}") from None


def _of_ranks(errors: str) -> str:
    """Return the output of the ranks, without the launcher's traceback after it."""
    return (
        errors.partition("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")[0].rpartition(
            "Traceback (most recent call last):"
        )[0]
        or errors
    )


def on_the_wire() -> int:
    """In a rank: bytes that this host's interfaces have sent, but for the loopback."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(numbers[8]) for name, *numbers in lines if name != "lo:")


def main() -> NoReturn:
    """In a rank: call the function that the command line names with its settings."""
    name, _, function = sys.argv[1].partition(":")
    in_rank: InRank = getattr(importlib.import_module(name), function)
    finish(in_rank(argparse.Namespace(**json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
