"""Time to the first token of a Llama whose ranks share every layer by torch's tensor parallelism, over slow links.

    python -m lab.benchmarks.prefill                          needs root: makes hosts with netlab
    python -m lab.benchmarks.prefill --hosts 3 --smollm2      SmolLM2-135M, and the tokens that it goes on with

A forward pass of `--tokens` tokens in bf16 without a gradient, one rank and one core a host. Two sums a layer are
tensor-parallel; the embedding and the head are on every rank. "no collectives" leaves the sums out: what the arithmetic
takes. "bf16" is torch's own. min_bytes is 64 KiB: the sum of one token stays in full precision.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.integrations.patching import Patchset, Seam
from lab.benchmarks import command, ranks, smollm2, steps
from lab.benchmarks.llama import Llama, pretrained
from lab.benchmarks.smollm2 import Config

NO_COLLECTIVES, EXACT = "no collectives", "bf16"
OURS = ['{"bits": 8}', '{"preset": "int8"}', '{"preset": "int4"}']
MIN_BYTES = 1 << 16
PROMPT = "The capital of France is"


def shared(model: Llama) -> Llama:
    """Share the layers of `model` among all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, ParallelStyle] = {f"attn_{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"ffn_gate": ColwiseParallel(), "ffn_up": ColwiseParallel()}
    plan |= {"attn_output": RowwiseParallel(), "ffn_down": RowwiseParallel()}
    for layer in model.blk:
        parallelize_module(layer, mesh, plan)
    return model


def build(arguments: argparse.Namespace) -> Llama:
    """Return the model in bf16: SmolLM2's weights, or random ones."""
    if arguments.smollm2:
        return shared(pretrained(smollm2.load()).bfloat16())
    torch.manual_seed(1)
    heads = arguments.hidden // 64
    config = Config(arguments.layers, arguments.hidden, heads, heads, 4 * arguments.hidden, vocabulary=1024)
    return shared(Llama(config).bfloat16())


@contextlib.contextmanager
def active(variant: str) -> Iterator[None]:
    """Put the variant in place: "no collectives", "bf16", or a FlashConfig as JSON."""
    if variant == EXACT:
        yield
    elif variant == NO_COLLECTIVES:
        module, signature = "torch.distributed.tensor.placement_types", ("self", "tensor", "mesh", "mesh_dim")
        seam = Seam("benchmark.sum", module, "Partial._reduce_value", signature, _nothing_sent, "nothing is sent")
        patchset = Patchset("no collectives", [seam])
        patchset.apply()
        try:
            yield
        finally:
            patchset.restore()
    else:
        fap.tensor_parallel.enable(fap.FlashConfig.from_dict({"min_bytes": MIN_BYTES, **json.loads(variant)}))
        try:
            yield
        finally:
            fap.tensor_parallel.disable()


def _nothing_sent(original: Any) -> Any:
    return lambda self, tensor, mesh, mesh_dim: tensor


def in_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    ranks.start()
    model = build(arguments)
    ids = torch.randint(model.config.vocabulary, (1, arguments.tokens), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def step(_: str) -> None:
        model.logits(ids)

    times = steps.in_turn(arguments.variants, arguments.rounds, 1, step, active)
    half = ids.numel() * model.config.hidden * 2 * (dist.get_world_size() - 1) // dist.get_world_size()
    times.full_precision = 2 * half * 2 * model.config.layers
    times.sent |= {NO_COLLECTIVES: 0, EXACT: times.full_precision}
    return times.result()


def continued(arguments: argparse.Namespace) -> dict[str, Any]:
    """In a rank: PROMPT and the greedy tokens after it, of every variant."""
    ranks.start()
    weights = smollm2.load()
    model = shared(pretrained(weights).bfloat16())
    found = {}
    for variant in arguments.variants:
        with active(variant), torch.no_grad():
            ids = weights.tokenizer(PROMPT).view(1, -1)
            for _ in range(arguments.generate):
                ids = torch.cat([ids, _next(model, ids)], 1)
            found[variant] = ids.flatten().tolist()
    return found


def _next(model: Llama, ids: Tensor) -> Tensor:
    return model.logits(ids)[:, -1:].argmax(-1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser, hosts=2, variants=OURS, rates=False)
    parser.add_argument("--rates", nargs="*", default=[], help="links of these rates too, such as 1gbit")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.75])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--smollm2", action="store_true", help="its weights instead of random ones; 3 hosts")
    parser.add_argument("--generate", type=int, default=64, help="tokens, with --smollm2")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    variants, tables, tokens = [NO_COLLECTIVES, EXACT, *arguments.variants], [], arguments.tokens
    same: dict[str, int] = {}  # tokens of the prompt and after it that are bf16's, by variant
    if arguments.smollm2:
        generated = steps.over_links(continued, "none", arguments, variants=variants[1:])
        for variant, found in generated.items():
            same[variant] = sum(a == b for a, b in zip(found, generated[EXACT], strict=True))
            print(f"{variant:44}{same[variant]} of {len(found)} tokens as bf16", flush=True)
    for number in tokens:
        print(f"\n{number} tokens", flush=True)
        found = steps.at_shares(in_rank, variants, EXACT, arguments, tokens=number)
        tables += [{key: value for key, value in table.items() if key != "quantized"} for table in found]
        keep({"base": EXACT, "tables": tables, "same tokens": same})


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
