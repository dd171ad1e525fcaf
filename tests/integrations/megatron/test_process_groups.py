"""Models with process groups of their own (`ProcessGroupCollection`), trained by Megatron's DDP and optimizer.

TP 2 x DP 2.

parallel_state is uninitialised, or has tensor-parallel groups of one rank, as after an import of weights.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from flash_allreduce_plugin import policy
from flash_allreduce_plugin.cli.demo.model import ModelSize, prepare_cpu, replicas_equal
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import (
    data_parallel,
    expert_parallel,
    grouped_queries,
    parameters,
    process_groups,
    scopes,
    sequence_parallel,
    shared_gradients,
    tensor_parallel,
)
from flash_allreduce_plugin.telemetry import counters
from tests.integrations.megatron.test_data_parallel import CudaIsCpu, counts

try:
    from megatron.core.process_groups_config import ProcessGroupCollection
except ImportError:
    pytest.skip("this megatron-core has no ProcessGroupCollection (from 0.15 on)", allow_module_level=True)

SIZE = ModelSize(hidden=64, layers=2, heads=4, sequence=32, batch=2)
STEPS = 12
CONFIG = FlashConfig(
    bits=8,
    backward_bits=8,
    sequence_parallel_gather_bits=8,
    quantize_embedding=True,
    quantize_layernorm=True,
    grad_bits=8,
    min_bytes=0,
)
DATA = torch.randint(16, (4000,), generator=torch.Generator().manual_seed(5)).repeat(2)

GRADIENTS = {data_parallel.GRADIENTS.name}
TENSOR_PARALLEL = {tensor_parallel.G_FORWARD.name, tensor_parallel.LINEAR_DGRAD.name, tensor_parallel.EMBEDDING.name}
SEQUENCE_PARALLEL = {
    sequence_parallel.G_FORWARD.name,
    sequence_parallel.G_BACKWARD.name,
    sequence_parallel.LINEAR_GATHER.name,
    sequence_parallel.LINEAR_REGATHER.name,
    sequence_parallel.LINEAR_DGRAD.name,
    tensor_parallel.EMBEDDING.name,
    shared_gradients.LAYER_NORM.name,
}


class Way(NamedTuple):
    """The settings of one training."""

    sequence_parallel: bool
    distributed: bool
    query_groups: int | None = None

    def sites(self) -> set[str]:
        """Return the sites that a step quantizes."""
        found = GRADIENTS | (SEQUENCE_PARALLEL if self.sequence_parallel else TENSOR_PARALLEL)
        found |= {parameters.PARAMETERS.name} if self.distributed else set()
        if self.query_groups is not None:
            found |= {grouped_queries.FORWARD.name, grouped_queries.BACKWARD.name}
        return found


# With parallel_state uninitialised, and initialised.
WAYS = {False: (Way(False, False), Way(True, True)), True: (Way(True, False), Way(False, True))}


@cache
def group(*lists: tuple[int, ...]) -> Any:
    made = [dist.new_group(ranks) for ranks in lists]
    return next(one for ranks, one in zip(lists, made, strict=True) if dist.get_rank() in ranks)


def own_groups() -> Any:
    tp, dp = group((0, 1), (2, 3)), group((0, 2), (1, 3))
    one = group((0,), (1,), (2,), (3,))
    # expt_tp is the same object as tp.
    replicas = {"dp": dp, "dp_cp": dp, "expt_dp": dp, "intra_dp_cp": dp, "intra_expt_dp": dp}
    whole = {"mp": tp, "tp_ep_pp": tp, "intra_dist_opt": dist.group.WORLD, "tp_cp": tp, "tp_dp_cp": dist.group.WORLD}
    return ProcessGroupCollection(
        tp=tp, expt_tp=tp, pp=one, cp=one, ep=one, embd=one, pos_embd=one, tp_ep=tp, **replicas, **whole
    )


def config_of(way: Way, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=SIZE.layers,
        hidden_size=SIZE.hidden,
        num_attention_heads=SIZE.heads,
        num_query_groups=way.query_groups,
        tensor_model_parallel_size=2,
        sequence_parallel=way.sequence_parallel,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        bf16=way.distributed,
        **more,
    )


def model_of(way: Way, groups: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(3)
    return GPTModel(
        config_of(way),
        get_gpt_layer_local_spec(),
        vocab_size=256,
        max_sequence_length=SIZE.sequence,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        pg_collection=groups,
    )


def loss_of(model: torch.nn.Module, starts: torch.Tensor, over: Any) -> torch.Tensor:
    """Return mean cross entropy over a split vocabulary. Up to 0.16 Megatron's own takes parallel_state's group."""
    windows = torch.stack([DATA[start : start + SIZE.sequence + 1] for start in starts.tolist()])
    positions = torch.arange(SIZE.sequence).expand(len(starts), -1)
    mask = torch.ones(SIZE.sequence, SIZE.sequence, dtype=torch.bool).triu(1)[None, None]
    logits = model(windows[:, :-1], positions, mask).float()
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=over)
    logits = logits - largest[..., None]
    targets = windows[:, 1:] - over.rank() * logits.shape[-1]
    here = (targets >= 0) & (targets < logits.shape[-1])
    wanted = logits.gather(-1, targets.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0] * here
    return (summed(logits.exp().sum(-1), over).log() - summed(wanted, over)).mean()


def summed(part: torch.Tensor, over: Any) -> torch.Tensor:
    """Return the sum over the ranks; every rank differentiates its own part."""
    total = part.detach().clone()
    dist.all_reduce(total, group=over)
    return part + (total - part.detach())


def trained(way: Way, config: FlashConfig | None, own: bool = True) -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    groups = own_groups() if own else ProcessGroupCollection.use_mpu_process_groups()
    with CudaIsCpu(), contextlib.ExitStack() as stack:
        if config is not None:
            megatron.enable(config.model_copy(update={"param_bits": 8}) if way.distributed else config)
            stack.callback(megatron.disable)
        counters.reset_stats()
        model = model_of(way, groups)
        if way.distributed:
            model = model.bfloat16()
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=way.distributed, bucket_size=20_000
        )
        ddp = DistributedDataParallel(model.config, options, model, pg_collection=groups)
        adam = OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=way.distributed, use_distributed_optimizer=way.distributed, clip_grad=1.0
        )
        optimizer = get_megatron_optimizer(adam, [ddp], use_gloo_process_groups=False, pg_collection=groups)
        losses = []
        for number in range(STEPS):
            ddp.zero_grad_buffer()
            starts = torch.arange(SIZE.batch) * 1000 + 40 * number + 17 * groups.dp.rank()
            loss = loss_of(ddp, starts, groups.tp)
            loss.backward()
            finalize_model_grads([ddp], pg_collection=groups)
            assert optimizer.step()[0]
            losses.append(float(loss.detach()))
        split = next(one for name, one in model.named_parameters() if "linear_fc1.weight" in name).detach().float()
        both = [torch.empty_like(split) for _ in range(2)]
        dist.all_gather(both, split, group=groups.tp)
        return {
            "losses": losses,
            "copies": replicas_equal(model.float(), groups.tp),
            "replicas": all_equal(torch.cat([one.detach().flatten() for one in model.parameters()]), groups.dp),
            "really split": not torch.equal(*both),
            "counts": counts(),
            "bytes": {
                name: (site["bytes_sent"], site["bytes_full_precision"])
                for name, site in counters.stats()["sites"].items()
            },
        }


def all_equal(mine: torch.Tensor, over: Any) -> bool:
    others = [torch.empty_like(mine) for _ in range(over.size())]
    dist.all_gather(others, mine.contiguous(), group=over)
    return all(torch.equal(mine, one) for one in others)


def start(initialized: bool) -> None:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    if parallel_state.model_parallel_is_initialized():
        pass
    elif initialized:
        parallel_state.destroy_global_memory_buffer()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    else:
        parallel_state._set_global_memory_buffer()  # as Megatron-Bridge's examples do
    prepare_cpu()
    torch.cuda.current_stream = lambda *_args: None  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[assignment]


def trainings() -> bytes:
    seen = []
    for initialized, ways in WAYS.items():
        start(initialized)
        seen += [(way, trained(way, CONFIG), trained(way, None)) for way in ways]
    return pickle.dumps(seen)


def test_models_with_groups_of_their_own_are_served_and_their_copies_stay_equal():
    for seen in map(pickle.loads, run_ranks(4, trainings, preload=MEGATRON)):
        for way, quantized, stock in seen:
            assert quantized["really split"]
            assert quantized["copies"] and quantized["replicas"], way
            served = {name for name, (calls, _) in quantized["counts"].items() if calls}
            assert served == way.sites(), way
            assert quantized["losses"] == pytest.approx(stock["losses"], rel=0.02), way
            assert quantized["losses"] != stock["losses"]


def experts() -> bytes:
    """Train a MoE layer with one object as tensor-parallel group, tensor-parallel group of experts and joint group."""
    start(initialized=False)
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import build_module

    moe_utils.te_general_gemm = None  # 0.16 looks it up without Transformer Engine too
    config = config_of(
        Way(True, False),
        num_moe_experts=2,
        moe_token_dispatcher_type="allgather",
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        expert_tensor_parallel_size=2,
    )
    torch.manual_seed(1)
    spec = get_moe_module_spec(use_te=False, num_experts=2)
    build = spec if isinstance(spec, functools.partial) else functools.partial(build_module, spec)  # from 0.19 on
    layer = build(config=config, pg_collection=own_groups())
    layer.set_layer_number(1)
    x = torch.randn(8, 2, SIZE.hidden, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()

    def run() -> list[torch.Tensor]:
        with CudaIsCpu():
            output = layer(x)[0]
            gradients = torch.autograd.grad(output.square().sum(), [x, layer.router.weight])
        return [output.detach(), *gradients]

    # Other layers of a model have the group too.
    other = ColumnParallelLinear(
        SIZE.hidden, 4, config=config, init_method=config.init_method, skip_bias_add=True, tp_group=own_groups().tp
    )
    stock = run()
    megatron.enable(CONFIG)
    counters.reset_stats()
    found = run()
    megatron.disable()
    assert process_groups.is_tensor_parallel(other.tp_group)
    return pickle.dumps((counts(), all(map(torch.equal, found, stock))))


def test_experts_with_the_group_object_of_other_layers_keep_their_routing_exact():
    for counted, same in map(pickle.loads, run_ranks(4, experts, preload=MEGATRON)):
        assert same
        assert counted[sequence_parallel.F_FORWARD.name] == (0, {scopes.ROUTING: 2})  # the map, and probabilities
        assert counted[sequence_parallel.F_BACKWARD.name] == (0, {scopes.ROUTING: 1})
        assert counted[expert_parallel.GATHER_DISPATCH] == (0, {policy.is_full("expert_bits"): 2})
