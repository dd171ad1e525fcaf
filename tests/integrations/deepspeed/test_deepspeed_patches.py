"""The source diffs: they apply to the installed DeepSpeed, and train to the same bits as the runtime route."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import deepspeed_training
import pytest
import torch
from deepspeed_training import EIGHT, engine, package, sparse, step, train

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.autoload import AfterImport
from flash_allreduce_plugin.integrations.deepspeed import engine as seams
from scripts.make_deepspeed_patches import PATCHES, patch
from tests.distributed import run_ranks

# Not importorskip: this process must not import the DeepSpeed that its ranks import from elsewhere.
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)

INSTALLED = importlib.metadata.version("deepspeed")
SITE = Path(str(importlib.metadata.distribution("deepspeed").locate_file("")))
PATCH = PATCHES / f"deepspeed-{INSTALLED}.patch"

if not PATCH.is_file():
    pytest.skip(f"there is no patch for deepspeed {INSTALLED}", allow_module_level=True)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the installed package with the patch applied."""
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(SITE / "deepspeed", folder / "deepspeed")
    # patch rather than git apply: that one skips files in a folder that another repository ignores.
    subprocess.run(["patch", "-p1", "--fuzz=0", "-i", str(PATCH)], cwd=folder, check=True, capture_output=True)
    return folder


def test_the_patch_equals_the_scripts_output() -> None:
    assert PATCH.read_text(encoding="utf-8") == patch(lambda path: (SITE / path).read_text(encoding="utf-8")), (
        "the seams have changed: python -m scripts.make_deepspeed_patches"
    )


@pytest.mark.parametrize("path", sorted(PATCHES.glob("deepspeed-*.patch")), ids=lambda path: path.stem)
def test_every_patch_marks_every_seam_once_and_removes_nothing(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    for seam in seams.seams():
        marks = sum(f'seam("{seam.id}")' in line for line in added)
        assert marks == 1 or (seam.optional and marks == 0), seam.id
    assert not [line for line in lines if line.startswith("-") and not line.startswith("---")]


OPTIONS = [{"stage": stage} for stage in range(4)]
OPTIONS += [{"stage": stage, "reduce_scatter": False} for stage in (2, 3)]
OPTIONS += [{"stage": 2, "use_multi_rank_bucket_allreduce": False}]


def observe(folder: str | None) -> bytes:
    """Train with and without a section, with the DeepSpeed of `folder` (default: the installed one, attached)."""
    if folder is not None:
        sys.path.insert(0, folder)
    # As where torch does not call the entry point.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AfterImport)]
    deepspeed_training.deepspeed = package  # which attaches nothing
    theirs = package()
    own, seen = theirs.DeepSpeedEngine.__init__, {"file": theirs.__file__, "enabled": fap.deepspeed.is_enabled()}
    if folder is None:
        seams.attach()
    seen["replaced"] = theirs.DeepSpeedEngine.__init__ is not own
    runs = [train({"zero_optimization": options}, EIGHT, 1) for options in OPTIONS]
    zero = {"zero_optimization": {"stage": 2}}
    values = train({"zero_optimization": {"stage": 3}}, {**EIGHT, "param_bits": 8}, 2)
    assert values["sites"]["deepspeed.stage3.parameters"]["quantized"] > 0
    import test_attention  # once this process has the DeepSpeed of `folder`

    exchanges = test_attention.train(test_attention.Block, (4, 4), test_attention.EIGHT)
    seen["runs"] = [train(zero, None, 1), sparse(EIGHT), values, exchanges, *runs]

    # Taken off, and on again from Python.
    built = engine(zero, EIGHT)
    names = {place.attribute.split(".")[-1] for place in seams.seams()}
    seen["on instances"] = names & {*vars(built), *vars(built.optimizer)}
    fap.deepspeed.disable()
    seen["own"] = theirs.DeepSpeedEngine.__init__ is own
    seen["left"] = [name for owner in (built, built.optimizer) for name in vars(owner) if "flash" in name]
    fap.reset_stats()
    for each in (built, engine(zero, EIGHT)):
        step(each, 0)
    seen["disabled"] = fap.stats()["calls"]
    fap.deepspeed.enable(fap.FlashConfig(bits=8, min_bytes=0))
    step(engine(zero, None), 0)
    seen["enabled again"] = fap.stats()["quantized"]
    return pickle.dumps(seen)


def test_the_same_training_to_the_same_bits_as_the_runtime_route(patched: Path) -> None:
    runtime, source = (
        [pickle.loads(seen) for seen in run_ranks(2, observe, folder)] for folder in (None, str(patched))
    )
    for ours, theirs in zip(runtime, source, strict=True):
        assert ours["file"].startswith(str(SITE)) and theirs["file"].startswith(str(patched))
        assert theirs["enabled"] and not ours["enabled"], "the fork needs neither entry point nor import"
        assert ours["replaced"] and not theirs["replaced"], "the fork calls the plugin itself: nothing is replaced"
        assert ours["on instances"] and not theirs["on instances"]
        for run, expected in zip(theirs["runs"], ours["runs"], strict=True):
            assert torch.equal(run["weights"], expected["weights"])
            assert run["sites"] == expected["sites"]
        alone, embedding, _, *runs = theirs["runs"]
        assert alone["calls"] == 0, "there was no section"
        assert embedding["full_precision"] == {"sparse gradient": 2}
        assert all(run["quantized"] == run["calls"] > 0 for run in runs)
        for seen in (ours, theirs):
            assert seen["own"] and seen["left"] == [] and seen["disabled"] == 0 and seen["enabled again"] == 1
