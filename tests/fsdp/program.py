"""A program that trains with FSDP and does not know of the package; by_hand: with its hook or its reduce-scatter."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
by_hand = "by_hand" in sys.argv
if by_hand:
    import flash_allreduce_plugin as fap
if "fsdp1" in sys.argv:
    model = FullyShardedDataParallel(nn.Linear(256, 256), device_id=torch.device("cpu"))
    if by_hand:
        model.register_comm_hook(None, fap.fsdp1_hook())
else:
    model = fully_shard(nn.Linear(256, 256), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
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
dist.destroy_process_group()
