"""A program that trains with torch's data parallelism and does not use the package: ddp, fsdp1, fsdp2 or adapter.

adapter: a frozen model of FSDP2, and a layer that was added after fully_shard, which no rank reduces.

by_hand, after that: with the package's hook or reduce-scatter.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.leaving import leave

dist.init_process_group("gloo")
torch.manual_seed(0)
model, (kind, *by_hand) = nn.Linear(256, 256), sys.argv[1:]
if by_hand:
    import flash_allreduce_plugin as fap
if kind == "ddp":
    model = DistributedDataParallel(model)
    if by_hand:
        model.register_comm_hook(None, fap.ddp_hook())
elif kind == "fsdp1":
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if by_hand:
        model.register_comm_hook(None, fap.fsdp1_hook())
elif kind == "adapter":
    model = fully_shard(model.requires_grad_(False), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.adapter = nn.Linear(256, 256)
    model.register_forward_hook(lambda module, inputs, output: output + module.adapter(inputs[0]))
else:
    model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if by_hand:
        model.set_custom_reduce_scatter(fap.FlashReduceScatter())
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(5):
    optimizer.zero_grad()
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.17g}")
dist.barrier()
leave()
