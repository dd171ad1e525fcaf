"""Measure the time to the first token of a tensor-parallel Llama over slow links.

    python -m lab.benchmarks.prefill                          needs root: makes hosts with netlab
    python -m lab.benchmarks.prefill --engine autotp          DeepSpeed's; megatron: its static engine
    python -m lab.benchmarks.prefill --hosts 3 --smollm2      SmolLM2-135M, and its next tokens
    python -m lab.benchmarks.prefill --tokens 1 --shares --rates 1gbit          the sums of a step of decoding

A forward pass of `--tokens` tokens in bf16 without a gradient, one rank and one core a host. Two sums a layer are
tensor-parallel; in Megatron that of the embedding too. "no collectives" skips the sums: the time of the arithmetic.
"bf16" is the engine's own. min_bytes is 64 KiB: the sum of one token stays in full precision.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist

from lab.benchmarks import command, prefill_engines, smollm2, steps
from lab.benchmarks.llama import Llama
from lab.benchmarks.prefill_engines import ENGINES, EXACT, NO_COLLECTIVES
from lab.benchmarks.smollm2 import Config, Pretrained

OURS = ['{"bits": 8}', '{"preset": "int8"}', '{"preset": "int4"}']
PROMPT = "The capital of France is"


def weights(arguments: argparse.Namespace) -> Pretrained:
    """Return SmolLM2's weights, or random ones."""
    if arguments.smollm2:
        return smollm2.load()
    torch.manual_seed(1)
    heads = arguments.hidden // 64
    config = Config(arguments.layers, arguments.hidden, heads, heads, 4 * arguments.hidden, vocabulary=1024)
    return Pretrained(config, Llama(config).state_dict(), [], [])


def in_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    prefill_engines.start(arguments.engine)
    given = weights(arguments)
    engine = ENGINES[arguments.engine](given, arguments.tokens, arguments.variants)
    ids = torch.randint(given.config.vocabulary, (1, arguments.tokens), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def step(_: str) -> None:
        engine(ids)

    times = steps.in_turn(arguments.variants, arguments.rounds, 1, step, engine.active)
    half = ids.numel() * given.config.hidden * 2 * (dist.get_world_size() - 1) // dist.get_world_size()
    sums = 2 * given.config.layers + (arguments.engine == "megatron")
    times.full_precision = 2 * half * sums
    times.sent |= {NO_COLLECTIVES: 0, EXACT: times.full_precision}
    return times.result()


def continued(arguments: argparse.Namespace) -> dict[str, Any]:
    """In a rank: PROMPT and the greedy tokens after it, of every variant."""
    prefill_engines.start(arguments.engine)
    given = smollm2.load()
    prompt = given.tokenizer(PROMPT).view(1, -1)
    engine = ENGINES[arguments.engine](given, prompt.shape[1] + arguments.generate, arguments.variants)
    found = {}
    for variant in arguments.variants:
        with engine.active(variant), torch.no_grad():
            ids = prompt
            for _ in range(arguments.generate):
                ids = torch.cat([ids, engine(ids)[:, -1:].argmax(-1)], 1)
            found[variant] = ids.flatten().tolist()
    return found


def compact(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table of steps with the time and the speed-up of each variant alone."""
    kept = ("step, seconds", "x base")
    rows = {name: {key: round(row[key], 5) for key in kept} for name, row in table["variants"].items()}
    return {**{key: table[key] for key in ("rate", "share", "tokens")}, "variants": rows}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser, hosts=2, variants=OURS, rates=False)
    parser.add_argument("--engine", choices=ENGINES, default="torch")
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
        tables += [compact(table) for table in found]
        keep({"base": EXACT, "tables": tables, "same tokens": same})


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
