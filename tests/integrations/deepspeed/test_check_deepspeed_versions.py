"""The script that checks the functions against sources that are read, not imported."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from flash_allreduce_plugin.integrations.deepspeed import engine
from scripts import check_deepspeed_versions as script

FOUND = importlib.util.find_spec("deepspeed")
pytestmark = pytest.mark.skipif(FOUND is None, reason="deepspeed is not installed")

ENGINE = "deepspeed/runtime/engine.py"
ZERO = "deepspeed/runtime/zero/stage_1_and_2.py"
STAGE3 = "deepspeed/runtime/zero/stage3.py"
PARTITIONING = "deepspeed/runtime/zero/partition_parameters.py"
LAYERS = "deepspeed/module_inject/layers.py"
COORDINATOR = "deepspeed/runtime/zero/partitioned_param_coordinator.py"


def site() -> Path:
    assert FOUND is not None and FOUND.origin is not None
    return Path(FOUND.origin).parents[1]


def test_the_installed_release_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([str(site())]) == 0
    total = len(engine.seams())
    assert f"{total} of {total} functions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        (ENGINE, "config_class=None,", "settings=None,", r"deepspeed\.engine: .*found \(self, args"),
        (ENGINE, "def allreduce_bucket(self, bucket", "def reduce_bucket(self, bucket", "it does not exist"),
        (ZERO, "dist.reduce(tensor_to_allreduce", "dist.send(tensor_to_allreduce", r"does not use dist\.reduce"),
        (ZERO, "bucket_ranks=None", "owners=None", r"zero\.owners: .*found \(self, small_bucket"),
        (STAGE3, "= reduce_scatter_coalesced(", "= scatter(", "does not use reduce_scatter_coalesced"),
        (
            PARTITIONING,
            "def _dist_allgather_fn(input_tensor",
            "def _dist_allgather_fn(tensor",
            r"stage3\.gather: .*found",
        ),
        (PARTITIONING, "def _all_gather(self, param_list", "def _all_gather(self, params", r"stage3\.outside: .*found"),
        (LAYERS, "handle = dist.all_reduce(", "handle = dist.reduce(", r"Async.*does not use dist\.all_reduce"),
        (LAYERS, "class ColumnParallel(torch", "class Columns(torch", r"tensor\.ColumnParallel.*it does not exist"),
        (COORDINATOR, "def __all_gather_params_(self, params", "def __gather(self, params", "it does not exist"),
    ],
)
def test_changes_of_a_release_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, old: str, new: str, said: str
) -> None:
    for name in (ENGINE, ZERO, STAGE3, PARTITIONING, COORDINATOR, LAYERS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        source = (site() / name).read_text(encoding="utf-8")
        if name == path:
            assert old in source
            source = source.replace(old, new)
        (tmp_path / name).write_text(source, encoding="utf-8")
    assert script.main([str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert any(re.search(said, line) for line in output.splitlines()), output


def test_unavailable_input_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([str(tmp_path)]) == 2
    assert "neither a release nor a folder" in capsys.readouterr().err
