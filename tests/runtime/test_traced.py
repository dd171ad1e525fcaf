"""torch.compile: the public functions are nodes of a graph, keep their bits and their order, and never crash it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.telemetry import counters
from tests.codecs import gaussian
from tests.distributed import Ranks

QUANTIZED = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096)
SITE = fap.Site("mine", module="layer.3")
BACKENDS = ("eager", "aot_eager", "inductor")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Yield separate ranks: Dynamo, once imported, stays in a process."""
    with tempfile.TemporaryDirectory() as folder, Ranks(2) as ranks:
        ranks.run(prepare, folder)
        yield ranks


def prepare(folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1


def compiled(function: Any, backend: str, **how: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, **how)


def calls(function: Callable[..., Any], *arguments: Any) -> tuple[Any, dict[str, Any]]:
    fap.reset_stats()
    result = function(*arguments)
    return result, fap.stats()["sites"]


# ---- the contents of a graph ----


def sum_of(x: Tensor) -> Tensor:
    y = x * 2
    fap.all_reduce(y, config=QUANTIZED)
    return y + 1


def average_at_a_site(x: Tensor) -> Tensor:
    y = x * 2
    fap.all_reduce(y, dist.ReduceOp.AVG, dist.group.WORLD, QUANTIZED, site=SITE, step=3)
    return y + 1


def in_place(x: Tensor) -> Tensor:
    fap.all_reduce(x, config=QUANTIZED)
    return x.sum()


def of_a_view(x: Tensor) -> Tensor:
    y = x * 2
    fap.all_reduce(y[100:900], config=QUANTIZED)
    return y


def by_the_environment(x: Tensor) -> Tensor:
    y = x * 2
    fap.all_reduce(y)
    return y


def scattered(x: Tensor) -> Tensor:
    part = torch.empty(x.numel() // 2)
    fap.reduce_scatter(part, x * 1.5, config=QUANTIZED)
    return part * 2


def gathered(x: Tensor) -> Tensor:
    whole = torch.empty(x.numel() * 2)
    fap.all_gather(whole, x * 1.5, config=QUANTIZED)
    return whole * 2


def encoded(x: Tensor) -> Tensor:
    return fap.decode(fap.encode(x * 2, QUANTIZED), x.shape, torch.float32, QUANTIZED) + 1


def unused(x: Tensor) -> Tensor:
    """Drop the results of calls. The peers wait for these calls anyway."""
    fap.all_reduce(x * 3, config=QUANTIZED, site=fap.Site("first"))
    part = torch.empty(x.numel() // 2)
    fap.reduce_scatter(part, x * 5, config=QUANTIZED, site=fap.Site("second"))
    fap.all_reduce(x[:5] * 3, config=QUANTIZED, site=fap.Site("third"))
    return x + 1


GRAPHS = (sum_of, average_at_a_site, in_place, of_a_view, by_the_environment, scattered, gathered, encoded, unused)


def graphs_of(backend: str) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Return the cases of a backend. Inductor takes seconds for each and treats the others the same."""
    return (sum_of, in_place, scattered, gathered, encoded, unused) if backend == "inductor" else GRAPHS


def as_without(backend: str) -> list[tuple[str, bool, bool]]:
    """Return, for every case: True if a graph gives the same bits, True if it counts as the call without one."""
    found = []
    for case in graphs_of(backend):
        x = gaussian(4000, seed=dist.get_rank())
        plain, graph = x.clone(), x.clone()
        expected, counted = calls(case, plain)
        result, again = calls(compiled(case, backend, fullgraph=True), graph)
        same = torch.equal(result, expected) and torch.equal(graph, plain)
        found.append((case.__name__, same, again == counted))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_holds_every_call_and_gives_its_bits(ranks: Ranks, backend: str) -> None:
    for found in ranks.run(as_without, backend):
        assert found == [(case.__name__, True, True) for case in graphs_of(backend)]


def order(backend: str) -> list[str]:
    seen, record = [], counters.record_quantized

    def recording(site: fap.Site, *counts: Any) -> None:
        seen.append(site.name)
        record(site, *counts)

    run = compiled(unused, backend, fullgraph=True)
    counters.record_quantized = recording
    try:
        run(gaussian(4000, seed=dist.get_rank()))
    finally:
        counters.record_quantized = record
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_call_is_dropped_or_exchanged_whatever_becomes_of_its_result(ranks: Ranks, backend: str) -> None:
    assert ranks.run(order, backend) == [["first", "second", "third"]] * 2


def changing() -> list[bool]:
    def reduce(x: Tensor, config: fap.FlashConfig, site: fap.Site, op: Any, step: int) -> Tensor:
        fap.all_reduce(x, op, config=config, site=site, step=step)
        return x * 2

    run, found = compiled(reduce, "aot_eager", fullgraph=True), []
    average, warm = dist.ReduceOp.AVG, QUANTIZED.model_copy(update={"warmup_steps": 3})
    for numel, config, site, op, step in [
        (4000, QUANTIZED, SITE, dist.ReduceOp.SUM, 0),
        (4000, QUANTIZED.model_copy(update={"bits": 8}), SITE, dist.ReduceOp.SUM, 0),
        (4000, QUANTIZED, fap.Site("other", fap.Role.BACKWARD), dist.ReduceOp.SUM, 0),
        (4000, QUANTIZED, SITE, average, 0),
        *((1000 * step + 1000, warm, SITE, average, step) for step in range(5)),
    ]:
        x = gaussian(numel, seed=dist.get_rank())
        expected, counted = calls(reduce, x.clone(), config, site, op, step)
        result, again = calls(run, x.clone(), config, site, op, step)
        found.append(torch.equal(result, expected) and again == counted)
    return found


def test_a_graph_is_recompiled_for_another_configuration_site_operator_or_step(ranks: Ranks) -> None:
    assert ranks.run(changing) == [[True] * 9] * 2


# ---- forward and backward ----


class Reduced(torch.autograd.Function):
    """Megatron's pair in one autograd function: a sum forward, and one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        fap.all_reduce(y, config=QUANTIZED, site=fap.Site("forward"))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        fap.all_reduce(gradient, config=QUANTIZED, site=fap.Site("backward", fap.Role.BACKWARD))
        fap.all_reduce(gradient, config=QUANTIZED, site=fap.Site("backward, quantized"))
        return gradient


class Layer(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(1 + dist.get_rank())
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 16)
        self.recompute = recompute

    def inner(self, x: Tensor) -> Tensor:
        return Reduced.apply(self.second(torch.relu(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)


def trained(model: nn.Module, run: Any) -> list[Tensor]:
    x = gaussian(5 * 16, seed=7).view(5, 16).requires_grad_()
    model.zero_grad(set_to_none=True)
    output = run(x)
    (output * torch.linspace(-1, 1, 16)).sum().backward()
    assert x.grad is not None
    return [output.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def layer(backend: str) -> list[bool]:
    found = []
    for recompute in (False, True):
        model = Layer(recompute)
        expected, counted = calls(trained, model, model)
        if recompute:
            counted.pop("forward"), counted.pop("backward")
        for fullgraph in (True, False):
            result, again = calls(trained, model, compiled(model, backend, fullgraph=fullgraph))
            same = [torch.allclose(mine, theirs, rtol=1e-5) for mine, theirs in zip(result, expected, strict=True)]
            found += [all(same), counted.items() <= again.items()]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward(ranks: Ranks, backend: str) -> None:
    assert ranks.run(layer, backend) == [[True] * 8] * 2


# ---- causes of a graph break ----


def asynchronous(x: Tensor) -> Tensor:
    y = x + 1
    work = fap.all_reduce(y, config=QUANTIZED, async_op=True)
    z = x * 2
    work.wait()
    return y + z


def operator_of_its_own(x: Tensor) -> Tensor:
    y = x + 1
    fap.all_reduce(y, dist.ReduceOp(dist.ReduceOp.AVG), config=QUANTIZED)
    return y * 2


def uneven(x: Tensor) -> Tensor:
    part = torch.empty(1000 if dist.get_rank() == 0 else x.numel() - 1000)
    fap.reduce_scatter(part, [x[:1000], x[1000:]], config=QUANTIZED)
    return part * 2


def with_feedback(x: Tensor) -> Tensor:
    y, feedback = x + 1, fap.Feedback()
    fap.all_reduce(y, config=QUANTIZED, feedback=feedback.slot("a"))
    return y * 2


def exchange(x: Tensor) -> Tensor:
    y, output = x + 1, torch.empty_like(x)
    fap.all_to_all(output, y, config=QUANTIZED)
    return output * 2


def around(x: Tensor) -> Tensor:
    y, output, other = x + 1, torch.empty_like(x), 1 - dist.get_rank()
    sending = fap.isend(y, other, config=QUANTIZED)
    fap.recv(output, other, config=QUANTIZED)
    sending.wait()
    return output * 2


def from_one_root(x: Tensor) -> Tensor:
    y = x + 1
    fap.broadcast(y, 1, config=QUANTIZED)
    fap.reduce(y, 0, config=QUANTIZED)
    return y * 2


BREAKS = (asynchronous, operator_of_its_own, uneven, with_feedback, exchange, around, from_one_root)


def broken(backend: str) -> list[tuple[str, bool]]:
    found = []
    for case in BREAKS:
        x = gaussian(4000, seed=dist.get_rank())
        expected, counted = calls(case, x.clone())
        run = compiled(case, backend)
        for _ in range(2):
            result, again = calls(run, x.clone())
            found.append((case.__name__, torch.equal(result, expected) and again == counted))
        for numel in range(3000, 3020 if backend == "eager" else 3004, 2):  # more graphs than Dynamo makes
            run(x[:numel])
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_that_no_graph_can_hold_break_it_and_run_eagerly(ranks: Ranks, backend: str) -> None:
    for found in ranks.run(broken, backend):
        assert found == [(case.__name__, True) for case in BREAKS for _ in range(2)]


def mistakes(backend: str) -> list[str]:
    found = []
    x = torch.ones(400)
    for call in (
        lambda x: fap.all_reduce(x, "sum", config=QUANTIZED),
        lambda x: fap.all_reduce(x, config={"bits": 4}),
        lambda x: fap.all_reduce(x, site="mine"),
        lambda x: fap.all_reduce(x, dist.ReduceOp.BAND),
        lambda x: fap.reduce_scatter(x, x[:10], config=QUANTIZED),
        lambda x: fap.encode(x.double(), QUANTIZED),
        lambda x: fap.decode(x, (3,), torch.float32, QUANTIZED),
    ):
        try:
            compiled(call, backend)(x)
        except (TypeError, ValueError) as error:
            found.append(type(error).__name__)
        assert torch.equal(x, torch.ones(400))
    return found


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_mistakes_are_answered_as_without_a_graph(ranks: Ranks, backend: str) -> None:
    expected = ["TypeError", "TypeError", "TypeError", "ValueError", "ValueError", "TypeError", "TypeError"]
    assert ranks.run(mistakes, backend) == [expected] * 2


# ---- DistributedDataParallel ----


def data_parallel(backend: str, optimize: Any) -> tuple[bool, int, int]:
    """Compare gradients with those without a graph, and between ranks bit by bit. Count calls with and without."""

    def model() -> nn.Module:
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(16, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 16))
        wrapped = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=1)
        wrapped.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig(min_bytes=0)))
        return wrapped

    def step(model: nn.Module, run: Any) -> list[Tensor]:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            run(gaussian(5 * 16, seed=dist.get_rank()).view(5, 16)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    plain = model()
    expected, counted = calls(step, plain, plain)
    torch._dynamo.config.optimize_ddp = optimize
    torch._dynamo.config.compiled_autograd = optimize == "python_reducer"
    try:
        graph = model()
        found, again = calls(step, graph, compiled(graph, backend))
    finally:
        torch._dynamo.config.optimize_ddp, torch._dynamo.config.compiled_autograd = True, False
    pairs = zip(found, expected, strict=True)
    near = all((mine - theirs).abs().max() < 0.02 * theirs.abs().max() for mine, theirs in pairs)
    whole = torch.cat([gradient.flatten() for gradient in found])
    others = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
    dist.all_gather(others, whole)
    same = all(torch.equal(whole, other) for other in others)
    return near and same, counted["ddp.gradients"]["quantized"], again["ddp.gradients"]["quantized"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ddp_model_with_our_hook(ranks: Ranks, backend: str) -> None:
    for same, plain, graph in ranks.run(data_parallel, backend, True):
        assert same and plain == graph > 0


def test_a_ddp_model_whose_backward_is_compiled_too(ranks: Ranks) -> None:
    for same, _, graph in ranks.run(data_parallel, "aot_eager", "python_reducer"):
        assert same and graph == 2 * 6  # parameter by parameter


WITHOUT = """
import os, sys, tempfile, torch, torch.distributed as dist
import flash_allreduce_plugin as fap
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
config = fap.FlashConfig(min_bytes=0)
fap.all_reduce(torch.ones(400), config=config)
fap.encode(torch.ones(400), config)
print("torch._dynamo" in sys.modules, flush=True)
os._exit(0)
"""


def test_without_torch_compile_dynamo_is_not_imported() -> None:
    """Run in a separate process: ranks of the tests have Dynamo imported beforehand."""
    said = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=240)
    assert said.stdout == "False\n", said.stderr
