"""The rows of the registry: each integration keeps the contract and refuses the fields that its row names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.config import refusals
from flash_allreduce_plugin.integrations.contract import Contract, Integration, without_effect
from flash_allreduce_plugin.integrations.registry import ATTACHABLE, ROWS, Row
from flash_allreduce_plugin.policy import Role
from scripts import make_field_matrix

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {"include": ["layers.0"], "exclude": ["layers.0"], "error_feedback": True, "backward_rounding": "stochastic"}
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def value(name: str) -> Any:
    """Return a value other than the field's default."""
    if name in OTHERS:
        return OTHERS[name]
    return 8 if name.endswith("_bits") else not getattr(fap.FlashConfig(), name)


@every_row
def test_a_row_is_a_module_with_the_contract(row: Row) -> None:
    module = importlib.import_module(row.module)
    assert getattr(fap, row.name) is module and row.name in fap.__all__
    for name in (name for name in vars(Contract) if not name.startswith("_")):
        function = getattr(module, name)
        ours, asked = inspect.signature(function), inspect.signature(getattr(Contract, name))
        assert list(ours.parameters) == list(asked.parameters)[1:], f"{row.name}.{name}{ours}"
        assert function.__doc__, f"{row.name}.{name} has no docstring"
    assert not module.is_enabled() and module.report()


@every_row
def test_a_row_names_fields_and_a_page_that_exist(row: Row) -> None:
    fields = fap.FlashConfig.model_fields
    assert {*row.acts, *row.refused, *row.elsewhere} <= set(fields)
    assert set(row.acts) <= set(refusals.OF_MEGATRON) and not set(row.acts) & {*row.refused, *row.elsewhere}
    assert (ROOT / row.page).is_file()
    assert row.name != "megatron" or set(row.acts) == set(refusals.OF_MEGATRON)


@every_row
def test_each_field_without_effect_is_refused(row: Row) -> None:
    module = importlib.import_module(row.module)
    for name, why in without_effect(row).items():
        needed = {"backward_bits": 8} if name == "backward_rounding" else {}
        config = fap.FlashConfig(**needed, **{name: value(name)})
        with pytest.raises(fap.ConfigError, match=f"{name}=") as refused:
            module.enable(config)
        assert why in str(refused.value) and not module.is_enabled()


@pytest.mark.parametrize("row", ATTACHABLE.values(), ids=lambda row: row.name)
def test_an_attachable_row_has_by_environment(row: Row) -> None:
    assert callable(importlib.import_module(row.attach_module).by_environment)


@every_row
def test_the_sites_of_a_report_have_roles_of_the_fields_that_act(row: Row) -> None:
    """Check that a site's width comes from a field that acts. Otherwise the site would never be quantized."""
    module = importlib.import_module(row.module)
    acting = {"bits", "param_bits", *row.acts} - set(row.refused) - set(row.elsewhere)
    own = [one for one in vars(module).values() if isinstance(one, fap.Site)]
    for site in own:
        assert site.name in module.report()
        assert acting & set(Role(site.role).widths), site


@every_row
def test_seams_name_upstream_functions_without_importing_the_framework(row: Row) -> None:
    module = importlib.import_module(row.module)
    if isinstance(getattr(module, "integration", None), Integration) or importlib.util.find_spec(
        row.probe.split(".")[0]
    ):
        seams = module.seams()
        assert seams and len({seam.id for seam in seams}) == len(seams)
        assert all(seam.covers and seam.module for seam in seams)


def test_the_page_of_the_configuration_has_the_fields_by_integration() -> None:
    page = make_field_matrix.PAGE.read_text(encoding="utf-8")
    table = make_field_matrix.BEGIN + make_field_matrix.matrix() + make_field_matrix.END
    assert table in page, "the rows have changed: python -m scripts.make_field_matrix"
