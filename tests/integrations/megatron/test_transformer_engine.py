"""Seams of Transformer Engine on two real ranks, with a stand-in for TE (te_stub/, see its __init__).

A GPT is built of megatron-core's own wrappers (TELayerNormColumnParallelLinear, TERowParallelLinear) around the
stand-in's layers and trained, with nothing patched, enabled in several ways, and disabled again; layers that such a
GPT does not have are run alone. Every rank function observes many things, the tests check its result.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from scripts import check_transformer_engine_versions
from tests.distributed import run_ranks

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    # not importorskip: Megatron looks for Transformer Engine when it is imported, and a rank finds te_stub only then
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from flash_allreduce_plugin import policy
from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.cli.demo.model import (
    ModelSize,
    build_model,
    finish_gradients,
    loss_of,
    prepare_cpu,
    replicas_equal,
)
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import transformer_engine
from flash_allreduce_plugin.telemetry import counters

WORLD = 2
STUB = Path(__file__).parent / "te_stub"
SIZE = ModelSize(hidden=64, layers=2, heads=4, sequence=32, batch=2)
G, DGRAD = transformer_engine.G_FORWARD.name, transformer_engine.DGRAD.name
SP_G, SP_G_BACKWARD = transformer_engine.SP_G_FORWARD.name, transformer_engine.SP_G_BACKWARD.name
GATHER, REGATHER = transformer_engine.SP_GATHER.name, transformer_engine.SP_REGATHER.name
SP_DGRAD = transformer_engine.SP_DGRAD.name
SITES = {G, DGRAD, SP_G, SP_G_BACKWARD, GATHER, REGATHER, SP_DGRAD}

BOTH = FlashConfig(bits=8, backward_bits=8, min_bytes=0)
ALL = FlashConfig(bits=8, backward_bits=8, sequence_parallel_gather_bits=8, min_bytes=0)
L = SIZE.layers


def changed(**fields: Any) -> FlashConfig:
    return ALL.model_copy(update=fields)


def start(*, stub: Path = STUB) -> Any:
    """Start Megatron with the stand-in for Transformer Engine, tensor parallel over both ranks."""
    sys.path.insert(0, str(stub))
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD)
    prepare_cpu()
    return parallel_state.get_tensor_model_parallel_group()


def gpt(sequence_parallel: bool, *, with_te: bool = True) -> torch.nn.Module:
    """Return the demo's GPT, its linear layers Megatron's wrappers of Transformer Engine."""
    from megatron.core.extensions import transformer_engine as wrappers
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.identity_op import IdentityOp

    local = gpt_layer_specs.get_gpt_layer_local_spec

    def spec() -> Any:
        layer = local()
        if with_te:
            attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
            attention.linear_qkv = mlp.linear_fc1 = wrappers.TELayerNormColumnParallelLinear
            attention.linear_proj = mlp.linear_fc2 = wrappers.TERowParallelLinear
        return layer

    gpt_layer_specs.get_gpt_layer_local_spec = spec
    try:
        return build_model(SIZE, tensor_parallel=WORLD, sequence_parallel=sequence_parallel, seed=3)
    finally:
        gpt_layer_specs.get_gpt_layer_local_spec = local


def counts(call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Return the value of `call()` and the counts of each site during it: {site: (quantized, {reason: count})}."""
    counters.reset_stats()
    value = call()
    sites = counters.stats()["sites"]
    return value, {name: (site["quantized"], site["full_precision"]) for name, site in sites.items()}


def of_te(fired: dict[str, Any]) -> dict[str, Any]:
    return {site: count for site, count in fired.items() if site in SITES}


DATA = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(5))


def loss_and_gradients(model: torch.nn.Module) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = loss_of(model, DATA, torch.tensor([0, 1000]), SIZE.sequence)
    loss.backward()
    return float(loss.detach()), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train(sequence_parallel: bool, group: Any) -> tuple[list[float], bool]:
    """Return losses of three steps, and True if replicated parameters are the same on all ranks."""
    model = gpt(sequence_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        losses.append(loss_and_gradients(model)[0])
        finish_gradients(model, group, clip=1.0)
        optimizer.step()
    return losses, replicas_equal(model, group)


def raw_entries() -> dict[str, Any]:
    """Return the object at each seam's target, staticmethod objects as such."""
    entries = {}
    for seam in transformer_engine.seams(FlashConfig):
        *path, name = seam.attribute.split(".")
        owner = functools.reduce(getattr, path, importlib.import_module(seam.module))
        entries[seam.id] = inspect.getattr_static(owner, name)
    return entries


def model_runs(sequence_parallel: bool, group: Any) -> dict[str, Any]:
    local = gpt(sequence_parallel, with_te=False)
    seen: dict[str, Any] = {"local": loss_and_gradients(local)[0]}
    model = gpt(sequence_parallel)
    before = raw_entries()

    def run() -> Any:
        return counts(lambda: loss_and_gradients(model))

    def loss() -> float:
        return float(loss_of(model, DATA, torch.tensor([0, 1000]), SIZE.sequence).detach())

    seen["stock"], seen["stock training"] = run(), train(sequence_parallel, group)
    for name, config in {
        "all": ALL,
        "again": ALL,
        "forward only": changed(backward_bits="full"),
        "no gathers": BOTH,
        "switched off": changed(enabled=False),
        "one block": changed(include=["decoder.layers.0.mlp"]),
        "all but one": changed(exclude=["*.linear_fc2"]),
        "small": changed(min_bytes=10**9),
        "warm-up": changed(warmup_steps=1),
    }.items():
        megatron.enable(config)
        seen[name] = run()
    patched = raw_entries()
    seen["report"], seen["printed"] = megatron.report(), str(megatron.report())
    seen["all replaced"] = all(patched[seam] is not before[seam] for seam in before)

    megatron.enable(ALL)
    seen["with grad"] = counts(loss)
    with torch.no_grad():
        seen["without grad"] = counts(loss)
        with megatron.full_precision():
            seen["on request"] = counts(loss)
        megatron.enable(changed(quantize_evaluation=False))
        model.eval()
        seen["evaluation"] = counts(loss)
    model.train()
    megatron.disable()
    seen["all restored"] = raw_entries() == before
    seen["disabled"] = run()
    for name, config in {"training": ALL, "warm-up training": changed(warmup_steps=2)}.items():
        megatron.enable(config)
        seen[name] = counts(lambda: train(sequence_parallel, group))
        megatron.disable()

    _, seen["older forward"] = counts(lambda: older_forward(model))
    return seen


def older_forward(model: torch.nn.Module) -> None:
    """Run the backward pass of a forward pass that ran before `enable`. It is a backward pass all the same."""
    model.zero_grad()
    loss = loss_of(model, DATA, torch.tensor([0, 1000]), SIZE.sequence)
    megatron.enable(changed(backward_bits="full"))
    loss.backward()
    megatron.disable()


def layer_runs(sequence_parallel: bool, group: Any, other: Any) -> dict[str, Any]:
    """Run single layers: Linear, column and row; LayerNormMLP, checkpointed or not."""
    from transformer_engine.pytorch import LayerNormMLP, Linear
    from transformer_engine.pytorch.module import linear

    def inputs(width: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7 + dist.get_rank() * sequence_parallel)
        return torch.randn(16, 2, width, generator=generator)

    def backward(layer: Any, x: torch.Tensor, wrap: Any = None) -> Callable[[], list[torch.Tensor]]:
        def run() -> list[torch.Tensor]:
            leaf = x.clone().requires_grad_()
            layer.zero_grad()
            output = layer(leaf) if wrap is None else wrap(layer, leaf)
            output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
            return [output.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())]

        return run

    def build(mode: str, tp_group: Any) -> Any:
        torch.manual_seed(11)
        return Linear(64, 64, sequence_parallel, tp_group=tp_group, tp_size=WORLD, bias=False, parallel_mode=mode)

    seen: dict[str, Any] = {}
    for mode, width in (("column", 64), ("row", 32)):
        layer, x = build(mode, group), inputs(width)
        stock = backward(layer, x)()
        seen[f"{mode} order"] = order(backward(layer, x))
        megatron.enable(ALL)
        seen[mode] = stock, *counts(backward(layer, x))
        seen[f"{mode} recomputed"] = counts(backward(layer, x, checkpoint))
        layer.fp8 = True
        quantized = counts(backward(layer, x))
        megatron.disable()
        seen[f"{mode} fp8"] = backward(layer, x)(), *quantized
        layer = build(mode, other)
        stock = backward(layer, x)()
        megatron.enable(ALL)
        seen[f"{mode} elsewhere"] = stock, *counts(backward(layer, x))
        megatron.disable()

    mlps = []
    for recompute in (False, True):
        torch.manual_seed(13)
        mlps.append(
            LayerNormMLP(64, 128, sequence_parallel, group, WORLD, set_parallel_mode=True, checkpoint=recompute)
        )
    x = inputs(64)
    stock = backward(mlps[0], x)()
    megatron.enable(ALL)
    seen["mlp"] = stock, *counts(backward(mlps[0], x))
    seen["mlp recomputed"] = stock, *counts(backward(mlps[1], x))
    x = torch.full((4096,), dist.get_rank() + 1, dtype=torch.uint8)
    seen["bytes"] = counts(lambda: linear.gather_along_first_dim(x, group)[0])
    seen["direct"] = counts(lambda: linear.allreduce(x.float(), group)[0])
    megatron.disable()
    return seen


def checkpoint(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


class Log(TorchDispatchMode):
    """Writes down matrix products, in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.mm.default:
            self.lines.append("product")
        return function(*args, **(kwargs or {}))


def order(step: Callable[[], Any]) -> list[str]:
    """Return products, starts of collectives and waits of a step, and if gathers and re-gathers agree."""
    log, gathered = Log(), []
    reals = {name: getattr(reductions, name) for name in ("all_reduce", "reduce_scatter", "all_gather")}

    class Handle:
        def __init__(self, name: str, handle: Any) -> None:
            self.name, self.handle = name, handle

        def wait(self) -> Any:
            log.lines.append(f"wait for {self.name}")
            return self.handle.wait()

    def logged(name: str, real: Any) -> Any:
        def call(*tensors: Any, async_op: bool, **keywords: Any) -> Any:
            log.lines.append(f"start {name}" if async_op else name)
            handle = real(*tensors, async_op=async_op, **keywords)
            if keywords["site"].name in (GATHER, REGATHER):
                gathered.append(tensors[0])
            return Handle(name, handle) if async_op else handle

        return call

    megatron.enable(ALL)
    for name, real in reals.items():
        setattr(reductions, name, logged(name, real))
    try:
        with log:
            step()
    finally:
        for name, real in reals.items():
            setattr(reductions, name, real)
        megatron.disable()
    if gathered:
        log.lines.append("same bits" if torch.equal(*gathered) else "other bits")
    return log.lines


def refusals() -> dict[str, str]:
    """Return the messages for programs that enable the plugin in their own script."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformer_engine.pytorch.module import base

    def config(tensor_model_parallel_size: int = 2, **options: Any) -> Any:
        options["tensor_model_parallel_size"] = tensor_model_parallel_size
        return TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, **options)

    said = {}
    config(symmetric_ar_type="two_shot")
    megatron.enable(ALL)
    config()
    config(tensor_model_parallel_size=1, symmetric_ar_type="two_shot")  # there is nothing to bypass
    for name, options in {
        "overlap": {"tp_comm_overlap": True, "sequence_parallel": True},
        "symmetric": {"symmetric_ar_type": "two_shot"},
    }.items():
        try:
            config(**options)
        except ConfigError as error:
            said[name] = str(error)
    megatron.disable()
    config(tp_comm_overlap=True, sequence_parallel=True)
    base._ub_communicators = {"qkv_fprop": object()}
    try:
        megatron.enable(ALL)
    except ConfigError as error:
        said["userbuffers"] = str(error)
    base._ub_communicators = None
    said["enabled"] = str(megatron.is_enabled())
    return said


def other_engines() -> dict[str, Any]:
    """Call `enable` with a Transformer Engine imported late, one of another shape, and one with stale imports."""
    said: dict[str, Any] = {"before": "transformer_engine" in sys.modules}
    sys.path.insert(0, str(STUB))
    from transformer_engine.pytorch.module import linear

    def enabled() -> tuple[list[str], list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            megatron.enable(ALL)
        report = megatron.report()
        assert all(entry["in_place"] for entry in report.values()) and "megatron.g.forward" in report
        megatron.disable()
        return sorted(SITES & set(report)), [str(w.message) for w in caught if "flash_allreduce" in str(w.message)]

    said["as known"] = enabled()
    own = linear.allreduce
    exec("def allreduce(inp, tp_group=None, async_op=False, topology=None): ...", vars(linear))
    said["other parameters"] = enabled()
    linear.allreduce = own
    own = linear._linear_backward, linear._linear_forward_impl
    linear._linear_backward = linear._linear_forward_impl = lambda *_: None
    said["not called"] = enabled()
    linear._linear_backward, linear._linear_forward_impl = own
    return said


def observe(sequence_parallel: bool) -> bytes:
    group = start()
    other = dist.new_group(list(range(WORLD)))
    seen = model_runs(sequence_parallel, group)
    seen["layers"] = layer_runs(sequence_parallel, group, other)
    seen["refusals"] = refusals()
    return pickle.dumps(seen)


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return [pickle.loads(seen) for seen in run_ranks(WORLD, observe, False)]


@pytest.fixture(scope="module")
def sequence() -> list[dict[str, Any]]:
    return [pickle.loads(seen) for seen in run_ranks(WORLD, observe, True)]


@pytest.fixture(params=["plain", "sequence"])
def run(request: pytest.FixtureRequest) -> tuple[bool, list[dict[str, Any]]]:
    """Return True with sequence parallelism, and the results of the ranks."""
    return request.param == "sequence", request.getfixturevalue(request.param)


def expected(sequence_parallel: bool, **reasons: str) -> dict[str, Any]:
    """Return counts of one training step of the GPT; `reasons`: by role, why its calls are in full precision."""
    forward = {SP_G: "forward", GATHER: "gather"} if sequence_parallel else {G: "forward"}
    backward = (
        {SP_G_BACKWARD: "gradient", REGATHER: "gather", SP_DGRAD: "backward"}
        if sequence_parallel
        else {DGRAD: "backward"}
    )
    roles = {**forward, **backward}
    return {site: (0, {reasons[r]: 2 * L}) if r in reasons else (2 * L, {}) for site, r in roles.items()}


def everywhere(reason: str) -> dict[str, str]:
    return dict.fromkeys(("forward", "backward", "gather", "gradient"), reason)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def same(found: list[torch.Tensor], truth: list[torch.Tensor]) -> bool:
    return len(found) == len(truth) and all(map(torch.equal, found, truth))


def test_the_stand_in_equals_megatrons_own_layers(run):
    for seen in run[1]:
        assert seen["stock"][0][0] == pytest.approx(seen["local"], abs=1e-5)
        assert seen["stock"][1] == {}


def test_each_site_fires_as_often_as_the_model_calls_it(run):
    sequence_parallel, ranks = run
    for seen in ranks:
        assert of_te(seen["all"][1]) == expected(sequence_parallel)
        assert seen["again"][1] == seen["all"][1] and same(seen["again"][0][1], seen["all"][0][1])


def test_gradients_differ_by_the_codecs_error(run):
    for seen in run[1]:
        (loss, gradients), _ = seen["all"]
        assert 0 < abs(loss - seen["stock"][0][0]) < 1e-3
        whole, truth = (torch.cat([g.flatten() for g in found]) for found in (gradients, seen["stock"][0][1]))
        assert 0 < error(whole, truth) < 0.05


def test_widths(run):
    sequence_parallel, ranks = run
    full = {"backward": policy.is_full("backward_bits"), "gradient": policy.is_full("backward_bits")}
    gathers = {
        "gather": policy.is_full("sequence_parallel_gather_bits"),
        "gradient": policy.is_full("sequence_parallel_gather_bits"),
    }
    for seen in ranks:
        assert of_te(seen["forward only"][1]) == expected(sequence_parallel, **full)
        assert seen["forward only"][0][0] == seen["all"][0][0], "the forward pass is the same"
        assert of_te(seen["no gathers"][1]) == expected(sequence_parallel, **gathers)


@pytest.mark.parametrize(
    ("way", "reason"), [("switched off", policy.DISABLED), ("small", policy.SMALL), ("warm-up", policy.WARM_UP)]
)
def test_full_precision_has_the_bits_of_transformer_engine_alone(run, way, reason):
    sequence_parallel, ranks = run
    for seen in ranks:
        assert of_te(seen[way][1]) == expected(sequence_parallel, **everywhere(reason))
        assert seen[way][0][0] == seen["stock"][0][0]
        assert same(seen[way][0][1], seen["stock"][0][1])


def test_modules_by_name(run):
    for seen in run[1]:
        for site, (quantized, reasons) in of_te(seen["one block"][1]).items():
            assert (quantized, reasons) == (1, {policy.NOT_INCLUDED: 2 * L - 1}), site
        for site, count in of_te(seen["all but one"][1]).items():  # fc2 is row-parallel
            assert count == ((L, {policy.EXCLUDED: L}) if site in (G, SP_G, SP_G_BACKWARD) else (2 * L, {})), site


def test_without_gradients(run):
    sequence_parallel, ranks = run
    forward = {site: (2 * L, {}) for site in ((SP_G, GATHER) if sequence_parallel else (G,))}
    for seen in ranks:
        assert of_te(seen["with grad"][1]) == of_te(seen["without grad"][1]) == forward
        assert seen["with grad"][0] == seen["without grad"][0] == seen["all"][0][0]
        for way, reason in (("on request", "full_precision()"), ("evaluation", "evaluation")):
            assert of_te(seen[way][1]) == {site: (0, {reason: 2 * L}) for site in forward}
            assert seen[way][0] == seen["stock"][0][0]


def test_training_keeps_replicas_equal_and_warms_up(run):
    for seen in run[1]:
        stock, replicas = seen["stock training"]
        assert replicas
        (losses, replicas), fired = seen["training"]
        assert replicas and losses != stock and losses == pytest.approx(stock, abs=5e-3)
        assert all(count == (6 * L, {}) for count in of_te(fired).values())
        (losses, replicas), fired = seen["warm-up training"]
        assert replicas and losses[:2] == stock[:2] and losses[2] != stock[2]
        assert all(count == (2 * L, {policy.WARM_UP: 4 * L}) for count in of_te(fired).values())


def test_a_backward_whose_forward_ran_before_enable_has_the_backward_width(run):
    sequence_parallel, ranks = run
    full = {"backward": policy.is_full("backward_bits"), "gradient": policy.is_full("backward_bits")}
    counted = expected(sequence_parallel, **full)
    for seen in ranks:
        assert of_te(seen["older forward"]) == {s: c for s, c in counted.items() if s not in (G, SP_G, GATHER)}


def test_undo(run):
    for seen in run[1]:
        assert seen["all replaced"] and seen["all restored"]
        assert seen["disabled"][1] == {} and seen["disabled"][0][0] == seen["stock"][0][0]
        assert same(seen["disabled"][0][1], seen["stock"][0][1])


def test_report(run):
    for seen in run[1]:
        report = seen["report"]
        assert set(report) >= SITES and all(report[site]["in_place"] for site in SITES)
        assert report[G]["target"] == (
            "transformer_engine.pytorch.module.{linear,layernorm_linear,layernorm_mlp}.allreduce"
        )
        assert not [name for name in report if name.endswith(("_linear.forward", "_mlp.backward"))], "helpers"
        assert G in seen["printed"]


def test_input_gradients_are_sent_during_the_weight_gradients_product(plain, sequence):
    for seen in plain:
        assert seen["layers"]["column order"] == [
            "product",
            *("product", "start all_reduce", "product", "wait for all_reduce"),
        ]
        assert seen["layers"]["row order"] == ["product", "all_reduce", "product", "product"]
    for seen in sequence:
        assert seen["layers"]["column order"] == [
            *("all_gather", "product", "start all_gather", "product", "start reduce_scatter"),
            *("wait for all_gather", "product", "wait for reduce_scatter", "same bits"),
        ]
        assert seen["layers"]["row order"] == ["product", "reduce_scatter", "all_gather", "product", "product"]


def test_recomputation_has_the_bits_of_the_first_forward(run):
    for seen in run[1]:
        for mode in ("column", "row"):
            _, results, fired = seen["layers"][mode]
            assert same(seen["layers"][f"{mode} recomputed"][0], results)
            assert set(seen["layers"][f"{mode} recomputed"][1]) == set(fired)


def test_layer_norm_mlp_with_and_without_its_own_checkpoint(run):
    sequence_parallel, ranks = run
    sites = {SP_G, GATHER, SP_G_BACKWARD, REGATHER, SP_DGRAD} if sequence_parallel else {G, DGRAD}
    for seen in ranks:
        truth, results, fired = seen["layers"]["mlp"]
        assert fired == dict.fromkeys(sites, (1, {}))
        assert all(error(found, exact) < 0.05 for found, exact in zip(results, truth, strict=True))
        _, recomputed, fired = seen["layers"]["mlp recomputed"]
        assert same(recomputed, results)
        again = {REGATHER: (2, {})} if sequence_parallel else {}  # the recomputation gathers inside the backward
        assert fired == {**dict.fromkeys(sites, (1, {})), **again}


def test_a_layer_with_a_group_of_its_own_is_served(run):
    for seen in run[1]:
        for mode in ("column", "row"):
            stock, results, fired = seen["layers"][f"{mode} elsewhere"]
            assert not same(results, stock)
            assert all(error(found, exact) < 0.05 for found, exact in zip(results, stock, strict=True))
            assert fired and all(quantized == 1 and not reasons for quantized, reasons in fired.values())


def test_formats_of_transformer_engine_are_left_to_it(plain, sequence):
    left = (0, {transformer_engine.TE_FORMAT: 1})
    for seen in sequence:
        stock, results, fired = seen["layers"]["column fp8"]
        assert fired == {GATHER: left, REGATHER: left, SP_DGRAD: (1, {})}
        assert torch.equal(results[0], stock[0]) and torch.equal(results[2], stock[2])
        stock, results, fired = seen["layers"]["row fp8"]
        assert fired == {SP_G: (1, {}), SP_G_BACKWARD: left}
        assert same(results[1:], stock[1:])
    for seen in plain + sequence:
        gathered, fired = seen["layers"]["bytes"]
        assert gathered.tolist() == [1] * 4096 + [2] * 4096
        assert fired == {GATHER: left}


def test_a_call_that_is_in_no_layer_is_left_to_transformer_engine(plain):
    for seen in plain:
        total, fired = seen["layers"]["direct"]
        assert total.unique().tolist() == [3.0]
        assert fired == {G: (0, {transformer_engine.OUTSIDE: 1})}


def test_options_that_bypass_the_collectives_are_refused(plain):
    for seen in plain:
        said = seen["refusals"]
        assert said["overlap"].startswith("tp_comm_overlap and flash_allreduce_plugin exclude each other: ")
        assert said["symmetric"].startswith("symmetric_ar_type='two_shot' and flash_allreduce_plugin exclude")
        assert "userbuffers are initialized" in said["userbuffers"]
        assert said["enabled"] == "False", "a refused enable changes nothing"


def test_unsupported_transformer_engines_are_a_warning_and_not_patched():
    (said,) = run_ranks(1, other_engines)
    assert not said["before"]
    assert said["as known"] == (sorted(SITES), [])
    for way, why in (
        ("other parameters", "found (inp, tp_group, async_op, topology)"),
        ("not called", "nothing in transformer_engine.pytorch.module.linear calls it"),
    ):
        sites, (warning,) = said[way]
        assert sites == []
        for part in ("transformer_engine.pytorch.module.linear.allreduce", why, "1.13 to 2.20 (installed: 2.18.0)"):
            assert part in warning


def test_without_transformer_engine_there_is_no_trace_of_it():
    if "transformer_engine" in sys.modules or importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("Transformer Engine is installed")
    assert not transformer_engine.in_use()
    assert not SITES & set(megatron.report())
    assert not [seam for seam in megatron.seams() if seam.module.startswith("transformer_engine")]
    assert "transformer_engine" not in sys.modules


def test_the_check_of_versions_finds_differences(tmp_path, capsys):
    check = check_transformer_engine_versions.main
    assert check([str(STUB)]) == 0
    assert "21 of 21 seams" in capsys.readouterr().out
    shutil.copytree(STUB, tmp_path, dirs_exist_ok=True)
    sources = tmp_path / "transformer_engine" / "pytorch"
    for name, before, after in (
        ("distributed.py", "def allreduce(inp, tp_group=None, async_op=False)", "def allreduce(inp, *, topology)"),
        ("module/base.py", "quantizer=quantizer)", "quantizer=quantizer, stream=None)"),
        ("module/layernorm_mlp.py", "def backward(ctx, *grad_outputs)", "def backward(self, *grad_outputs)"),
    ):
        text = (sources / name).read_text()
        assert before in text
        (sources / name).write_text(text.replace(before, after))
    (sources / "module" / "linear.py").unlink()
    assert check([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    for part in (
        "12 of 21 seams",
        "module.layernorm_linear.allreduce: expected the parameters (inp, tp_group, async_op)",
        "found (inp, topology)",
        "module.base.gather_along_first_dim: line ",
        "module.layernorm_mlp._LayerNormMLP.backward: expected the parameters (ctx, ...), found (self, grad_outputs)",
        "module.linear.allreduce: the module does not exist",
    ):
        assert part in out
    assert check([str(tmp_path / "nothing")]) == 2
