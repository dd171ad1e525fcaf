"""lab/benchmarks/prefill_engines.py: each engine equals one process, and quantizes on request."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import flash_allreduce_plugin as fap
from lab.benchmarks.llama import Llama, pretrained
from lab.benchmarks.prefill_engines import ENGINES, EXACT, NO_COLLECTIVES, start
from lab.benchmarks.smollm2 import Config, Pretrained
from tests.distributed import run_ranks

EIGHT = '{"bits": 8, "min_bytes": 0}'
PACKAGES = {"autotp": "deepspeed", "megatron": "megatron"}
CONFIG = Config(layers=2, hidden=64, heads=4, kv_heads=2, mlp=128, vocabulary=96)


def weights() -> Pretrained:
    torch.manual_seed(3)
    return Pretrained(CONFIG, Llama(CONFIG).state_dict(), [], [])


def last_logits(name: str) -> dict[str, Any]:
    """Return the logits of the last token and the number of quantized calls of each variant."""
    if name == "autotp":
        start(name)  # the others need the process group alone, which is there
    ids = torch.arange(24).view(1, -1) * 5 % CONFIG.vocabulary
    variants = [NO_COLLECTIVES, EXACT, EIGHT, EXACT]
    engine = ENGINES[name](weights(), ids.shape[1], variants)
    found: dict[str, Any] = {}
    for variant in variants:
        fap.reset_stats()
        with engine.active(variant), torch.no_grad():
            logits = engine(ids)[0, -1].float()
        again = {} if variant not in found else {"again": found[variant]["logits"]}
        found[variant] = {"logits": logits, "quantized": fap.stats()["quantized"], **again}
    with torch.no_grad():
        alone = pretrained(weights()).bfloat16().logits(ids)[0, -1].float()
    return {**found, "alone": alone}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_has_the_logits_of_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (package := PACKAGES.get(name)) and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for found in run_ranks(2, last_logits, name, timeout=120):
        alone = found.pop("alone")
        errors = {name: float((of["logits"] - alone).norm() / alone.norm()) for name, of in found.items()}
        assert errors[EXACT] < 0.03 and errors[EXACT] != errors[EIGHT] < 0.06
        assert errors[NO_COLLECTIVES] > 5 * errors[EXACT]
        assert torch.equal(found[EXACT]["logits"], found[EXACT]["again"])
        assert [found[variant]["quantized"] for variant in (NO_COLLECTIVES, EXACT, EIGHT)] == [0, 0, 4]
