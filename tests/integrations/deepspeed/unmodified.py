"""Scripts without a reference to the plugin, started as their users start them, with the plugin as pip installs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flash_allreduce_plugin as fap

ROOT = Path(fap.__file__).parents[1]

# Runs in every process before its script: saves the minute that DeepSpeed takes to compile an operator for shared
# memory, and leaves each rank's counters behind.
SITECUSTOMIZE = """
import atexit, json, os, sys
from flash_allreduce_plugin.autoload import AfterImport

def no_operator():
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

def leave_counters():
    import flash_allreduce_plugin
    with open(os.path.join(os.environ["COUNTERS"], os.environ["RANK"] + ".json"), "w") as file:
        json.dump(flash_allreduce_plugin.stats(), file)

if "RANK" in os.environ:
    AfterImport(["deepspeed.comm.torch"], no_operator).install()
    atexit.register(leave_counters)
"""


def launch(folder: Path, *words: str, cwd: Path = ROOT, timeout: float = 240) -> tuple[str, list[dict[str, Any]]]:
    """Return the standard output of `python -m <words>`, and fap.stats() of every rank that it starts."""
    info = folder / "flash_allreduce_plugin-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-allreduce-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nflash_allreduce = flash_allreduce_plugin.autoload:load\n")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    for counters in folder.glob("[0-9]*.json"):
        counters.unlink()
    path = os.pathsep.join([str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True, timeout=timeout,
        env={
            **os.environ, "PYTHONPATH": path, "COUNTERS": str(folder), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout, [json.loads(file.read_text()) for file in sorted(folder.glob("[0-9]*.json"))]
