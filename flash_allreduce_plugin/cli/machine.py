"""The conditions of a measurement: versions, machine, date and command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from flash_allreduce_plugin.codec import ops, rows


def about() -> dict[str, Any]:
    """Return the conditions in JSON types. instruction_set: of the codec on the CPU; "reference": not compiled."""
    reference = ops.unavailable is not None or rows.use_reference()
    try:
        version = importlib.metadata.version("flash-allreduce-plugin")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed as a package"
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": shlex.join(["flash-allreduce", *sys.argv[1:]]),
        "machine": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instruction_set": "reference" if reference else ops.cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flash-allreduce-plugin": version,
    }
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
