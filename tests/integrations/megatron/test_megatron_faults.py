"""A tensor-parallel rank raises in the middle of a step: its peers get CollectiveError, and Megatron can be freed."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.distributed import MEGATRON, Ranks

pytest.importorskip("megatron.core")

from flash_allreduce_plugin import errors
from flash_allreduce_plugin.cli.demo.model import build_model, prepare_cpu
from flash_allreduce_plugin.integrations import megatron
from tests.integrations.megatron.test_scopes import SIZE, WORLD, config, train

TIMEOUT = timedelta(seconds=3)


def raises(where: str) -> tuple[str, float, bool]:
    """Raise at rank 1 in a hook, of the forward or the backward pass."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    torch.set_num_threads(1)
    # Its groups have half an hour unless they are told otherwise.
    minutes = TIMEOUT / timedelta(minutes=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD, distributed_timeout_minutes=minutes)
    prepare_cpu()
    model = build_model(SIZE, tensor_parallel=WORLD, sequence_parallel=False, seed=3)
    theirs = mappings._reduce
    megatron.enable(config())
    train(model)  # all is well

    def raising(*_: object) -> None:
        raise ArithmeticError("this rank alone")

    if dist.get_rank() == 1:
        layer = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))
        if where == "forward":
            layer.register_forward_pre_hook(raising)
        else:
            layer.register_full_backward_hook(raising)
    start, message = time.monotonic(), "no error"
    try:
        train(model)
    except (ArithmeticError, errors.CollectiveError) as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    time.sleep(max(0.0, TIMEOUT.total_seconds() + 1 - seconds))  # the peers of a rank that ends fail immediately
    megatron.disable()
    return message, seconds, mappings._reduce is theirs and not megatron.is_enabled()


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_tensor_parallel_rank_raises(where: str) -> None:
    with Ranks(WORLD, TIMEOUT, preload=MEGATRON) as ranks:
        outcomes = ranks.outcomes(raises, where, timeout=60)
    for rank, (kind, value) in enumerate(outcomes):
        assert kind == "value", value
        message, seconds, undone = value
        assert undone
        if rank == 1:
            assert message == "ArithmeticError: this rank alone"
        else:
            assert message.startswith("CollectiveError: all_reduce at site 'megatron."), message
            assert ", rank 0 of 2, failed while " in message
            assert seconds < TIMEOUT.total_seconds() + 5
