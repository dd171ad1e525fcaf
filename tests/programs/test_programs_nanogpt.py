"""nanoGPT's train.py, unmodified, with DistributedDataParallel.

    NANOGPT_PATH=<a checkout of nanoGPT> nox -s test-programs

train.py gives every rank a GPU, for every --device. On the CPU it needs the setup in ON_CPU, before and without it.
"""

from __future__ import annotations

import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import BY_HAND, OFF, SETTINGS, Run, same_bits_for_less, source, torchrun

# slow: `make test` fetches nothing; `nox -s test-programs` does.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

COMMIT = "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"
FILES = ("train.py", "model.py", "configurator.py")
STEPS = 20
# Two passes for each step on every rank. The second one reduces.
ARGUMENTS = (
    "--device=cpu --backend=gloo --compile=False --dtype=float32 --dataset=tiny --n_layer=2 --n_head=2 --n_embd=64 "
    f"--block_size=32 --batch_size=4 --gradient_accumulation_steps=4 --max_iters={STEPS} --eval_interval={STEPS} "
    "--eval_iters=2 --warmup_iters=2 --learning_rate=1e-3"
).split()
LINE = "flash all-reduce: attached to DistributedDataParallel (GPT, 104768 parameters in float32): gradients in 8 bits"

# A rank's sitecustomize: its device, "cuda:0", is the CPU, and DDP takes no device_ids there.
ON_CPU = """
import os

if "RANK" in os.environ:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    def on_cpu(theirs):
        def to(self, *arguments, **keywords):
            arguments = ["cpu" if isinstance(one, str) and one.startswith("cuda") else one for one in arguments]
            return theirs(self, *arguments, **keywords)
        return to

    torch.nn.Module.to, torch.Tensor.to = on_cpu(torch.nn.Module.to), on_cpu(torch.Tensor.to)
    torch.Tensor.pin_memory = lambda self: self
    torch.cuda.set_device = lambda device: None
    throw = DistributedDataParallel._log_and_throw
    DistributedDataParallel._log_and_throw = lambda self, kind, text: "device_ids" in text or throw(self, kind, text)
"""


@pytest.fixture(scope="module")
def nanogpt(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("source")
    return [source("karpathy/nanoGPT", COMMIT, "NANOGPT_PATH", file, folder) for file in FILES]


def train(folder: Path, files: list[Path], variables: dict[str, str], *changed: str, by_hand: bool = False) -> Run:
    """Run `torchrun train.py` in a folder with the program, its data and, for CPUs, its setup. changed: arguments."""
    data, extra = folder / "data" / "tiny", folder / "on-cpu"
    data.mkdir(parents=True)
    extra.mkdir()
    for file in files:
        shutil.copy(file, folder)
    chance, tokens = random.Random(1), [0]
    while len(tokens) < 24000:
        tokens.append((5 * tokens[-1] + chance.choice((1, 2, 3))) % 64)
    np.array(tokens[:20000], dtype=np.uint16).tofile(data / "train.bin")
    np.array(tokens[20000:], dtype=np.uint16).tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))
    (extra / "sitecustomize.py").write_text(ON_CPU + BY_HAND * by_hand)
    return torchrun(folder, ("train.py", *ARGUMENTS, *changed), variables, extra)


def losses(run: Run) -> list[float]:
    """Return the loss of every step, as rank 0 prints it."""
    return [float(one) for one in re.findall(r"^iter \d+: loss (\S+),", run.printed, re.MULTILINE)]


def weights(run: Run) -> dict[str, torch.Tensor]:
    saved: dict[str, Any] = torch.load(run.folder / "out" / "ckpt.pt", weights_only=True)
    return dict(saved["model"])


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_train(tmp_path: Path, nanogpt: list[Path], compiled: bool) -> None:
    changed = f"--compile={compiled}"
    full = train(tmp_path / "full", nanogpt, OFF, changed)
    served = train(tmp_path / "served", nanogpt, {"FLASH_ALLREDUCE_ATTACH": "ddp", **SETTINGS}, changed)
    hand = train(tmp_path / "hand", nanogpt, {"BY_HAND": "ddp", **OFF, **SETTINGS}, changed, by_hand=True)
    assert full.lines == [] and full.sites == {}
    [line] = served.attached
    assert line.startswith(LINE.replace("GPT", "OptimizedModule") if compiled else LINE)
    same_bits_for_less(served, hand, "ddp.gradients")
    assert losses(served) == losses(hand) and same(weights(served), weights(hand))
    assert not same(weights(served), weights(full))
    assert len(losses(full)) == STEPS + 1 and losses(full)[-1] < 0.8 * losses(full)[0]
    assert losses(served) == pytest.approx(losses(full), rel=1e-3)
