"""Run tests/program.py as its users would: by torchrun, with FLASH_ALLREDUCE_* variables and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import flash_allreduce_plugin as fap

PROGRAM = Path(__file__).with_name("program.py")


def program(
    folder: Path, kind: str, *words: str, alone: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the program on two ranks in `folder`; alone: the first of two ranks that another launcher has started."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_ALLREDUCE_")}
    path = os.pathsep.join([str(Path(fap.__file__).parent.parent), kept.get("PYTHONPATH", "")])
    env = {**kept, **variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    if alone:
        launcher, env = [], {**env, "RANK": "0", "WORLD_SIZE": "2"}
    command = [sys.executable, *launcher, str(PROGRAM), kind, *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def loss_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the loss that the program prints at its end, with all digits."""
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("loss "))


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return this package's lines on stdout."""
    return [line for line in done.stdout.splitlines() if line.startswith("flash all-reduce: ")]
