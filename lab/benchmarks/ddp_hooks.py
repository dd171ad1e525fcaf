"""Communication hooks of DistributedDataParallel, torch's and ours, each a variant by name.

A variant may fail, which only a run shows. `watched` guards its steps: if one raises or does not return, the rank
prints the reason and ends. `run` reads the reason, or the output of an aborted rank, and the benchmark continues
without that variant.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli import launch

NOT_SENT, FULL_PRECISION, NOISE = "no communication", "fp32", "noise "
ONE_BUCKET = ", one bucket"
RANKS_OF_POWERSGD = (1, 4)
POWERSGD = [f"PowerSGD rank {rank}" for rank in RANKS_OF_POWERSGD]
QUANTIZATION = ["quantization_pertensor_hook", "quantization_perchannel_hook"]
OURS = ['{"bits": 8}', '{"bits": 4}', '{"preset": "int4"}', '{"preset": "thin"}']  # the preset int8 is {"bits": 8}

POWERSGD_FIRST_STEP = 2  # torch's minimum: DDP rebuilds its buckets after the first step
# "Got the following error when running the callback: " for each callback behind it, the error, and its frames.
_IN_A_CALLBACK = re.compile(
    r"Got the following error when running the callback: (\w+): (?!Got the following)(.*)"
    r"\n*(?:At:\s*\S*?(\w+)\.py\(\d+\): (\w+))?"
)
_STEP, _FAILED = "STEP ", "FAILED "


def wrapped(
    variant: str, model: torch.nn.Module, powersgd_first_step: int = POWERSGD_FIRST_STEP
) -> DistributedDataParallel:
    """The model, its gradients sent as the variant says: a name of this file's, or a FlashConfig of ours as JSON.

    Before `powersgd_first_step` PowerSGD reduces in full precision.
    """
    mib = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / (1 << 20)
    name = variant.removesuffix(ONE_BUCKET)
    ddp = DistributedDataParallel(model, bucket_cap_mb=None if name == variant else mib + 1)
    if name in (NOT_SENT, FULL_PRECISION) or name.startswith(NOISE):
        pass
    elif name in POWERSGD:
        rank = RANKS_OF_POWERSGD[POWERSGD.index(name)]
        state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=powersgd_first_step)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name in QUANTIZATION:
        ddp.register_comm_hook(None, getattr(quantization_hooks, name))
    elif name.startswith("{"):
        ddp.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig(**json.loads(name))))
    else:
        ddp.register_comm_hook(None, getattr(default_hooks, name))
    return ddp


@contextlib.contextmanager
def watched(variant: str, limit: float) -> Iterator[None]:
    """In a rank: if the block raises or does not end within `limit` seconds, say so and end the process."""
    print(_STEP + variant, file=sys.stderr, flush=True)  # for `run`, should gloo abort the process
    done = threading.Event()
    threading.Thread(target=_watch, args=(variant, limit, done), daemon=True).start()
    try:
        yield
    except Exception as error:
        done.set()
        _give_up(variant, *_reason(error))
    finally:
        done.set()


def check_same_weights(model: torch.nn.Module) -> None:
    """In every rank, after steps that have sent gradients. Raises ValueError if two ranks differ in a weight.

    Collectives that ranks start in different orders may match by size, and then sum unrelated tensors.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    if any(not torch.equal(one, mine) for one in every):
        raise ValueError("the ranks have different weights")


def _watch(variant: str, limit: float, done: threading.Event) -> None:
    for _ in range(math.ceil(limit)):  # in turns, so that the time of a process that was stopped does not count
        if done.wait(1):
            return
    frames = sys._current_frames().values()  # gloo's threads among them, where they are in a hook's callback
    places = [(Path(frame.f_code.co_filename), frame.f_code.co_name) for frame in frames]
    where = [f"{file.stem}.{name}" for file, name in places if file.parent.name == "ddp_comm_hooks"]
    _give_up(variant, f"did not return within {limit:g} s", where)


def _reason(error: Exception) -> tuple[str, list[str]]:
    """The first sentence of the error, and where it was raised; of one in a future's callback the text says it."""
    inner = _IN_A_CALLBACK.search(str(error))
    if inner is not None:
        name, text, file, function = inner.groups()
        return f"{name}: {text.split('. ')[0]}", [f"{file}.{function}"] if file else []
    text = (str(error).splitlines() or [""])[0]
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text.split('. ')[0]}", [f"{Path(last.filename).stem}.{last.name}"]


def _give_up(variant: str, why: str, where: list[str]) -> NoReturn:
    print("\n" + _FAILED + json.dumps({"variant": variant, "why": why, "where": where}), flush=True)
    time.sleep(2)  # so that the others find their own reason, not a dead peer
    os._exit(0)


def run(ranks: launch.Ranks, command: Sequence[str], timeout: float) -> tuple[list[str], tuple[str, str] | None]:
    """Return the output of the ranks, and the variant that failed, if one did, with the reason.

    Raises launch.RankError where a rank failed outside of `watched`, or after `timeout` seconds.
    """
    try:
        outputs = ranks.run(command, timeout=timeout)
    except launch.RankError as error:
        steps = [line for line in error.stderr.splitlines() if line.startswith(_STEP)]
        aborted = re.search(r"what\(\): +(?:\[.*?\] )?(.*)", error.stderr)
        if not steps or aborted is None:
            raise
        said = [part for part in aborted[1].split(". ") if not part.endswith("?")]
        return [], (steps[-1].removeprefix(_STEP), f"ended the process: {'. '.join(said)}")
    lines = [line for output in outputs for line in output.splitlines() if line.startswith(_FAILED)]
    found: list[dict[str, Any]] = [json.loads(line.removeprefix(_FAILED)) for line in lines]
    if not found:
        return outputs, None
    where = sorted({place for one in found for place in one["where"]})
    return outputs, (found[0]["variant"], found[0]["why"] + (f", in {' and '.join(where)}" if where else ""))
