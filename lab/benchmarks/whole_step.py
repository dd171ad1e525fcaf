"""The bytes of a step that a preset leaves in full precision, by layout.

    python -m lab.benchmarks.whole_step                                 all layouts, every preset
    python -m lab.benchmarks.whole_step --layouts "Megatron TP 2" FSDP2 --presets int4

Every layout trains a small model for some steps. The first step does not count: it sends whole parameters.
"plain": bytes that a rank would send without the plugin. "left": the part of them in full precision, at the plugin's
sites and in other traffic, and the largest source of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.demo.model import forward, gpt
from lab.benchmarks import command, deepspeed_training, megatron_on_cpu, ranks

PRESETS = ("int8", "int4", "thin")
WIDTH, VOCABULARY, SEQUENCE, BATCH, STEPS = 256, 256, 128, 4, 2
#: A step of the training, and the function that ends it.
Training = tuple[Callable[[], None], Callable[[], None]]


def model_of(tensor: int, pipeline: int, experts: int, **more: Any) -> Any:
    """Return this rank's part of the model in bf16."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(1)
    numbers = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}
    settings = {
        "num_layers": 2 * pipeline,
        "hidden_size": WIDTH,
        "num_attention_heads": 8,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "expert_model_parallel_size": experts,
        "pipeline_dtype": torch.bfloat16,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "batch_p2p_sync": False,
        **(numbers if experts > 1 else {}),
        **more,
    }
    spec = get_gpt_layer_local_spec(num_experts=numbers["num_moe_experts"] if experts > 1 else None)
    return gpt(settings, spec, tied=pipeline == 1, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)


def megatron(
    config: fap.FlashConfig, *, tensor: int = 1, pipeline: int = 1, experts: int = 1, dp: bool = False, **more: Any
) -> Training:
    """megatron-core's GPT in bf16. more: of its configuration. dp: gradients and the distributed optimizer too."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    megatron_on_cpu.prepare()
    if experts > 1:
        megatron_on_cpu.prepare_experts()
    parallel_state.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=experts)
    fap.megatron.enable(config)
    model = model_of(tensor, pipeline, experts, **more)
    settings: Any = model.config
    wrapped = Float16Module(settings, model)
    data_parallel = DistributedDataParallelConfig(use_distributed_optimizer=dp, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(settings, data_parallel, wrapped)
    adam = OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, use_distributed_optimizer=dp)
    optimizer = get_megatron_optimizer(adam, [ddp])
    replica = parallel_state.get_data_parallel_rank()

    def forward_step(_data: Any, stage: Any) -> Any:
        text = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(replica))
        return forward(stage, text), lambda losses: (losses.float().mean(), {})

    def step() -> None:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([None] * pipeline),
            model=ddp,
            num_microbatches=pipeline,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        finalize_model_grads([ddp])
        optimizer.step()

    return step, fap.megatron.disable


def deepspeed(config: fap.FlashConfig, *, stage: int, ulysses: bool = False, experts: bool = False) -> Training:
    """Return the transformer of examples/deepspeed, by the JSON section."""
    import deepspeed as ds

    import flash_allreduce_plugin.integrations.deepspeed.attach  # noqa: F401

    arguments = argparse.Namespace(
        width=WIDTH, layers=2, sequence=SEQUENCE, batch=BATCH, lr=1e-4, steps=100, ulysses=ulysses, experts=experts
    )
    model = deepspeed_training.layered(deepspeed_training.build_model(arguments, 1), arguments)
    section = {key: value for key, value in config.given().items()}
    engine, *_ = ds.initialize(
        model=model,
        model_parameters=deepspeed_training.parameters(model, arguments),
        config={**deepspeed_training.configuration(arguments, stage, section), "bf16": {"enabled": not experts}},
    )
    seed = 0 if ulysses else dist.get_rank()
    text = torch.randint(256, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed))

    def step() -> None:
        engine.backward(engine(text))
        engine.step()

    return step, engine.destroy


def of_torch(config: fap.FlashConfig, *, how: str) -> Training:
    """Return linear layers in DDP, FSDP2, HSDP or FSDP1, attached as FLASH_ALLREDUCE_ATTACH does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    integration: Any = fap.ddp if how == "DDP" else fap.fsdp
    integration.enable(config)
    torch.manual_seed(1)
    model: Any = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)])
    if how == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    elif how == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        shape, names = ((2, 2), ("replicate", "shard")) if how == "HSDP" else ((2,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, integration.disable


#: Name -> ranks, and the training.
LAYOUTS: dict[str, tuple[int, Callable[[fap.FlashConfig], Training]]] = {
    "Megatron TP 2": (2, partial(megatron, tensor=2)),
    "Megatron TP 2 + SP": (2, partial(megatron, tensor=2, sequence_parallel=True)),
    "Megatron TP 2 x DP 2": (4, partial(megatron, tensor=2, dp=True)),
    "Megatron TP 2 x PP 2": (4, partial(megatron, tensor=2, pipeline=2)),
    "Megatron MoE, EP 2": (2, partial(megatron, experts=2, dp=True)),
    **{f"DeepSpeed stage {stage}": (2, partial(deepspeed, stage=stage)) for stage in range(4)},
    "DeepSpeed Ulysses": (2, partial(deepspeed, stage=2, ulysses=True)),
    "DeepSpeed MoE": (2, partial(deepspeed, stage=2, experts=True)),
    "DDP": (2, partial(of_torch, how="DDP")),
    "FSDP2": (2, partial(of_torch, how="FSDP2")),
    "HSDP": (4, partial(of_torch, how="HSDP")),
    "FSDP1": (2, partial(of_torch, how="FSDP1")),
}


def measured(layout: str, config: fap.FlashConfig) -> dict[str, Any]:
    """In a rank: train a layout, and return the bytes of a step."""
    step, end = LAYOUTS[layout][1](config)
    step()
    fap.reset_stats()
    for _ in range(STEPS):
        step()
    stats = fap.stats()
    end()
    left = {
        f"{name} ({', '.join(site['full_precision'])})": site["bytes_plain"] for name, site in stats["sites"].items()
    }
    left |= {name: counts["bytes_sent"] for name, counts in stats["beside"].items()}
    beside = sum(counts["bytes_sent"] for counts in stats["beside"].values())
    return {
        "plain": (stats["bytes_full_precision"] + beside) / STEPS,
        "sent": (stats["bytes_sent"] + beside) / STEPS,
        "left": {name: nbytes / STEPS for name, nbytes in left.items() if nbytes},
    }


def in_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    ranks.start_engine("zero2" if arguments.layout.startswith("DeepSpeed") else "ddp", attach=False)
    return measured(arguments.layout, fap.FlashConfig(preset=arguments.preset, min_bytes=0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    rows = []
    for layout in arguments.layouts:
        for preset in arguments.presets:
            found = ranks.torchrun(in_rank, LAYOUTS[layout][0], arguments, layout=layout, preset=preset)
            rows.append({"layout": layout, "preset": preset, **found})
            plain, left = found["plain"], found["left"]
            most = ", ".join(
                f"{name} {100 * nbytes / plain:.1f} %"
                for name, nbytes in sorted(left.items(), key=lambda item: -item[1])
                if nbytes >= 0.002 * plain
            )
            share, sent = 100 * sum(left.values()) / plain, 100 * found["sent"] / plain
            print(
                f"{layout:22} {preset:5} {plain / 1e3:8.0f} kB, sent {sent:5.1f} %, left {share:5.2f} %  {most}",
                flush=True,
            )
            keep(json.loads(json.dumps({"rows": rows})))


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
