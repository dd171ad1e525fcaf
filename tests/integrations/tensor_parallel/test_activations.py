"""Activations are quantized, of the modules that a configuration names; all other tensors stay exact."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import flash_allreduce_plugin as fap
from tests.distributed import run_ranks
from tests.integrations.tensor_parallel.model import (
    EIGHT,
    TOKENS,
    WORDS,
    counts,
    mesh_of,
    new_model,
    served,
    train,
)


def everything_else() -> dict[str, Any]:
    """Run the program's other operations, besides a forward and a backward pass."""
    model = new_model(sequence=True, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ids = torch.randint(WORDS, (2, TOKENS))
    found: dict[str, Any] = {}

    def after(name: str) -> None:
        calls = counts()
        found[name] = {site: calls[site] for site in calls if site != "other"}
        fap.reset_stats()

    def look() -> None:
        fap.reset_stats()
        model(ids).sum().backward()
        after("a step")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        after("clip_grad_norm_")
        optimizer.step()
        after("optimizer")
        for parameter in model.parameters():
            parameter.full_tensor()  # type: ignore[operator]
            parameter.detach().full_tensor()  # type: ignore[operator]
            parameter.redistribute(placements=[Replicate()])  # type: ignore[operator]
        after("parameters")
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        after("state dicts")
        activation = DTensor.from_local(torch.randn(4, 8), mesh_of(), [Shard(0)])
        activation.requires_grad_().mul(2).full_tensor().sum().backward()
        after("full_tensor of a result")
        activation.redistribute(placements=[Replicate()])
        after("outside of modules, without a graph")

    served(EIGHT, look)
    return found


def test_parameters_optimizers_norms_and_state_dicts_stay_exact() -> None:
    for found in run_ranks(2, everything_else):
        assert found.pop("a step")["reduce.forward"] == (2, 2, {})
        assert not any(found.values()) and len(found) == 6


def without_a_graph() -> dict[str, Any]:
    model = new_model(layers=1)
    ids = torch.randint(WORDS, (2, TOKENS))
    found: dict[str, Any] = {}

    def forward(name: str, config: fap.FlashConfig, training: bool) -> None:
        with torch.no_grad():
            found[f"logits, {name}"] = served(config, model.train(training), ids)
        found[name] = counts()["reduce.forward"]

    forward("no_grad", EIGHT, True)
    forward("evaluation", EIGHT, False)
    forward("warm-up", EIGHT.model_copy(update={"warmup_steps": 1}), True)
    forward("inference", EIGHT.model_copy(update={"warmup_steps": 1}), False)
    forward("exact evaluation", EIGHT.model_copy(update={"quantize_evaluation": False}), False)
    found["logits, with a graph"] = served(EIGHT, model.train(), ids).detach()

    layer, x = model.layers[0], model.embedding(ids).detach()
    gradients = []
    for reentrant in (False, True, None):
        given = x.clone().requires_grad_()
        run = layer if reentrant is None else (lambda one, r=reentrant: checkpoint(layer, one, use_reentrant=r))
        served(EIGHT, lambda run=run, given=given: run(given).square().sum().backward())
        gradients.append(given.grad)
        found[f"checkpoint, {reentrant}"] = counts()["reduce.forward"]
    found["gradients"] = [torch.equal(one, gradients[-1]) for one in gradients]

    model.requires_grad_(False)
    model.layers[0].mlp.up.weight.requires_grad_(True)  # as an adapter
    served(EIGHT, lambda: model(ids).sum().backward())
    found["frozen"] = counts()
    return found


def test_evaluation_checkpointing_and_frozen_weights() -> None:
    for found in run_ranks(2, without_a_graph):
        assert found["no_grad"] == found["evaluation"] == found["inference"] == (2, 2, {})
        assert found["warm-up"] == (2, 0, {"warm-up": 2})
        assert found["exact evaluation"] == (2, 0, {"evaluation": 2})
        for name in ("no_grad", "evaluation"):
            assert torch.equal(found[f"logits, {name}"], found["logits, with a graph"])
        assert not torch.equal(found["logits, exact evaluation"], found["logits, with a graph"])
        # The second reduction of the recomputed layer is not needed by any gradient: torch stops before it.
        assert found["checkpoint, False"] == (3, 3, {}) and found["checkpoint, True"] == (4, 4, {})
        assert found["gradients"] == [True, True, True]
        assert found["frozen"]["reduce.forward"] == (2, 2, {})


def by_module(field: str, patterns: list[str]) -> tuple[dict[str, Any], list[str]]:
    model = new_model()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        served(EIGHT.model_copy(update={field: patterns}), train, model, dist.group.WORLD)
    return counts(), [str(one.message) for one in said if "flash_allreduce" in str(one.message)]


@pytest.mark.parametrize(
    ("field", "patterns", "forward", "backward", "warning"),
    [
        ("exclude", ["layers.0.*"], (24, 12, {"in exclude": 12}), (54, 30, {"in exclude": 24}), ""),
        ("include", ["*.mlp.down", "head"], (24, 12, {"not in include": 12}), (54, 6, {"not in include": 48}), ""),
        ("exclude", ["*.w2"], (24, 24, {}), (54, 54, {}), "exclude pattern '*.w2' matches no module whose activations"),
    ],
)
def test_include_and_exclude_name_modules(
    field: str, patterns: list[str], forward: Any, backward: Any, warning: str
) -> None:
    for found, said in run_ranks(2, by_module, field, patterns):
        assert found["reduce.forward"] == forward and found["reduce.backward"] == backward
        assert len(said) == bool(warning) and all(warning in line for line in said)
