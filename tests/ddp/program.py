"""A program that trains with DistributedDataParallel and does not know of the package; by_hand: with its hook."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Linear(256, 256))
if "by_hand" in sys.argv:
    import flash_allreduce_plugin as fap

    ddp.register_comm_hook(None, fap.ddp_hook())
optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
for step in range(5):
    optimizer.zero_grad()
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    loss = ddp(x).square().mean()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.17g}")
dist.barrier()
dist.destroy_process_group()
