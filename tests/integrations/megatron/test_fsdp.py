"""The layout of Megatron-FSDP's buckets, the refusal of its version 2, and its seams, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations.megatron import fsdp, fsdp_seams
from flash_allreduce_plugin.integrations.megatron.data_parallel import Residuals


def host(config: FlashConfig) -> fsdp.Host:
    return fsdp.Host(
        "megatron_fsdp", "test", lambda: config, lambda: 0, lambda: None, lambda: None, Residuals(lambda: 0)
    )


def bucket(**shard: int) -> Any:
    """Return two parameters of 3 and 4 elements in a bucket of 12, with padding between and behind."""
    items = {0: SimpleNamespace(global_data_index=5, size=4), 1: SimpleNamespace(global_data_index=0, size=3)}
    return SimpleNamespace(
        bucket_index=SimpleNamespace(global_data_index=0, size=12),
        param_idx={"second": 0, "first": 1},
        item_index_map=items,
        is_data_distributed=bool(shard),
        shard_bucket_index=SimpleNamespace(**shard),
    )


def test_places_and_windows() -> None:
    assert fsdp.places(bucket()) == [((0, 3), "first"), ((5, 9), "second")]
    assert fsdp.window(bucket()) == (0, 12)
    assert fsdp.window(bucket(bucket_data_index=6, size=6)) == (6, 12)
    assert fsdp.clipped([(0, 3), (5, 9)], (6, 12)) == [(0, 3)]


def test_padding_is_cleared_in_a_bucket_and_in_a_shard() -> None:
    whole = torch.full((12,), float("nan"))
    fsdp.clear_padding(bucket(), whole, (0, 12))
    assert [number for number, one in enumerate(whole) if one == 0] == [3, 4, 9, 10, 11]
    shard = torch.full((6,), float("nan"))
    fsdp.clear_padding(bucket(bucket_data_index=6, size=6), shard, (6, 12))
    assert [number for number, one in enumerate(shard) if one == 0] == [3, 4, 5]


@pytest.mark.parametrize("given", [{"grad_bits": 8}, {"param_bits": 8}])
def test_version_2_is_refused(given: dict[str, int]) -> None:
    (seam,) = fsdp.version_2(host(FlashConfig(**given)))
    built: list[Any] = []
    with pytest.raises(ConfigError, match=r"^version 2 of Megatron-FSDP .* is not supported yet; shard with version 1"):
        seam.replacement(lambda self, mesh: built.append(mesh))("module", "mesh")
    assert not built


def test_a_preset_leaves_version_2_in_full_precision_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    built: list[Any] = []
    for _ in range(2):
        (seam,) = fsdp.version_2(host(FlashConfig(preset="int8")))
        seam.replacement(lambda self, mesh: built.append(mesh))("module", "mesh")
    assert built == ["mesh", "mesh"]
    assert capsys.readouterr().out.count("in full precision: version 2 of Megatron-FSDP") == 1


def test_the_seams_have_sites_of_their_host() -> None:
    seams = fsdp_seams.every(host(FlashConfig()))
    assert len({seam.id for seam in seams}) == len(seams) == 7
    assert all(seam.module.startswith("megatron_fsdp.") and seam.id.startswith("test.") for seam in seams)
    assert list(fsdp_seams.covers(host(FlashConfig()))) == [
        "test.gradients",
        "test.parameters",
        "test.parameter_differences",
    ]
