"""A byte-level transformer on Python's own sources, trained with FSDP2 and quantized gradients.

torchrun --nproc-per-node 2 examples/fsdp/train.py              full precision
torchrun --nproc-per-node 2 examples/fsdp/train.py --bits 8     gradients at 8 bits
torchrun --nproc-per-node 2 examples/fsdp/train.py --bits 8 --parameter-bits 8     parameters too
torchrun --nproc-per-node 4 examples/fsdp/train.py --bits 8 --replicas 2     each shard on two ranks
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import flash_allreduce_plugin as fap

SEQUENCE, BATCH, WIDTH = 128, 8, 128


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x, y = text[:, :-1], text[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(SEQUENCE, device=text.device)
        hidden = self.bytes(x) + self.positions(torch.arange(SEQUENCE, device=text.device))
        logits = self.head(self.layers(hidden, mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, help="width of the gradients; without it, torch's own reduction")
    parser.add_argument("--parameter-bits", type=int, help="width of the gathered parameters")
    parser.add_argument("--replicas", type=int, default=1, help="ranks that have the same shard (HSDP)")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if dist.get_world_size() % arguments.replicas:
        parser.error(f"{dist.get_world_size()} ranks cannot be {arguments.replicas} replicas of the same size")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(1)

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    model = Model().to(device)
    sizes = (arguments.replicas, dist.get_world_size() // arguments.replicas)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
    for layer in model.layers.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A small model for a demonstration: quantize at any size.
            if arguments.bits:
                module.set_custom_reduce_scatter(
                    fap.FlashReduceScatter(fap.FlashConfig(bits=arguments.bits, min_bytes=0))
                )
            else:
                module.set_force_sum_reduction_for_comms(not cuda)  # gloo has no AVG
            if arguments.parameter_bits:
                module.set_custom_all_gather(
                    fap.FlashAllGather(fap.FlashConfig(bits=arguments.parameter_bits, min_bytes=0))
                )
            if arguments.replicas > 1:
                config = fap.FlashConfig(bits=arguments.bits or 8, enabled=bool(arguments.bits), min_bytes=0)
                module.set_all_reduce_hook(fap.FlashAllReduce(mesh.get_group("replicate"), config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    batches = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(text) - SEQUENCE, (BATCH,), generator=batches)
        loss = model(torch.stack([text[start : start + SEQUENCE + 1] for start in starts]).to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == arguments.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean / dist.get_world_size():.4f}")
    if dist.get_rank() == 0:
        for name, site in fap.stats()["sites"].items():
            print(f"{name}: {site['quantized']} of {site['calls']} calls quantized, ", end="")
            print(f"{site['bytes_sent'] / 1e6:.1f} of {site['bytes_full_precision'] / 1e6:.1f} MB sent")
    dist.barrier()  # gloo's thread must release the last tensor before the interpreter ends, or the process aborts
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
