"""Megatron-LM's checkpoints have the state that a resumed run needs.

A stub of its training package, around megatron-core's own model and gradient buffers, serves everywhere; with
MEGATRON_LM_PATH=<a checkout, core_v0.16.1> its own pretrain_gpt.py saves and resumes.
"""

from __future__ import annotations

import re
import shutil
import sys
import types
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from test_data_parallel import SIZE, CudaIsCpu, build_model, loss_of, start_megatron

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import checkpoints, scopes
from flash_allreduce_plugin.runtime import checkpoint
from flash_allreduce_plugin.telemetry import counters
from tests.integrations.megatron.test_launch import ARGUMENTS, CHECKOUT, PRECISIONS, ROOT, TORCHRUN, run, why_not

SAVED, LAST = 3, 6
CONFIG = FlashConfig(
    bits=3,
    backward_bits=3,
    grad_bits=3,
    min_bytes=0,
    rounding="stochastic",
    target_sqnr_db=10.0,
    quality_interval=3,
    error_feedback=True,
    warmup_steps=1,
)
OURS = "flash_allreduce"

# The parameters, the stored values and the results of core_v0.16.1, for one rank's model.
CHECKPOINTING = """
import os, torch, torch.distributed as dist
from megatron.training.global_vars import get_args

def file(folder, iteration):
    return os.path.join(folder, f"iter_{iteration:07d}", f"theirs_{dist.get_rank()}.pt")

def save_checkpoint(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far,
                    checkpointing_context=None, non_persistent_ckpt=False, release=False):
    args = get_args()
    folder = os.path.join(args.save, "non_persistent") if non_persistent_ckpt else args.save
    path = file(folder, iteration)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    assert not os.path.exists(os.path.join(os.path.dirname(path), "flash_allreduce")), "Megatron-LM would warn"
    dist.barrier()
    torch.save([iteration, model.state_dict(), optimizer.state_dict()], path)
    args.folder = folder

def load_checkpoint(ddp_model, optimizer, opt_param_scheduler, load_arg="load", strict=True,
                    checkpointing_context=None, skip_load_to_model_and_opt=False):
    args = get_args()
    iteration, model, state = torch.load(file(args.folder, args.iteration), weights_only=False)
    ddp_model.load_state_dict(model)
    if args.finetune:
        return 0, 0
    if optimizer is not None:
        optimizer.load_state_dict(state)
    return iteration, 0
"""


def training_package(**arguments: Any) -> tuple[types.ModuleType, types.ModuleType]:
    """Import a megatron.training of a few lines. Return the module with the functions, and its importing module."""
    names = ("", ".global_vars", ".checkpointing", ".training")
    package, theirs, checkpointing, training = (types.ModuleType(f"megatron.training{name}") for name in names)
    package.__path__ = []
    args = SimpleNamespace(
        finetune=False,
        no_load_optim=False,
        non_persistent_ckpt_type="global",
        non_persistent_global_ckpt_dir=None,
        **arguments,
    )
    theirs.get_args = lambda: args  # type: ignore[attr-defined]
    for module in (package, theirs, checkpointing, training):
        sys.modules[module.__name__] = module
    exec(CHECKPOINTING, vars(checkpointing))
    exec("from megatron.training.checkpointing import load_checkpoint, save_checkpoint", vars(training))
    return checkpointing, training


def trained(folder: str, tensor_parallel: int, resume: bool, non_persistent: bool) -> dict[str, Any]:
    """Train to the end with a checkpoint on the way, or from it: calls the functions as Megatron-LM's own loop does."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    start_megatron(tensor_parallel)
    where = f"{folder}/non_persistent" if non_persistent else folder
    checkpointing, training = training_package(save=folder, load=folder, folder=where, iteration=SAVED)
    own = [
        vars(module)[name] for module in (checkpointing, training) for name in ("save_checkpoint", "load_checkpoint")
    ]
    data = torch.randint(
        16, (4000,), generator=torch.Generator().manual_seed(5 + (tensor_parallel == 1) * dist.get_rank())
    )
    with CudaIsCpu():
        megatron.enable(CONFIG)
        model = build_model(SIZE, tensor_parallel=tensor_parallel, sequence_parallel=False, seed=3 + resume)
        ddp = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(bucket_size=20_000, overlap_grad_reduce=True), model
        )
        ddp.broadcast_params()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen: dict[str, Any] = {}
        if resume:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                seen["iteration"] = training.load_checkpoint(ddp, optimizer, None)[0]
            seen["told"] = [str(one.message) for one in caught if str(one.message).startswith("flash_allreduce")]
        counters.reset_stats()
        for step in range(SAVED if resume else 0, LAST):
            if step == SAVED and not resume:
                training.save_checkpoint(step, ddp, optimizer, None, 0, non_persistent_ckpt=non_persistent)
            ddp.zero_grad_buffer()
            loss_of(ddp, data, torch.tensor([0, 1000]) + 40 * step, SIZE.sequence).backward()
            ddp.finish_grad_sync()
            for parameter in model.parameters():
                parameter.grad = parameter.main_grad.clone()
            optimizer.step()
            optimizer.zero_grad()
        seen["step"], seen["stats"] = megatron.step(), counters.stats()
        megatron.disable()
    again = [
        vars(module)[name] for module in (checkpointing, training) for name in ("save_checkpoint", "load_checkpoint")
    ]
    assert all(one is other for one, other in zip(own, again, strict=True)) and checkpoint.registered() == {}
    seen["parameters"] = torch.cat([p.detach().flatten() for p in model.parameters()])
    return seen


@pytest.mark.parametrize(
    ("tensor_parallel", "non_persistent"), [(1, False), (2, True)], ids=["data-parallel", "tensor-parallel"]
)
def test_new_processes_resume_bit_for_bit(tmp_path: Path, tensor_parallel: int, non_persistent: bool) -> None:
    expected = run_ranks(2, trained, str(tmp_path), tensor_parallel, False, non_persistent, preload=MEGATRON)
    folder = tmp_path / ("non_persistent" if non_persistent else "") / f"iter_{SAVED:07d}" / OURS
    assert sorted(path.name for path in folder.iterdir()) == ["rank_00000.pt", "rank_00001.pt"]
    for rank, seen in enumerate(
        run_ranks(2, trained, str(tmp_path), tensor_parallel, True, non_persistent, preload=MEGATRON)
    ):
        assert (seen["iteration"], seen["step"], seen["told"]) == (SAVED, LAST, [])
        assert torch.equal(seen["parameters"], expected[rank]["parameters"])
        assert "warm-up" not in seen["stats"]["full_precision"]
    shutil.rmtree(folder)
    for rank, seen in enumerate(
        run_ranks(2, trained, str(tmp_path), tensor_parallel, True, non_persistent, preload=MEGATRON)
    ):
        assert not torch.equal(seen["parameters"], expected[rank]["parameters"])
        assert seen["step"] == LAST, "from Megatron-LM's iteration"
        if rank == 0:
            [told] = seen["told"]
            assert f"{folder}: there is no file (ranks 0, 1). " in told


def left_alone(folder: str) -> dict[str, Any]:
    """Check that functions that do not resume a training leave its state unchanged."""
    checkpointing, training = training_package(save=folder, load=folder, folder=folder, iteration=4)
    args = sys.modules["megatron.training.global_vars"].get_args()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    megatron.enable(FlashConfig())
    scopes.set_step(4)
    checkpointing.save_checkpoint(4, model, optimizer, None, 0)
    checkpointing.save_checkpoint(5, model, optimizer, None, 0, release=True)
    args.non_persistent_ckpt_type = "local"
    checkpointing.save_checkpoint(6, model, optimizer, None, 0, non_persistent_ckpt=True)
    args.folder, steps = folder, []
    for finetune, no_load_optim, given in ((True, False, optimizer), (False, True, optimizer), (False, False, None)):
        args.finetune, args.no_load_optim = finetune, no_load_optim
        scopes.set_step(9)
        training.load_checkpoint(model, given, None)
        steps.append(scopes.step())
    args.finetune = args.no_load_optim = False
    training.load_checkpoint(model, optimizer, None, load_arg="pretrained")
    steps.append(scopes.step())
    training.load_checkpoint(model, optimizer, None)
    steps.append(scopes.step())
    kept = training.load_checkpoint
    megatron.disable()
    scopes.set_step(9)
    kept(model, optimizer, None)  # whoever has kept the function
    steps.append(scopes.step())
    return {"steps": steps, "files": [str(path.relative_to(folder)) for path in Path(folder).rglob(f"{OURS}/*")]}


def test_loads_without_a_resume_change_nothing(tmp_path: Path) -> None:
    [seen] = run_ranks(1, left_alone, str(tmp_path), preload=MEGATRON)
    assert seen["steps"] == [9, 9, 9, 9, 4, 9]
    assert seen["files"] == [f"iter_0000004/{OURS}/rank_00000.pt"]


def does_not_fit() -> dict[str, Any]:
    checkpointing, _ = training_package()
    exec("def save_checkpoint(step, everything): pass", vars(checkpointing))
    own = checkpointing.save_checkpoint
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        megatron.enable(FlashConfig())
    in_place = all(entry["in_place"] for entry in megatron.report().values())
    kept = checkpointing.save_checkpoint is own
    megatron.disable()
    return {"told": [str(one.message) for one in told], "kept": kept, "in place": in_place}


def test_an_unsupported_training_package_is_a_warning_and_not_patched() -> None:
    [seen] = run_ranks(1, does_not_fit, preload=MEGATRON)
    [told] = [line for line in seen["told"] if "checkpoints" in line]
    assert told.startswith("flash_allreduce: Megatron-LM's checkpoints have no state of it: megatron: cannot patch ")
    assert "expected the parameters (iteration, model, optimizer, opt_param_scheduler, ...)" in told
    assert seen["kept"] and seen["in place"]


def test_without_a_training_package_there_are_no_seams() -> None:
    assert checkpoints.CHECKPOINTING not in sys.modules and checkpoints.seams() == []


@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
def test_megatron_lm_resumes_bit_for_bit(tmp_path: Path, kind: str, precision: str) -> None:
    if kind == "torch_dist":
        pytest.importorskip("psutil", reason="psutil is not installed: Megatron hangs at torch_dist")
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(ROOT / "tests" / "integrations" / "megatron" / "cuda_shim.py", site / "sitecustomize.py")
    environment = {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    script = str(Path(CHECKOUT, "pretrain_gpt.py").resolve())
    flags = ["--flash-allreduce", "--flash-allreduce-rounding", "stochastic", "--flash-allreduce-bits", "4"]
    flags += ["--flash-allreduce-backward-bits", "4", "--flash-allreduce-warmup-steps", "2"]
    flags += ["--ckpt-format", kind, *PRECISIONS[precision]]
    losses = []
    for first, last in ((0, 6), (3, 6)):
        words = ["--train-iters", str(last), "--save", str(tmp_path / "saved"), "--save-interval", "3"]
        if first:
            (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text(str(first))
            words += ["--load", str(tmp_path / "saved")]
        done = run(tmp_path, *TORCHRUN, script, *ARGUMENTS, *flags, *words, timeout=400, **environment)
        assert done.returncode == 0, done.stdout[-8000:]
        losses.append(re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", done.stdout))
        found = [line for line in done.stdout.splitlines() if "start again" in line]
        assert not found, found
    print(losses)
    straight, resumed = ([float(loss) for _, loss in found] for found in losses)
    assert len(straight) == 6 and len(resumed) == 3
    # The second line that a run of Megatron-LM's prints is the mean of its first two iterations.
    resumed[1] = round(2 * resumed[1] - resumed[0], 6)
    assert resumed == [straight[3], pytest.approx(straight[4], abs=2e-6), straight[5]]
    assert (tmp_path / "saved" / "iter_0000003" / OURS / "rank_00001.pt").is_file()
