"""The script that checks the seams against sources that are read, not imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from flash_allreduce_plugin.integrations import megatron
from scripts import check_megatron_versions as script
from scripts import releases

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

SITE = Path(str(importlib.metadata.distribution("megatron-core").locate_file("")))
MAPPINGS = "megatron/core/tensor_parallel/mappings.py"
LAYERS = "megatron/core/tensor_parallel/layers.py"
BUFFERS = "megatron/core/distributed/param_and_grad_buffer.py"
OPTIMIZER = "megatron/core/optimizer/distrib_optimizer.py"


def test_the_installed_release_fits(capsys):
    assert script.main([str(SITE)]) == 0
    total = len(megatron.seams())
    assert f"{total} of {total} seams" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        (MAPPINGS, "class _ReduceFromModelParallelRegion", "class _Reduce", "g.forward: .*it does not exist"),
        (MAPPINGS, "return _reduce(input_, group)", "return input_", "does not use _reduce"),
        (MAPPINGS, "def forward(ctx, input_, group):", "def forward(ctx, input_):", r"found \(ctx, input_\)"),
        (LAYERS, "torch.distributed.all_reduce(", "our_all_reduce(", "does not use torch.distributed.all_reduce"),
        (LAYERS, "    @custom_bwd\n", "    @jit\n", "the decorator jit hides the function"),
        (LAYERS, "dist_reduce_scatter_func = ", "scatter = ", "dist_reduce_scatter_func: it does not exist"),
        (BUFFERS, "_coalescing_manager(", "_coalesce(", "does not use _coalescing_manager"),
        (BUFFERS, "def start_grad_sync(self", "def start_grad_sync(self, another", r"found \(self, another"),
        (BUFFERS, "dist_all_gather_func(\n", "gather(\n", "start_param_sync: .*does not use dist_all_gather_func"),
        (
            OPTIMIZER,
            "_copy_main_params_to_model_params(self",
            "_copy(self",
            "data_parallel.masters: .*it does not exist",
        ),
    ],
)
def test_changes_of_a_release_are_found(tmp_path, capsys, path, old, new, said):
    for seam in megatron.seams():
        name = seam.module.replace(".", "/") + ".py"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        source = (SITE / name).read_text(encoding="utf-8")
        if name == path:
            assert old in source
            source = source.replace(old, new)
        (tmp_path / name).write_text(source, encoding="utf-8")
    assert script.main([str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert any(re.search(said, line) for line in output.splitlines()), output


def test_a_missing_module_and_a_wheel(tmp_path, capsys):
    """Check that a wheel that is there already is not downloaded."""
    with zipfile.ZipFile(tmp_path / "megatron_core-0.99.0-py3-none-any.whl", "w") as wheel:
        wheel.write(SITE / MAPPINGS, MAPPINGS)
    assert script.main(["0.99.0", "--wheels", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "layers.VocabParallelEmbedding.forward: the module does not exist" in output
    assert "mappings" not in output


def test_unavailable_input_has_its_own_exit_status(tmp_path, capsys):
    assert script.main([str(tmp_path)]) == 2
    assert "neither a release nor a folder that holds megatron/core" in capsys.readouterr().err


def test_functions_that_moved_since_the_last_release_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(SITE / "megatron" / "core", tmp_path / "megatron" / "core", ignore=shutil.ignore_patterns("*.pyc"))
    mappings = tmp_path / MAPPINGS
    source = mappings.read_text(encoding="utf-8")
    mappings.write_text(source.replace("return _reduce(input_, group)", "return _reduce(input_, group=group)"))
    assert source != mappings.read_text(encoding="utf-8")
    script.main([str(SITE), str(tmp_path), str(tmp_path)])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if "moved since" in line]
    assert lines == [f"moved since {SITE}: megatron.g.forward", f"moved since {tmp_path}: nothing"]


def test_releases_above_the_window_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listing = SimpleNamespace(stdout="x\nAvailable versions: 2.1, 2.0rc1, 1.9, 1.8, 1.7", stderr="")
    monkeypatch.setattr(releases, "pip", lambda *_: listing)
    assert releases.final("x", lambda number: (1, 8) <= number < (2,), (2,)) == ["1.8", "1.9"]
    assert capsys.readouterr().out == "x 2.1: newer than the window, which ends below 2\n"
