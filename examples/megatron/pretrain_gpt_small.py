"""Pretrain a small GPT with megatron-core: its datasets, model, schedule, data parallelism and optimizer.

    torchrun --standalone --nproc-per-node 2 examples/megatron/pretrain_gpt_small.py --data-path data/stdlib \
        --tensor-model-parallel-size 2 --flash-allreduce --flash-allreduce-bits 8

Flags are named as in Megatron-LM; the plugin's part is marked [flash all-reduce]. README.md has more commands.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from flash_allreduce_plugin.megatron.arguments import add_arguments, config_from  # [flash all-reduce]
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from prepare_data import ByteTokenizer

import flash_allreduce_plugin as fap  # [flash all-reduce]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Batch = dict[str, torch.Tensor]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data-path", required=True, help="PATH of the PATH.bin and PATH.idx of prepare_data.py")
    parser.add_argument("--data-cache-path", default="data/cache", help="folder for the dataset's indices")
    parser.add_argument("--split", default="95,5,0", help="shares of training, validation and test documents")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1, help="ranks that share a layer")
    parser.add_argument("--sequence-parallel", action="store_true", help="split the sequence between the layers")
    parser.add_argument("--num-layers", type=int, default=4, help="transformer layers")
    parser.add_argument("--hidden-size", type=int, default=256, help="width of the hidden states")
    parser.add_argument("--num-attention-heads", type=int, default=8, help="attention heads")
    parser.add_argument("--seq-length", type=int, default=256, help="tokens in a sample")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="samples in a forward pass of a replica")
    parser.add_argument("--global-batch-size", type=int, help="samples in a step; none: a micro-batch each replica")
    parser.add_argument("--train-iters", type=int, default=60, help="steps")
    parser.add_argument("--lr", type=float, default=6e-4, help="peak of the rate: a fifth of the steps up, then down")
    parser.add_argument("--clip-grad", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--use-distributed-optimizer", action="store_true", help="split the optimizer's state")
    parser.add_argument("--bf16", action="store_true", help="weights and activations; the optimizer keeps float32")
    parser.add_argument("--log-interval", type=int, default=20, help="steps between two lines")
    parser.add_argument("--eval-iters", type=int, default=10, help="micro-batches of the validation")
    parser.add_argument("--seed", type=int, default=1234, help="of the weights and the order of the samples")
    add_arguments(parser)  # [flash all-reduce] --flash-allreduce-bits and the others, the same as Megatron-LM's
    return parser.parse_args()


def initialize(args: argparse.Namespace) -> None:
    """Create process groups, set seeds, and replace the parts of megatron-core that need CUDA."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # on GPUs: the order that Megatron's overlap needs
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        import cpu

        cpu.prepare()
        dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size)
    torch.manual_seed(args.seed)
    if DEVICE.type == "cuda":
        model_parallel_cuda_manual_seed(args.seed)


def print_rank_0(*words: Any) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def build_model(args: argparse.Namespace) -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_cpu_initialization=True,  # the same weights whatever the device and the number of ranks
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,  # fused kernels come with apex or Transformer Engine
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=-(-ByteTokenizer.vocab_size // 128) * 128,  # a multiple that any number of ranks divides
        max_sequence_length=args.seq_length,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    ).to(DEVICE)
    data_parallel = DistributedDataParallelConfig(
        use_distributed_optimizer=args.use_distributed_optimizer, grad_reduce_in_fp32=args.bf16
    )
    return DistributedDataParallel(config, data_parallel, Float16Module(config, model) if args.bf16 else model)


def build_optimizer(args: argparse.Namespace, model: DistributedDataParallel) -> tuple[Any, OptimizerParamScheduler]:
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=0.0,
        adam_beta2=0.95,
        weight_decay=0.0,
        clip_grad=args.clip_grad,
        use_distributed_optimizer=args.use_distributed_optimizer,
        bf16=args.bf16,
    )
    optimizer = get_megatron_optimizer(config, [model])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=0.0,
        lr_warmup_steps=args.train_iters // 5,
        lr_decay_steps=args.train_iters,
        lr_decay_style="cosine",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=args.train_iters,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def build_datasets(args: argparse.Namespace, samples: list[int]) -> list[GPTDataset]:
    """Return training and validation sets. Rank 0 builds the indices and caches them in --data-cache-path."""
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([args.data_path], None),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [*samples, 0], lambda: True, config).build()[:2]


def batches(dataset: GPTDataset, args: argparse.Namespace) -> Iterator[Batch]:
    """Yield this replica's micro-batches. GPTDataset has shuffled the samples; all ranks of a replica read the same."""
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = range(replica, len(dataset), replicas)
    return iter(torch.utils.data.DataLoader(dataset, batch_size=args.micro_batch_size, sampler=mine, drop_last=True))


def forward_step(data: Iterator[Batch], model: DistributedDataParallel) -> tuple[torch.Tensor, Any]:
    batch = {key: value.to(DEVICE) for key, value in next(data).items()}
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, partial(loss_func, batch["loss_mask"])


def loss_func(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, Batch]:
    loss = (losses.float() * mask).sum() / mask.sum()
    return loss, {"lm loss": loss.detach().clone()}


def run(
    args: argparse.Namespace, model: DistributedDataParallel, data: Iterator[Batch], microbatches: int, train: bool
) -> float:
    """Run forward passes, and backward passes if `train`. Return the mean loss over micro-batches and replicas."""
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=not train,
    )
    loss = torch.stack([result["lm loss"] for result in results]).mean()
    dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    return loss.item() / parallel_state.get_data_parallel_world_size()


def main() -> None:
    args = parse_args()
    initialize(args)
    flash = config_from(args)  # [flash all-reduce] None without --flash-allreduce
    if flash is not None:
        fap.megatron.enable(flash)  # [flash all-reduce] on every rank

    samples_at_once = args.micro_batch_size * parallel_state.get_data_parallel_world_size()
    microbatches, rest = divmod(args.global_batch_size or samples_at_once, samples_at_once)
    if rest or not microbatches:
        raise SystemExit(f"--global-batch-size {args.global_batch_size} must be a multiple of {samples_at_once}.")
    samples = samples_at_once * microbatches
    training, validation = build_datasets(args, [args.train_iters * samples, args.eval_iters * samples_at_once])

    model = build_model(args)
    optimizer, scheduler = build_optimizer(args, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss

    data = batches(training, args)
    started = time.perf_counter()
    for step in range(1, args.train_iters + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        scheduler.step(1)
        loss = run(args, model, data, microbatches, train=True)
        _, norm, _ = optimizer.step()
        if step == 1 or step % args.log_interval == 0 or step == args.train_iters:
            print_rank_0(f"step {step:4d}  loss {loss:.4f}  gradient norm {norm:.3f}")
    seconds = time.perf_counter() - started

    model.eval()
    with torch.no_grad():
        loss = run(args, model, batches(validation, args), args.eval_iters, train=False)
    print_rank_0(f"validation loss {loss:.4f}")
    print_rank_0(f"{args.train_iters * samples * args.seq_length / seconds:.0f} tokens/s")
    if flash is not None:
        print_rank_0(fap.megatron.report())  # [flash all-reduce] which calls were quantized, which were not, and why
    dist.barrier()  # gloo's thread must release the last tensor before the interpreter ends, or the process aborts
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
