"""A byte-level transformer on Python's own sources, in pipeline stages (torch.distributed.pipelining, 1F1B).

torchrun --nproc-per-node 2 examples/pipelining/train.py              full precision
torchrun --nproc-per-node 2 examples/pipelining/train.py --bits 8     stages send at 8 bits
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import flash_allreduce_plugin as fap

SEQUENCE, MICRO_BATCHES, BATCH, WIDTH, LAYERS = 128, 4, 4, 128, 4


class Stage(nn.Module):
    """A share of the layers; the first stage has the embeddings too, and the last one the head."""

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS * number // count, LAYERS * (number + 1) // count)
        ]
        self.layers = nn.ModuleList(layers)
        self.bytes = nn.Embedding(256, WIDTH) if number == 0 else None
        self.positions = nn.Embedding(SEQUENCE, WIDTH) if number == 0 else None
        self.head = nn.Linear(WIDTH, 256) if number == count - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bytes is not None and self.positions is not None:
            x = self.bytes(x) + self.positions(torch.arange(SEQUENCE, device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(SEQUENCE, device=x.device)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return x if self.head is None else self.head(x)


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, help="width of activations and their gradients; without it, torch's sends")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    if arguments.bits:
        # Small messages for a demonstration: quantize them at any size. FLASH_ALLREDUCE_* has priority.
        given = fap.FlashConfig(pipeline_bits=arguments.bits, pipeline_backward_bits=arguments.bits, min_bytes=0)
        fap.pipelining.enable(fap.FlashConfig.from_env(given))

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    model = Stage(rank, world).to(device)
    schedule = Schedule1F1B(PipelineStage(model, rank, world, device), MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    batches = torch.Generator().manual_seed(0)  # the same batches on all stages
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(text) - SEQUENCE, (MICRO_BATCHES * BATCH,), generator=batches)
        pieces = torch.stack([text[start : start + SEQUENCE + 1] for start in starts]).to(device)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = (pieces[:, :-1],) if rank == 0 else ()
        if rank == world - 1:
            schedule.step(*inputs, target=pieces[:, 1:], losses=losses)
        else:
            schedule.step(*inputs)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if losses and (step % 50 == 0 or step == arguments.steps):
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}", flush=True)
    if rank == world - 1:
        for name, site in fap.stats()["sites"].items():
            print(f"{name}: {site['quantized']} of {site['calls']} calls quantized, ", end="")
            print(f"{site['bytes_sent'] / 1e6:.1f} of {site['bytes_full_precision'] / 1e6:.1f} MB sent")
    dist.barrier()  # gloo's thread must release the last tensor before the interpreter ends, or the process aborts
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
