"""apex.parallel, patched: against a stand-in, and against apex's own source where APEX_PATH names a checkout of it.

    APEX_PATH=/path/to/apex python -m pytest tests/integrations/test_apex.py

apex asks for CUDA streams, events and tensor types; `on_cpu` gives it some that mean the CPU.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.integrations import apex as integration
from tests.distributed import Ranks

STUB = Path(__file__).parent / "apex_stub"
REAL = os.environ.get("APEX_PATH", "")
WORLD = 3  # not a power of two: a division in another place shows
WIDTH, PASSES = 64, 3
LAYERS = 4
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
MESSAGE = WIDTH * WIDTH + WIDTH  # a bucket a layer
EIGHT = fap.FlashConfig(bits=8, min_bytes=0)
OFF = fap.FlashConfig(enabled=False)


class Inert:
    """A stream or an event of a device that does nothing asynchronously."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def on_cpu() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = Inert
    cuda.current_stream = Inert
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.IntTensor = torch.IntTensor
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None
    own_type = tensor.type
    tensor.type = lambda self, *args: own_type(self, *args) if args else own_type(self).replace("torch.", "torch.cuda.")


def install(path: str) -> str:
    """Let `import apex` in this rank load from `path`; return the path that it was loaded from."""
    on_cpu()
    sys.path.insert(0, path)
    import apex.parallel  # type: ignore[import-not-found]

    return str(apex.parallel.__file__)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(str(STUB), id="stub"),
        pytest.param(REAL, id="apex", marks=pytest.mark.skipif(not REAL, reason="APEX_PATH names no checkout of apex")),
    ],
)
def group(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        for file in started.run(install, request.param):
            assert Path(file).is_relative_to(request.param)
        yield started


def wrapped(settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    from apex.parallel import DistributedDataParallel

    torch.manual_seed(7 + dist.get_rank())  # apex sends rank 0's weights to all
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).to(dtype)
    settings = dict(settings)
    if settings.pop("triggers", False):
        settings["allreduce_trigger_params"] = [model[4].weight]
    if settings.pop("communicators", False):
        settings["allreduce_communicators"] = ([dist.new_group() for _ in range(2)], [torch.cuda.Stream()] * 2)
    return DistributedDataParallel(model, **settings)


def flat_gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def backward(ddp: Any, seed: int, factor: float = 1.0) -> torch.Tensor:
    """Return the gradient after a forward and a backward pass on data of this rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    dtype = next(ddp.parameters()).dtype
    x = torch.randn(16, WIDTH, generator=generator).to(dtype)
    ddp.zero_grad()
    (ddp(x).float().square().sum() * factor).backward()
    return flat_gradient(ddp)


Call = tuple[int, str, str]


@contextlib.contextmanager
def logged(owner: Any) -> Iterator[list[Call]]:
    """Log all-reduces of at least 100 elements through owner.all_reduce: elements, dtype, group."""
    calls: list[Call] = []
    real = owner.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, *a: Any, **k: Any) -> Any:
        calls.append((tensor.numel(), str(tensor.dtype), "all" if group in (None, dist.group.WORLD) else "another"))
        return real(tensor, op, group, *a, **k)

    owner.all_reduce = all_reduce
    try:
        yield calls
    finally:
        owner.all_reduce = real


def passes(settings: dict[str, Any], dtype: torch.dtype, config: fap.FlashConfig | None) -> dict[str, Any]:
    """Return gradients of PASSES passes of one model; config None: apex on its own."""
    fap.reset_stats()
    ddp = wrapped(settings, dtype)
    if config is not None:
        fap.apex.enable(config)
    try:
        with logged(dist if config is None else reductions) as calls:
            gradients = [backward(ddp, seed) for seed in range(PASSES)]
    finally:
        fap.apex.disable()
    return {"gradients": gradients, "log": calls, "sites": fap.stats()["sites"]}


BUCKETS = [PARAMETERS] + (PASSES - 1) * LAYERS * [MESSAGE]

CASES: dict[str, tuple[dict[str, Any], torch.dtype, list[int]]] = {
    "plain": ({"message_size": MESSAGE}, torch.float32, BUCKETS),
    "sum": ({"message_size": MESSAGE, "gradient_average": False}, torch.float32, BUCKETS),
    "predivide": ({"message_size": MESSAGE, "gradient_predivide_factor": 4.0}, torch.float32, BUCKETS),
    "predivided sum": (
        {"message_size": MESSAGE, "gradient_predivide_factor": 4.0, "gradient_average": False},
        torch.float32,
        BUCKETS,
    ),
    "fp16": ({"message_size": MESSAGE}, torch.float16, BUCKETS),
    "fp16 in fp32": ({"message_size": MESSAGE, "allreduce_always_fp32": True}, torch.float16, BUCKETS),
    "delayed": ({"message_size": MESSAGE, "delay_allreduce": True}, torch.float32, PASSES * [PARAMETERS]),
    # up to the weight of the third layer, which the backward pass comes to second
    "triggers": (
        {"triggers": True},
        torch.float32,
        [PARAMETERS] + (PASSES - 1) * [2 * MESSAGE, 2 * MESSAGE],
    ),
    "streams": ({"message_size": MESSAGE, "num_allreduce_streams": 2}, torch.float32, BUCKETS),
    "communicators": (
        {"message_size": MESSAGE, "num_allreduce_streams": 2, "communicators": True},
        torch.float32,
        BUCKETS,
    ),
    "retained": ({"message_size": MESSAGE, "retain_allreduce_buffers": True}, torch.float32, BUCKETS),
}


@pytest.mark.parametrize("name", CASES)
def test_divisors_order_and_counters(group: Ranks, name: str) -> None:
    settings, dtype, sizes = CASES[name]
    alone, off, eight = (group.run(passes, settings, dtype, config) for config in (None, OFF, EIGHT))
    in_flight = torch.float32 if settings.get("allreduce_always_fp32") else dtype
    many = settings.get("num_allreduce_streams", 1) > 1
    for rank in range(WORLD):
        calls = [(size, str(in_flight), "another" if many and size != PARAMETERS else "all") for size in sizes]
        assert alone[rank]["log"] == off[rank]["log"] == eight[rank]["log"] == calls
        assert alone[rank]["sites"] == {}
        site = eight[rank]["sites"]["apex.gradients"]
        assert site["quantized"] == site["calls"] == len(sizes)
        full = sum(2 * (size * in_flight.itemsize * (WORLD - 1) // WORLD) for size in sizes)
        assert site["bytes_full_precision"] == full
        assert site["bytes_sent"] < (0.6 if in_flight is torch.float16 else 0.3) * full
        assert off[rank]["sites"]["apex.gradients"]["full_precision"] == {"disabled by configuration": len(sizes)}
        for number in range(PASSES):
            exact, quantized = alone[rank]["gradients"][number], eight[rank]["gradients"][number]
            assert torch.equal(off[rank]["gradients"][number], exact)
            assert torch.equal(quantized, eight[0]["gradients"][number]), "the replicas have drifted apart"
            error = (quantized.float() - exact.float()).norm() / exact.float().norm()
            assert 0 < error < 0.02


def switched(config: fap.FlashConfig) -> dict[str, Any]:
    """Train one model before, while and after the plugin is enabled."""
    from apex.parallel.distributed import DistributedDataParallel, Reducer

    def methods() -> tuple[Any, Any]:
        return vars(DistributedDataParallel)["allreduce_bucket"], vars(Reducer)["reduce"]

    own = methods()
    ddp = wrapped({"message_size": MESSAGE})
    backward(ddp, 0)
    gradients, in_place, counted = [], [], []
    for on in (False, True, False):
        fap.reset_stats()
        if on:
            fap.apex.enable(config)
            fap.apex.enable(config.model_copy(update={"bits": 4}))  # only the configuration changes
            assert [a is b for a, b in zip(own, methods(), strict=True)] == [False, False]
        assert fap.apex.is_enabled() is on
        gradients.append(backward(ddp, 1))
        report = fap.apex.report()
        in_place.append([entry["in_place"] for entry in report.values()])
        counted.append((report["apex.gradients"]["quantized"], fap.stats()["bytes_sent"]))
        if on:
            assert f"apex.gradients: {LAYERS} calls, {LAYERS} quantized" in str(report)
            fap.apex.disable()
            fap.apex.disable()
    assert [a is b for a, b in zip(own, methods(), strict=True)] == [True, True]
    return {"gradients": gradients, "in_place": in_place, "counted": counted}


def test_a_model_that_was_wrapped_before_is_served_and_given_back(group: Ranks) -> None:
    for seen in group.run(switched, EIGHT):
        before, between, after = seen["gradients"]
        assert torch.equal(before, after) and not torch.equal(before, between)
        assert seen["in_place"] == [[False, False], [True, True], [False, False]]
        assert [quantized for quantized, _ in seen["counted"]] == [0, LAYERS, 0]
        codes = LAYERS * 2 * (WORLD - 1) * MESSAGE // WORLD  # a byte each, were they of 8 bits
        assert 0.5 * codes < seen["counted"][1][1] < 0.7 * codes, "four bits, as said last"


def warmed_up(accumulate: bool) -> dict[str, Any]:
    fap.reset_stats()
    ddp, other = (wrapped({"message_size": MESSAGE}) for _ in range(2))
    fap.apex.enable(fap.FlashConfig(bits=8, min_bytes=0, warmup_steps=2))
    try:
        for number in range(PASSES):
            if accumulate:
                ddp.disable_allreduce()
                backward(ddp, number)
                ddp.enable_allreduce()
            backward(ddp, number)
        backward(other, 0)
        fap.apex.disable()
        fap.apex.enable(fap.FlashConfig(bits=8, min_bytes=0, warmup_steps=2))
        backward(ddp, PASSES)
    finally:
        fap.apex.disable()
    site: dict[str, Any] = fap.stats()["sites"]["apex.gradients"]
    return site


@pytest.mark.parametrize("accumulate", [False, True])
def test_warm_up_counts_the_passes_of_a_model_that_reduce(group: Ranks, accumulate: bool) -> None:
    for site in group.run(warmed_up, accumulate):
        # The first pass has one bucket; so has that of the second model. The last one is the first of a new warm-up.
        assert site["full_precision"] == {"warm-up": 1 + LAYERS + 1 + LAYERS}
        assert site["quantized"] == LAYERS


def poisoned(bad: float, settings: dict[str, Any]) -> list[bool]:
    """Return for each gradient True if some elements are finite: after a first pass, a later one, and a third."""
    ddp = wrapped(settings)
    fap.apex.enable(EIGHT)
    try:
        gradients = [backward(ddp, n, bad if dist.get_rank() == 1 and n < 2 else 1.0) for n in range(3)]
    finally:
        fap.apex.disable()
    return [bool(gradient.isfinite().any()) for gradient in gradients]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_of_one_rank_reach_all_and_are_dropped(group: Ranks, bad: float) -> None:
    assert group.run(poisoned, bad, {"message_size": MESSAGE}) == WORLD * [[False, False, True]]


def one_element(bad: float) -> int:
    """Count the bad elements of a reduced bucket where one element of one rank was bad."""
    ddp = wrapped({})
    bucket = [torch.ones(1000), torch.ones(24)]
    if dist.get_rank() == 1:
        bucket[0][300] = bad
    fap.apex.enable(EIGHT)
    try:
        ddp.allreduce_bucket(bucket, 0, True)
    finally:
        fap.apex.disable()
    return int((~bucket[0].isfinite()).sum()) + 10000 * int((~bucket[1].isfinite()).sum())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_lone_bad_element_is_not_lost(group: Ranks, bad: float) -> None:
    for count in group.run(one_element, bad):
        assert 0 < count <= EIGHT.group_size


def reduced(config: fap.FlashConfig | None, as_list: bool) -> dict[str, Any]:
    from apex.parallel import Reducer

    fap.reset_stats()
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).half())
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
    reducer = Reducer([p.grad for p in model.parameters()] if as_list else model)
    if config is not None:
        fap.apex.enable(config)
    try:
        reducer.reduce()
        once = flat_gradient(model)
        reducer.reduce()
    finally:
        fap.apex.disable()
    return {"once": once, "twice": flat_gradient(model), "sites": fap.stats()["sites"]}


@pytest.mark.parametrize("as_list", [False, True])
def test_reducer(group: Ranks, as_list: bool) -> None:
    warm = fap.FlashConfig(bits=8, min_bytes=0, warmup_steps=1)
    alone, off, eight, warming = (group.run(reduced, config, as_list) for config in (None, OFF, EIGHT, warm))
    for rank in range(WORLD):
        exact = alone[rank]["once"]
        assert torch.equal(off[rank]["once"], exact) and torch.equal(warming[rank]["once"], exact)
        assert torch.equal(eight[rank]["twice"], eight[0]["twice"])
        assert 0 < (eight[rank]["once"] - exact).norm() / exact.norm() < 0.02
        assert eight[rank]["sites"]["apex.reducer"]["quantized"] == 4, "two dtypes, twice"
        assert warming[rank]["sites"]["apex.reducer"]["full_precision"] == {"warm-up": 2}
        assert alone[rank]["sites"] == {}


def unrelated(config: fap.FlashConfig) -> tuple[float, int]:
    """Call flat_dist_call from elsewhere, with torch's own function."""
    from apex.parallel.distributed import flat_dist_call

    fap.reset_stats()
    numbers = torch.full((1000,), float(dist.get_rank()))
    fap.apex.enable(config)
    try:
        flat_dist_call([numbers], dist.all_reduce)
    finally:
        fap.apex.disable()
    return float(numbers[0]), fap.stats()["calls"]


def test_other_tensors_than_gradients_stay_in_full_precision(group: Ranks) -> None:
    assert group.run(unrelated, EIGHT) == WORLD * [((WORLD - 1) / 2, 0)]


def a_folder(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


DISTRIBUTED = "apex/parallel/distributed.py"
PACKAGE = {"apex/__init__.py": "", "apex/parallel/__init__.py": ""}
SOURCE = (STUB / DISTRIBUTED).read_text()

MISFITS: dict[str, tuple[dict[str, str], str]] = {
    "the index's": ({"apex/__init__.py": "import pyramid"}, "is not NVIDIA's apex nor AMD's but another package"),
    "a module": ({"apex.py": ""}, "is not NVIDIA's apex nor AMD's but another package"),
    "a folder": ({"apex/README": ""}, "is not NVIDIA's apex nor AMD's but another package"),
    "NVIDIA's of today": (
        {"apex/__init__.py": "", "apex/multi_tensor_apply/__init__.py": ""},
        "has no apex.parallel, which NVIDIA removed after release 25.05; take torch's",
    ),
    "other parameters": (
        {**PACKAGE, DISTRIBUTED: SOURCE.replace("bucket_idx, force_default_stream):", "bucket_idx):")},
        r"expected the parameters \(self, bucket, bucket_idx, force_default_stream\), found \(self, bucket, bucket_",
    ),
    "another collective": (
        {**PACKAGE, DISTRIBUTED: SOURCE.replace("dist.all_reduce(reduced", "dist.all_reduce_coalesced(reduced")},
        "DistributedDataParallel.allreduce_bucket does not use dist.all_reduce; nothing was changed. Supported: NVIDIA",
    ),
    "no Reducer": (
        {**PACKAGE, DISTRIBUTED: SOURCE.replace("class Reducer", "class Producer")},
        r"cannot patch apex.parallel.distributed.Reducer.reduce: it does not exist",
    ),
}


@pytest.fixture
def no_apex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove apex from the imported modules, before and after."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", MISFITS)
def test_mismatching_input_is_refused(
    name: str, no_apex: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, sentence = MISFITS[name]
    monkeypatch.syspath_prepend(a_folder(tmp_path, files))
    with pytest.raises(fap.PatchError, match=sentence):
        fap.apex.enable(EIGHT)
    assert not fap.apex.is_enabled()
    found = sys.modules.get("apex.parallel.distributed")
    assert (found is not None) is (DISTRIBUTED in files), "a package that is refused by its files is not imported"
    if found is not None:
        assert found.DistributedDataParallel.allreduce_bucket.__module__ == found.__name__
        assert not hasattr(found.DistributedDataParallel.allreduce_bucket, "__wrapped__")


def test_absence_is_refused(no_apex: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(fap.PatchError, match="apex: not installed; install it from the source of NVIDIA's apex"):
        fap.apex.enable(EIGHT)


def test_a_module_made_up_by_hand_is_refused(no_apex: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    with pytest.raises(fap.PatchError, match=r"importing apex\.parallel\.distributed failed"):
        fap.apex.enable(EIGHT)


def fed_back(what: str, config: fap.FlashConfig) -> dict[str, Any]:
    """Return the mean of reduced gradients of the same backward pass, after the first, which forms the buckets."""
    from apex.parallel import Reducer

    repeats = 12
    fap.reset_stats()
    fap.apex.enable(config)
    try:
        if what == "model":
            reducing = wrapped({"message_size": MESSAGE})
            backward(reducing, 0)
            mean = sum(backward(reducing, 1) for _ in range(repeats)) / repeats
        else:
            generator = torch.Generator().manual_seed(dist.get_rank())
            own = [torch.randn(size, generator=generator) for size in (3000, 500)]
            grads, mean = [x.clone() for x in own], torch.zeros(3500)
            reducing = Reducer(grads)
            for _ in range(repeats):
                for grad, x in zip(grads, own, strict=True):
                    grad.copy_(x)
                reducing.reduce()
                mean += torch.cat(grads) / repeats
        owner = fap.apex.feedback(reducing)
        seen = {"mean": mean, "keys": [] if owner is None else owner.keys(), "steps": owner and owner.step}
    finally:
        fap.apex.disable()
    assert fap.apex.feedback(reducing) is None
    return {**seen, "dropped": fap.stats()["residuals_dropped"]}


@pytest.mark.parametrize("what", ["model", "reducer"])
def test_error_feedback(group: Ranks, what: str) -> None:
    three = fap.FlashConfig(bits=3, min_bytes=0)
    configs = (OFF, three, three.model_copy(update={"error_feedback": True, "error_feedback_momentum": 0.0}))
    exact, off, on = (group.run(fed_back, what, config) for config in configs)
    for rank in range(WORLD):
        errors = [float((one[rank]["mean"] - exact[rank]["mean"]).norm()) for one in (off, on)]
        assert 0 < errors[1] < 0.2 * errors[0]
        assert torch.equal(on[rank]["mean"], on[0]["mean"])
        assert off[rank]["keys"] == []
        if what == "model":
            assert on[rank]["keys"] == [str(number) for number in range(LAYERS)]
            assert on[rank]["steps"] == 13
            assert on[rank]["dropped"] == {"another layout": 1}, "the first pass reduces everything at once"
        else:
            assert on[rank]["keys"] == ["0"] and on[rank]["dropped"] == {}


@pytest.mark.parametrize(
    ("key", "value"), [("include", ["a"]), ("exclude", ["a"]), ("backward_bits", 8), ("param_backward_bits", 8)]
)
def test_a_key_without_effect_is_refused(key: str, value: Any) -> None:
    with pytest.raises(fap.ConfigError, match=rf"^{key}=.* has no effect in fap\.apex, where .*; leave it out\.$"):
        fap.apex.enable(fap.FlashConfig(**{key: value}))
    assert not fap.apex.is_enabled()


def test_a_dict_is_refused() -> None:
    with pytest.raises(TypeError, match="config is dict; expected FlashConfig or None"):
        fap.apex.enable({"bits": 8})  # type: ignore[arg-type]


def test_nothing_is_counted_or_in_place_before() -> None:
    report = integration.report()
    assert list(report) == ["apex.gradients", "apex.reducer"]
    assert str(report) == "not in place: apex.gradients, apex.reducer"
