"""The source diffs: they apply to the installed megatron-core, and train to the same bits as the runtime route."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_allreduce_plugin.cli.demo.model import ModelSize, build_model, finish_gradients, loss_of, prepare_cpu
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.telemetry import counters
from scripts.make_megatron_patches import PATCHES, patch
from tests.distributed import run_ranks

# Not importorskip: this process must not import the Megatron that its ranks import from elsewhere.
if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

INSTALLED = importlib.metadata.version("megatron-core")
SITE = Path(str(importlib.metadata.distribution("megatron-core").locate_file("")))
PATCH = PATCHES / f"megatron-core-{INSTALLED}.patch"
SIZE = ModelSize(hidden=64, layers=2, heads=4, sequence=32, batch=2)

if not PATCH.is_file():
    pytest.skip(f"there is no patch for megatron-core {INSTALLED}", allow_module_level=True)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the installed sources with the patch applied."""
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(SITE / "megatron" / "core", folder / "megatron" / "core", ignore=shutil.ignore_patterns("*.pyc"))
    # patch rather than git apply: that one skips files in a folder that another repository ignores.
    subprocess.run(["patch", "-p1", "--fuzz=0", "-i", str(PATCH)], cwd=folder, check=True, capture_output=True)
    return folder


def test_the_patch_equals_the_scripts_output():
    read = lambda path: (SITE / path).read_text(encoding="utf-8")  # noqa: E731
    assert PATCH.read_text(encoding="utf-8") == patch(read, megatron.seams()), (
        "the seams have changed: python -m scripts.make_megatron_patches"
    )


@pytest.mark.parametrize("path", sorted(PATCHES.glob("megatron-core-*.patch")), ids=lambda path: path.stem)
def test_every_patch_marks_every_seam_once_and_removes_nothing(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    for seam in megatron.seams():
        assert sum(f'seam("{seam.id}")' in line for line in added) == 1, seam.id
    assert not [line for line in lines if line.startswith("-") and not line.startswith("---")]


def train(model: torch.nn.Module) -> tuple[list[float], list[torch.Tensor]]:
    from megatron.core import parallel_state

    data = torch.randint(16, (4000,), generator=torch.Generator().manual_seed(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, data, torch.tensor([0, 1000]) + 40 * step, SIZE.sequence)
        loss.backward()
        finish_gradients(model, parallel_state.get_tensor_model_parallel_group(), clip=1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def observe(folder: str | None) -> bytes:
    """Train without, with and again without the plugin, with the megatron-core of `folder` (default: installed)."""
    if folder is not None:
        sys.path.insert(0, folder)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    prepare_cpu()
    seen: dict[str, Any] = {"file": mappings.__file__}
    functions = mappings._ReduceFromModelParallelRegion.__dict__["forward"]
    for sequence_parallel in (False, True):

        def run() -> Any:
            counters.reset_stats()
            model = build_model(SIZE, tensor_parallel=2, sequence_parallel=sequence_parallel, seed=3)  # noqa: B023
            return train(model), counters.stats()["sites"]

        runs = [run()]
        gather = 8 if sequence_parallel else "full"
        config = FlashConfig(bits=8, backward_bits=8, sequence_parallel_gather_bits=gather, min_bytes=0)
        megatron.enable(config)
        runs.append(run())
        seen["in place"] = [entry["in_place"] for entry in megatron.report().values()]
        seen["replaced"] = mappings._ReduceFromModelParallelRegion.__dict__["forward"] is not functions
        megatron.disable()
        runs.append(run())
        seen[f"runs {sequence_parallel}"] = runs
    return pickle.dumps(seen)


def test_the_same_training_to_the_same_bits_as_the_runtime_route(patched):
    runtime, source = (
        [pickle.loads(seen) for seen in run_ranks(2, observe, folder)] for folder in (None, str(patched))
    )
    for ours, theirs in zip(runtime, source, strict=True):
        assert ours["file"].startswith(str(SITE)) and theirs["file"].startswith(str(patched))
        assert ours["replaced"] and not theirs["replaced"], "the fork calls the plugin itself: nothing is replaced"
        assert all(ours["in place"]) and all(theirs["in place"])
        for way in ("runs False", "runs True"):
            for (run, sites), (expected, expected_sites) in zip(theirs[way], ours[way], strict=True):
                assert run[0] == expected[0]
                assert all(map(torch.equal, run[1], expected[1]))
                assert sites == expected_sites
            stock, quantized, after = (run for run, _ in theirs[way])
            assert quantized[0] != stock[0] == after[0]
            assert theirs[way][0][1] == {} and sum(site["quantized"] for site in theirs[way][1][1].values()) > 0
