"""A byte-level transformer on Python's own sources, every layer shared by all ranks (torch's tensor parallelism).

torchrun --nproc-per-node 2 examples/tensor_parallel/train.py                    full precision
torchrun --nproc-per-node 2 examples/tensor_parallel/train.py --preset int8      sums of activations at 8 bits
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flash_allreduce_plugin as fap

SEQUENCE, BATCH, WIDTH, HEAD = 128, 8, 128, 32
PLAN = {
    **dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel()),
    **dict.fromkeys(("output", "down"), RowwiseParallel()),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.before(x)
        heads = (part(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.output(attended)
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(3)))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x, y = text[:, :-1], text[:, 1:]
        hidden = self.bytes(x) + self.positions(torch.arange(SEQUENCE, device=text.device))
        return F.cross_entropy(self.head(self.layers(hidden)).flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", choices=("int8", "int4"), help="without it, torch's own sums")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(1)

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    model = Model().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        parallelize_module(layer, mesh, PLAN)
    if arguments.preset:
        # A small model for a demonstration: quantize at any size.
        fap.tensor_parallel.enable(fap.FlashConfig(preset=arguments.preset, min_bytes=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), foreach=False)
    batches = torch.Generator().manual_seed(1)  # the same batch on all ranks
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(text) - SEQUENCE, (BATCH,), generator=batches)
        loss = model(torch.stack([text[start : start + SEQUENCE + 1] for start in starts]).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step % 50 == 0 or step == arguments.steps) and dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}")
    if dist.get_rank() == 0:
        for name, site in fap.stats()["sites"].items():
            print(f"{name}: {site['quantized']} of {site['calls']} calls quantized, ", end="")
            print(f"{site['bytes_sent'] / 1e6:.1f} of {site['bytes_full_precision'] / 1e6:.1f} MB sent")
    dist.barrier()  # gloo's thread must release the last tensor before the interpreter ends, or the process aborts
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
