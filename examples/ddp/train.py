"""A byte-level transformer on Python's own sources, trained with DistributedDataParallel and quantized gradients.

torchrun --nproc-per-node 2 examples/ddp/train.py              full precision
torchrun --nproc-per-node 2 examples/ddp/train.py --bits 8     gradients at 8 bits
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
    parser.add_argument("--bits", type=int, help="width of the gradients; without it, DDP's own reduction")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    # NCCL takes one rank a GPU: more ranks than GPUs share them over gloo, to try this out.
    dist.init_process_group("nccl" if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank() % gpus) if gpus else torch.device("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(1)

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    model = DistributedDataParallel(Model().to(device))
    if arguments.bits:
        # A small model for a demonstration: quantize its buckets at any size. FLASH_ALLREDUCE_* has priority.
        config = fap.FlashConfig.from_env(fap.FlashConfig(bits=arguments.bits, min_bytes=0))
        model.register_comm_hook(None, fap.ddp_hook(config))
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
