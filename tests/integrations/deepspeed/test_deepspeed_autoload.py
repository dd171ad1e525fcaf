"""An unmodified script with the section in its JSON: by the entry point, by one import, and not at all."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flash_allreduce_plugin as fap

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

ROOT = Path(fap.__file__).parents[1]

# Who writes it knows nothing of the plugin. The line about build_shm_op saves a minute of compiling on a CPU.
SCRIPT = """
import json, os, sys
import {first}
import torch, deepspeed
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
rank = int(os.environ["RANK"])
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.FileStore(os.environ["STORE"], 2), rank=rank, world_size=2
)
model = torch.nn.Linear(64, 64)
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config="ds.json")
engine.backward(engine(torch.ones(4, 64) * (1 + rank)).square().mean())
engine.step()
print("loaded", "flash_allreduce_plugin.api.reductions" in sys.modules)
if "flash_allreduce_plugin.api.reductions" in sys.modules:
    import flash_allreduce_plugin
    print("quantized", flash_allreduce_plugin.stats()["quantized"])
# A thread of gloo's that lets go of a tensor while the interpreter ends aborts the process, with the plugin or without.
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)
"""
JSON = """{
  "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1000000000,
  "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": true,
  "flash_allreduce": {"bits": 4, "min_bytes": 0}
}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write the entry point as an installed package declares it, and the configuration."""
    info = tmp_path / "flash_allreduce_plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-allreduce-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nflash_allreduce = flash_allreduce_plugin.autoload:load\n")
    (tmp_path / "ds.json").write_text(JSON)
    return tmp_path


def run(folder: Path, first: str, **environment: str) -> list[str]:
    """Return the printed lines of two ranks of the script: rank 0's lines of interest, rank 1's."""
    (folder / "script.py").write_text(SCRIPT.format(first=first))
    path = os.pathsep.join([str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    common = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "STORE": str(folder / "store")}
    common |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", **environment}
    (folder / "store").unlink(missing_ok=True)
    ranks = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=folder,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, errors
    words = ("flash", "loaded", "quantized")
    return ["; ".join(line for line in out.splitlines() if line.startswith(words)) for out, _ in outputs]


ATTACHED = (
    "flash all-reduce: attached to DeepSpeedEngine with DeepSpeedZeroOptimizer, ZeRO stage 2: gradients in 4 bits, "
    "groups of 128, buckets from 0 bytes; loaded True; quantized 1"
)


@pytest.mark.parametrize("first", ["torch", "deepspeed"])
def test_the_section_is_enough(folder: Path, first: str) -> None:
    """Check both import orders. DeepSpeed itself may be the one that imports torch."""
    assert run(folder, first) == [ATTACHED, "loaded True; quantized 1"]


def test_one_import_where_the_entry_point_is_off(folder: Path) -> None:
    first = "flash_allreduce_plugin.integrations.deepspeed.attach"
    assert run(folder, first, FLASH_ALLREDUCE_AUTOLOAD="0") == [ATTACHED, "loaded True; quantized 1"]


def test_nothing_without_either(folder: Path) -> None:
    assert run(folder, "torch", FLASH_ALLREDUCE_AUTOLOAD="0") == ["loaded False", "loaded False"]
