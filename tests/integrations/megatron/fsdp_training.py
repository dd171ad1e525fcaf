"""Trainings with Megatron-FSDP on CPU ranks, for the tests of its seams: megatron-core's model, wrapper, optimizer.

Megatron-FSDP works on streams of CUDA. Here a stream does nothing, and "cuda" means the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from test_data_parallel import CudaIsCpu, enabled, start_megatron

from flash_allreduce_plugin.cli.demo.model import ModelSize, build_model, loss_of
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.megatron import data_parallel
from flash_allreduce_plugin.telemetry import counters

SIZE = ModelSize(hidden=64, layers=2, heads=4, sequence=32, batch=2)
DATA = torch.randint(16, (4000,), generator=torch.Generator().manual_seed(5))  # learnt fast: 16 of 256 bytes
CPU = torch.device("cpu")
SERVED = tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 16)
ZERO = {"optim": "ZeRO 1", "optim_grads": "ZeRO 2", "optim_grads_params": "ZeRO 3"}


class Inert:
    """A stream or an event of a device that does nothing asynchronously."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Inert()


def start(tensor_parallel_size: int = 1, instances: int = 1) -> None:
    """Prepare this rank, for good."""
    options: dict[str, Any] = {"num_distributed_optimizer_instances": instances} if instances > 1 else {}
    start_megatron(tensor_parallel_size, **options)
    without_cuda()
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    if not isinstance(mcore_fsdp_adapter.TELinear, type):  # without Transformer Engine, a stand-in for any class
        mcore_fsdp_adapter.TELinear = type("TELinear", (), {})


def without_cuda() -> None:
    """Give this rank streams of CUDA that do nothing, and meshes of the CPU."""
    from torch.distributed.device_mesh import DeviceMesh

    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.get_rng_state = lambda *args: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    cuda.Stream = cuda.Event = Inert
    cuda.current_stream = lambda *args: Inert()
    cuda.stream = lambda *args: contextlib.nullcontext()
    from_group = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(  # type: ignore[method-assign, assignment]
        lambda groups, device_type, *args, **kwargs: from_group(groups, "cpu", *args, **kwargs)
    )


class NoCuda(CudaIsCpu):
    """The same for the devices that Megatron-FSDP names."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.device:
            return CPU if str(args[0]).startswith("cuda") else function(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


class Training:
    """A GPT in bfloat16 under Megatron-FSDP with Megatron's optimizer. Options are of its DDP configuration."""

    def __init__(self, strategy: str, tp: int = 1, seed: int = 3, dtype: torch.dtype = torch.bfloat16, **options: Any):
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig, FullyShardedDataParallel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.group = parallel_state.get_data_parallel_group()
        options = {
            "data_parallel_sharding_strategy": strategy,
            "use_megatron_fsdp": True,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "grad_reduce_in_fp32": True,
            "gradient_reduce_div_fusion": False,  # PREMUL_SUM, which gloo lacks
            "bucket_size": 20_000,
            **options,
        }
        self.model = build_model(SIZE, tensor_parallel=tp, sequence_parallel=False, seed=seed).to(dtype)
        ddp_config = DistributedDataParallelConfig(**options)
        self.fsdp = FullyShardedDataParallel(self.model.config, ddp_config, self.model, device=CPU)
        adam = OptimizerConfig(
            optimizer="adam",
            lr=4e-4,
            bf16=dtype == torch.bfloat16,
            clip_grad=1.0,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(adam, [self.fsdp])
        self.losses: list[float] = []

    def step(self, number: int, micro_batches: int = 1) -> None:
        """Train on `micro_batches` batches, as megatron-core's schedules do."""
        self.fsdp.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.fsdp.no_sync():
            for micro_batch in range(1, micro_batches):
                (self.loss(number, micro_batch) / micro_batches).backward()
        loss = self.loss(number, 0)
        (loss / micro_batches).backward()
        self.losses.append(float(loss.detach()))
        self.fsdp.finish_grad_sync()
        assert self.optimizer.step()[0]

    def loss(self, number: int, micro_batch: int) -> torch.Tensor:
        starts = torch.arange(SIZE.batch) * 1000 + 40 * number + 17 * self.group.rank() + 400 * micro_batch
        return loss_of(self.fsdp, DATA.repeat(2), starts, SIZE.sequence)

    def run(self, first: int, last: int, micro_batches: int = 1) -> None:
        for number in range(first, last):
            self.step(number, micro_batches)

    def masters(self) -> torch.Tensor:
        """Return the exact values that this rank has."""
        groups = self.fsdp.param_and_grad_buffer.parameter_groups
        found = [one.main_weight_buffer for one in groups if one.main_weight_buffer is not None]
        items = [buffer.get_item(number, only_shard=True) for buffer in found for number in buffer.param_idx.values()]
        return torch.cat([item.detach().flatten() for item in items]).clone()


@contextlib.contextmanager
def trained(config: FlashConfig | None, strategy: str, **options: Any) -> Iterator[Training]:
    """Yield a training with the plugin, or without if config is None."""
    with NoCuda(), enabled(config):
        counters.reset_stats()
        training = Training(strategy, **options)
        try:
            yield training
        finally:
            # The next training numbers its residuals from 0, as in a process of its own.
            data_parallel.residuals._numbers.clear()
            data_parallel.residuals._started.clear()


def sent() -> dict[str, int]:
    """Return the bytes that this rank has sent, at each site of the plugin and elsewhere."""
    stats = counters.stats()
    found = {name: site["bytes_sent"] for name, site in stats["sites"].items()}
    return {**found, "elsewhere": sum(one["bytes_sent"] for one in stats["beside"].values())}


def same_everywhere(values: torch.Tensor, group: Any) -> bool:
    """Return True if all ranks of the group have the same bits."""
    others = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(others, values, group=group)
    return all(torch.equal(values, other) for other in others)
