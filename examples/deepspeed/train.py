"""A byte-level transformer on Python's own sources, trained with DeepSpeed. The JSON says which calls are quantized.

torchrun --nproc-per-node 2 examples/deepspeed/train.py --config examples/deepspeed/ds_config.json
"""

import argparse
import sysconfig
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import flash_allreduce_plugin as fap  # for the count of bytes at the end, nothing else

SEQUENCE, WIDTH, HEADS, LAYERS = 128, 128, 4, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x, y = text[:, :-1], text[:, 1:]
        hidden = self.bytes(x) + self.positions(torch.arange(SEQUENCE, device=text.device))
        return nn.functional.cross_entropy(self.head(self.layers(hidden)).flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="DeepSpeed's JSON")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=arguments.config)
    batches, rows = torch.Generator().manual_seed(dist.get_rank()), engine.train_micro_batch_size_per_gpu()
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(text) - SEQUENCE, (rows,), generator=batches)
        loss = engine(torch.stack([text[start : start + SEQUENCE + 1] for start in starts]).to(engine.device))
        engine.backward(loss)
        engine.step()
        if step % 50 == 0 or step == arguments.steps:
            mean = loss.detach().float()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean / dist.get_world_size():.4f}", flush=True)
    if dist.get_rank() == 0:
        for name, site in fap.stats()["sites"].items():
            print(f"{name}: {site['quantized']} of {site['calls']} calls quantized, ", end="")
            print(f"{site['bytes_sent'] / 1e6:.1f} of {site['bytes_full_precision'] / 1e6:.1f} MB sent")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
