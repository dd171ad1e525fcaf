"""Between the ranks of a benchmark and the process that starts them: how they are started, and one result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

_RESULT = "RESULT "


def finish(result: Any) -> NoReturn:
    """In every rank, at its end: rank 0 prints the result, a value that JSON knows, for `result_of`."""
    if dist.get_rank() == 0:
        print(_RESULT + json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # a thread of gloo's that lets go of a tensor while the interpreter ends aborts the process: seen once


def result_of(output: str) -> Any:
    """What rank 0 gave to `finish`, from its standard output. Raises ValueError if it is not there."""
    lines = [line for line in output.splitlines() if line.startswith(_RESULT)]
    if len(lines) != 1:
        raise ValueError(f"expected one result in what the ranks have printed, not {len(lines)}")
    return json.loads(lines[0].removeprefix(_RESULT))


def torchrun(
    module: str, nproc_per_node: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Any:
    """Run a module on ranks of this machine, without the plugin's autoload. The result that it finished with.

    Raises SystemExit with the end of the ranks' errors if they fail or print no result.
    """
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc_per_node}"]
        command += ["--log-dir", logs, "-m", module, *arguments]
        variables = {**os.environ, "FLASH_ALLREDUCE_AUTOLOAD": "0", **(environment or {})}
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
    try:
        done.check_returncode()
        return result_of(done.stdout)
    except (subprocess.CalledProcessError, ValueError) as error:
        raise SystemExit(f"{' '.join(arguments)}: {error}\n{done.stderr[-4000:]}") from None


def on_the_wire() -> int:
    """In a rank: bytes that this host's interfaces have sent, but for the loopback."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(numbers[8]) for name, *numbers in lines if name != "lo:")
