"""How a hook finds its model: wrappers, states, hooks of two models, torch's Python reducer."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import replicated_params
from tests.distributed import Ranks
from tests.integrations.ddp.test_hook import WIDTH, Block, as_dtensors, beside_tensor_parallelism

CONFIG = fap.FlashConfig(bits=8, min_bytes=0)
TWO_MODELS = "one ddp_hook serves two models; make a hook for each"
Wrapper = Callable[[Any], Any]


class Weight(nn.Module):
    """A layer with the input as its weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def logged(hook: Any) -> Any:
    return lambda state, bucket: hook(state, bucket)


WRAPPERS: dict[str, Wrapper] = {
    "none": lambda hook: hook,
    "function": logged,
    "nine functions": lambda hook: functools.reduce(lambda inner, _: logged(inner), range(9), hook),
    "fp16": fp16_compress_wrapper,
    "method": lambda hook: hook.__call__,
    "partial": lambda hook: functools.update_wrapper(functools.partial(hook), hook),
}


def pair() -> dist.ProcessGroup:
    """Return this rank's group: {0, 1} or {2, 3}."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group: dist.ProcessGroup = groups[dist.get_rank() // 2]
    return group


def step(ddp: Any, number: float | None = None) -> float:
    """Return the mean of the gradient after one backward pass; number: the input, rank + 1 if None."""
    ddp.zero_grad()
    ddp(torch.full((512,), dist.get_rank() + 1.0 if number is None else number)).backward()
    return float(next(one.grad.mean() for one in ddp.parameters()))


def in_wrappers() -> dict[str, float]:
    group, found = pair(), {}
    for name, wrapper in WRAPPERS.items():
        ddp = DistributedDataParallel(Weight(), process_group=group)
        ddp.register_comm_hook(None, wrapper(fap.ddp_hook(CONFIG)))
        found[name] = step(ddp)
    states = {"group": group, "model": ddp, "has a group": SimpleNamespace(process_group=group)}
    for name, state in states.items():
        ddp = DistributedDataParallel(Weight(), process_group=group)
        ddp.register_comm_hook(ddp if name == "model" else state, logged(fap.ddp_hook(CONFIG)))
        found[name] = step(ddp)
    return found


def test_a_hook_inside_of_a_wrapper_averages_over_the_models_group(ranks: Callable[[int], Ranks]) -> None:
    for rank, found in enumerate(ranks(4).run(in_wrappers)):
        assert len(found) == len(WRAPPERS) + 3
        assert found == pytest.approx(dict.fromkeys(found, 1.5 if rank < 2 else 3.5), rel=1e-3)


def joined(by_initial: bool) -> list[float]:
    """Run a second step on rank 1, with gradient 4, when rank 0 has run out of data. Return its gradients."""
    found = []
    for wrapper in WRAPPERS.values():
        ddp = DistributedDataParallel(Weight())
        ddp.register_comm_hook(None, wrapper(fap.ddp_hook(CONFIG)))
        with ddp.join(divide_by_initial_world_size=by_initial):
            for _ in range(1 + dist.get_rank()):
                last = step(ddp, 4.0)
        found.append(last)
    return found


def test_join_divides_inside_of_a_wrapper_as_configured(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(joined, True)[1] == pytest.approx([2.0] * len(WRAPPERS), rel=1e-3)
    assert ranks(2).run(joined, False)[1] == pytest.approx([4.0] * len(WRAPPERS), rel=1e-3)


def test_copies_on_tensor_parallel_ranks_inside_of_a_wrapper(ranks: Callable[[int], Ranks]) -> None:
    for case, arguments in ((beside_tensor_parallelism, (True, {})), (as_dtensors, ({},))):
        alone = ranks(4).run(case, *arguments)
        for outcome, expected in zip(ranks(4).run(case, *arguments, logged), alone, strict=True):
            assert outcome["apart"] == 0
            assert outcome["sites"] == expected["sites"], "averaged over as many ranks"
            assert outcome["sites"]["ddp.gradients"]["full_precision"][replicated_params.REASON] > 0


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as refused:
        call()
    return str(refused.value)


def shared() -> list[str]:
    """Register one hook for two models, in each way of registering it."""
    group, found = pair(), []
    for wrapper in (WRAPPERS["none"], WRAPPERS["function"]):
        hook = fap.ddp_hook(CONFIG)
        one, two = DistributedDataParallel(Weight(), process_group=group), DistributedDataParallel(Weight())
        one.register_comm_hook(None, wrapper(hook))
        step(one)
        register = functools.partial(two.register_comm_hook, None, wrapper(hook))
        if wrapper is WRAPPERS["none"]:
            found.append(message_of(register))
            continue
        register()
        found.append(message_of(lambda: step(two)))  # noqa: B023
    return found


def test_a_hook_of_two_models_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(4).run(shared):
        assert len(found) == 2 and all(message.startswith(TWO_MODELS) for message in found)


def wrapped_again() -> list[float]:
    """Wrap a model with a hook again over another group, when the former wrapper is garbage."""
    group, found = pair(), []
    for wrapper in (WRAPPERS["none"], WRAPPERS["function"]):
        hook, module = fap.ddp_hook(CONFIG), Weight()
        for over in (None, group):
            ddp = DistributedDataParallel(module, process_group=over)
            ddp.register_comm_hook(None, wrapper(hook))
            found.append(step(ddp))
            if wrapper is WRAPPERS["none"]:
                ddp.itself = ddp  # garbage later on, which the collector has to find
    return found


def test_a_hook_of_a_model_that_is_wrapped_again(ranks: Callable[[int], Ranks]) -> None:
    for rank, found in enumerate(ranks(4).run(wrapped_again)):
        assert found == pytest.approx([2.5, 1.5 if rank < 2 else 3.5] * 2, rel=1e-3)


def unfound() -> list[Any]:
    """Build two wrappers of one module, and a model hidden from the garbage collector, without and with its name."""
    module = Weight()
    two = [DistributedDataParallel(module) for _ in range(2)]
    for ddp in two:
        ddp.register_comm_hook(None, logged(fap.ddp_hook(CONFIG)))
    found: list[Any] = [message_of(lambda: step(two[0]))]
    for named in (False, True):
        ddp = DistributedDataParallel(Weight())
        ddp.register_comm_hook(ddp if named else None, logged(fap.ddp_hook(CONFIG)))
        gc.freeze()
        try:
            found.append(step(ddp) if named else message_of(lambda: step(ddp)))  # noqa: B023
        finally:
            gc.unfreeze()
    return found


def test_a_hook_that_does_not_find_one_model_raises_with_the_remedy(ranks: Callable[[int], Ranks]) -> None:
    for several, none, served in ranks(2).run(unfound):
        assert several.startswith("ddp_hook found 2 of DistributedDataParallel")
        assert none.startswith("ddp_hook found none of DistributedDataParallel")
        assert none.endswith("Give the model as the state: model.register_comm_hook(model, hook).")
        assert served == pytest.approx(1.5, rel=1e-3)


# ---- torch's Python reducer ----


@contextmanager
def python_reducer() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp, torch._dynamo.config.compiled_autograd = "python_reducer", True
    try:
        yield
    finally:
        torch._dynamo.config.optimize_ddp, torch._dynamo.config.compiled_autograd = True, False


def of_the_python_reducer() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))
    found = []
    for how in ({"process_group": mesh.get_group("data")}, {"device_mesh": mesh["data"]}):
        for wrapper in (WRAPPERS["none"], WRAPPERS["function"]):
            with python_reducer():
                ddp = DistributedDataParallel(Weight(), **how)
                ddp.register_comm_hook(None, wrapper(fap.ddp_hook(CONFIG)))
                compiled = torch.compile(ddp, backend="eager")
                found.extend([step(compiled), step(compiled)])
    return found


def test_the_python_reducer_averages_over_the_models_group(ranks: Callable[[int], Ranks]) -> None:
    for rank, found in enumerate(ranks(4).run(of_the_python_reducer)):
        assert found == pytest.approx([1.5 if rank < 2 else 3.5] * 8, rel=1e-3)


def attached_to_dtensors(config: fap.FlashConfig | None) -> torch.Tensor:
    """Return gradients of a tensor-parallel model by the Python reducer, attached with device_mesh. None: torch's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(7)
    model = Block()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
    with python_reducer():
        if config is not None:
            fap.ddp.enable(config)
        try:
            ddp = DistributedDataParallel(model, device_mesh=mesh["dp"])
            (ddp(x) - x.flip(1)).square().mean().backward()
        finally:
            fap.ddp.disable()
    return torch.cat([one.grad.flatten() for one in ddp._module_parameters])


def test_the_python_reducer_attached_with_a_device_mesh(ranks: Callable[[int], Ranks]) -> None:
    plain, eight = (ranks(4).run(attached_to_dtensors, config) for config in (None, CONFIG))
    for own, quantized in zip(plain, eight, strict=True):
        assert 0 < float((quantized - own).norm() / own.norm()) < 0.02


def widths_that_are_chosen() -> list[str]:
    config = fap.FlashConfig(bits=4, min_bytes=0, min_sqnr_db=17.0, quality_interval=2)
    found = [message_of(lambda: attached_to_dtensors(config))]
    with python_reducer():
        found.append(message_of(lambda: beside_tensor_parallelism(True, config.given())))
    return found


def test_widths_that_each_group_chooses_are_refused_there_too(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(4).run(widths_that_are_chosen) == [[replicated_params.ADAPTIVE] * 2] * 4
