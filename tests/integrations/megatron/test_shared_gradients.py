"""Gradients of parameters that several ranks have a copy of: a GPT of two stages and two tensor-parallel ranks, with
sequence parallelism, one embedding for input and output and learned positions, and Megatron's own finalize_model_grads.
"""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import policy
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import parameters, shared_gradients
from flash_allreduce_plugin.telemetry import counters
from tests.integrations.megatron.test_data_parallel import CudaIsCpu, start_megatron
from tests.integrations.megatron.test_groups import BATCH, SEQUENCE, CpuForCuda, batch, transformer_config

WORD, LAYER_NORM = shared_gradients.WORD_EMBEDDING.name, shared_gradients.LAYER_NORM.name
POSITION = shared_gradients.POSITION_EMBEDDING.name
STEPS, MICRO_BATCHES = 3, 2
INT8 = {"grad_bits": 8, "min_bytes": 0, "group_size": 32}
# Full precision but for the gradients: the rest of tensor parallelism is not looked at here.
REST = {"bits": 8, "exclude": ["*"]}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "full": {"grad_bits": "full", "min_bytes": 0, **REST},
    "INT8": {**INT8, **REST},
    "INT4": {**INT8, **REST, "grad_bits": 4, "error_feedback": True},
    "layer norms": {**INT8, **REST, "quantize_layernorm": True},
    "stochastic": {**INT8, **REST, "rounding": "stochastic", "quantize_layernorm": True},
    "hierarchical": {**INT8, **REST, "hierarchical": "auto"},
    "small": {**INT8, **REST, "min_bytes": 1 << 30},
}


def gpt(tp: int, stages: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Any:
    """Return this rank's stage. Its embedding is the output layer as well."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    settings = transformer_config(
        num_layers=stages,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=stages,
        sequence_parallel=tp > 1,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=False,
        attention_softmax_in_fp32=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    torch.manual_seed(seed)
    model = GPTModel(
        settings,
        get_gpt_layer_local_spec(),
        vocab_size=64,
        max_sequence_length=SEQUENCE,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    model.model_type = None
    return model.to(dtype)


def backward_pass(ddp: torch.nn.Module, step: int) -> list[float]:
    """Return the losses of Megatron's schedule over its micro-batches; none on stages before the last one."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    def forward_step(batches: Any, stage: Any, *_: Any) -> Any:
        tokens, positions, mask, labels = next(batches)
        return stage(tokens, positions, mask, labels=labels), lambda losses: (
            losses.mean(),
            {"loss": losses.mean().detach()},
        )

    replica = parallel_state.get_data_parallel_rank()
    batches = [batch(100 * step + 10 * replica + number) for number in range(MICRO_BATCHES)]
    seen = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=ddp,
        num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return [float(one["loss"]) for one in seen]


def train(config: dict[str, Any] | None, tp: int, stages: int) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model = gpt(tp, stages)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counters.reset_stats()
    if config is not None:
        megatron.enable(FlashConfig(**config))
    losses = []
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        with CpuForCuda():
            losses += backward_pass(ddp, step)
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
    every = counters.stats()["sites"]
    megatron.disable()
    weight = model.shared_embedding_or_output_weight().detach().clone()
    norms = [p.detach() for name, p in model.named_parameters() if "layernorm" in name or "layer_norm" in name]
    return {
        "losses": losses,
        "embedding": weight,
        "norms": torch.cat([norm.reshape(-1) for norm in norms]).clone(),
        "at": (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()),
        "sites": {name: (one["quantized"], one["full_precision"]) for name, one in every.items()},
    }


def every_variant(tp: int, stages: int) -> dict[str, Any]:
    start_megatron(tp, pipeline_model_parallel_size=stages)
    torch.cuda.synchronize = lambda *_: None
    return {name: train(config, tp, stages) for name, config in VARIANTS.items()}


LAYOUTS = {"TP 2 x PP 2": (4, 2, 2), "PP 2 x DP 2": (4, 1, 2), "PP 2": (2, 1, 2)}


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    world, tp, stages = LAYOUTS[request.param]
    return tp, run_ranks(world, every_variant, tp, stages, preload=MEGATRON, timeout=240)


def test_every_call_is_counted_and_quantized_where_it_is_asked_for(ranks: tuple[int, list[dict[str, Any]]]) -> None:
    tp, seen = ranks
    for rank in seen:
        full = {policy.is_full("grad_bits"): STEPS}
        assert rank["full"]["sites"][WORD] == (0, full)
        assert all(
            rank[name]["sites"][WORD] == (STEPS, {}) for name in VARIANTS if name not in ("stock", "full", "small")
        )
        assert rank["small"]["sites"][WORD] == (0, {policy.SMALL: STEPS})
        assert POSITION not in rank["INT8"]["sites"]  # a GPT has positions on its first stage alone
        if tp == 1:
            assert LAYER_NORM not in rank["layer norms"]["sites"]
            continue
        assert rank["INT8"]["sites"][LAYER_NORM] == (0, {policy.LAYER_NORM: STEPS})
        assert rank["layer norms"]["sites"][LAYER_NORM] == (STEPS, {})


def test_full_precision_is_megatrons_own(ranks: tuple[int, list[dict[str, Any]]]) -> None:
    for rank in ranks[1]:
        for name in ("full", "small"):
            assert rank[name]["losses"] == rank["stock"]["losses"]
            assert torch.equal(rank[name]["embedding"], rank["stock"]["embedding"])
            assert torch.equal(rank[name]["norms"], rank["stock"]["norms"])
        for name in ("INT8", "INT4", "layer norms", "stochastic"):
            assert rank[name]["losses"] == pytest.approx(rank["stock"]["losses"], rel=2e-3)
            assert not torch.equal(rank[name]["embedding"], rank["stock"]["embedding"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_copies_stay_the_same_bits(ranks: tuple[int, list[dict[str, Any]]], variant: str) -> None:
    """Compare copies: the embedding on the first and last stage, every stage's on data-parallel ranks, and norms."""
    embeddings: dict[int, torch.Tensor] = {}
    norms: dict[int, torch.Tensor] = {}
    for rank in ranks[1]:
        part, stage = rank[variant]["at"]
        assert torch.equal(embeddings.setdefault(part, rank[variant]["embedding"]), rank[variant]["embedding"])
        assert torch.equal(norms.setdefault(stage, rank[variant]["norms"]), rank[variant]["norms"])


class Sharded:
    """A GPT of two stages in bf16, with Megatron's distributed optimizer."""

    def __init__(self, frozen: bool, seed: int = 1) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.model = gpt(1, 2, torch.bfloat16, seed)
        self.weight = self.model.shared_embedding_or_output_weight().requires_grad_(not frozen)
        options = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, "bucket_size": 8000}
        self.ddp = DistributedDataParallel(self.model.config, DistributedDataParallelConfig(**options), self.model)
        self.ddp.broadcast_params()
        adam = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, clip_grad=1.0, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(adam, [self.ddp])
        self.losses: list[list[float]] = []
        self.equal: list[bool] = []

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.ddp.zero_grad_buffer()
            self.losses.append(backward_pass(self.ddp, step))
            assert self.optimizer.step()[0]
            mine = self.weight.detach().clone()
            copies = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, mine)
            self.equal.append(all(torch.equal(mine.view(torch.int16), one.view(torch.int16)) for one in copies))

    def masters(self) -> list[torch.Tensor]:
        groups = (group for one in self.optimizer.chained_optimizers for group in one.shard_fp32_from_float16_groups)
        return [master for group in groups for master in group]

    def state(self) -> Any:
        adam = [one.optimizer.state_dict() for one in self.optimizer.chained_optimizers]
        return copy.deepcopy((self.model.state_dict(), self.masters(), adam)), fap.state_dict()

    def load(self, state: Any) -> None:
        (model, masters, adam), ours = state
        self.model.load_state_dict(model)
        for master, saved in zip(self.masters(), masters, strict=True):
            master.data.copy_(saved)
        for one, saved in zip(self.optimizer.chained_optimizers, adam, strict=True):
            one.optimizer.load_state_dict(saved)
        assert fap.load_state_dict(ours)


def sharded(frozen: bool, steps: int) -> dict[str, Any]:
    """Train in full precision, and at 4 bits with a second model that continues from the middle."""
    start_megatron(1, pipeline_model_parallel_size=2)
    torch.cuda.synchronize = lambda *_: None
    with CudaIsCpu():
        stock = Sharded(frozen)
        stock.run(0, steps)
        counters.reset_stats()
        megatron.enable(FlashConfig(grad_bits=4, param_bits=4, rounding="stochastic", min_bytes=0, group_size=32))
        straight = Sharded(frozen)
        straight.run(0, steps // 2)
        saved = straight.state()
        straight.run(steps // 2, steps)
        every = counters.stats()["sites"]
        resumed = Sharded(frozen, seed=2)
        resumed.load(saved)
        resumed.run(steps // 2, steps)
        megatron.disable()
    return {
        "equal": stock.equal + straight.equal + resumed.equal,
        "same": resumed.losses == straight.losses[steps // 2 :] and torch.equal(resumed.weight, straight.weight),
        "losses": (straight.losses, stock.losses),
        "quantized": {name: every[name]["quantized"] for name in (WORD, parameters.PARAMETERS.name) if name in every},
    }


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_the_distributed_optimizer_keeps_both_copies_of_a_tied_embedding_equal(frozen: bool) -> None:
    """Check Megatron-LM#844, #656 and, frozen, #1544: after each of 50 steps, and after a resume bit for bit."""
    steps = 6 if frozen else 50
    for rank in run_ranks(4, sharded, frozen, steps, preload=MEGATRON, timeout=240):
        assert all(rank["equal"]) and len(rank["equal"]) == 2 * steps + steps // 2
        assert rank["same"]
        for quantized, stock in zip(*rank["losses"], strict=True):
            assert quantized == pytest.approx(stock, rel=0.02)
        assert rank["quantized"].get(WORD, 0) == (0 if frozen else steps)
        assert rank["quantized"][parameters.PARAMETERS.name] >= steps - 1


def positions_over_two_stages() -> Any:
    """Return an encoder and a decoder that share their positions, as far as Megatron's function looks at them."""
    from megatron.core import parallel_state

    start_megatron(1, pipeline_model_parallel_size=2)
    weight = torch.nn.Parameter(torch.zeros(64, 32))
    generator = torch.Generator().manual_seed(dist.get_rank())
    weight.main_grad = torch.randn(64, 32, generator=generator)  # type: ignore[attr-defined]
    module = torch.nn.Module()
    module.position_embeddings = SimpleNamespace(weight=weight)  # type: ignore[assignment]
    module.pre_process = True  # type: ignore[assignment]
    module.ddp_config = SimpleNamespace(use_megatron_fsdp=False, use_custom_fsdp=False)  # type: ignore[assignment]
    exact = weight.main_grad.clone()
    dist.all_reduce(exact)
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    counters.reset_stats()
    megatron.enable(FlashConfig(**INT8))
    parallel_state._POSITION_EMBEDDING_GROUP = dist.group.WORLD
    parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = [0, 1]
    function = finalize._allreduce_position_embedding_grads
    takes_groups = function.__wrapped__.__code__.co_argcount > 2
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    function([module], None, *((dist.group.WORLD, pipeline) if takes_groups else ()))
    megatron.disable()
    return counters.stats()["sites"][POSITION]["quantized"], exact, weight.main_grad


def test_positions_that_two_stages_share() -> None:
    quantized, exact, reduced = zip(*run_ranks(2, positions_over_two_stages, preload=MEGATRON), strict=True)
    assert quantized == (1, 1) and torch.equal(reduced[0], reduced[1])
    assert not torch.equal(exact[0], reduced[0])
    torch.testing.assert_close(exact[0], reduced[0], atol=0.1, rtol=0)


def test_layer_norms_need_a_width() -> None:
    with pytest.raises(ConfigError, match="quantize_layernorm=True has no effect while grad_bits is full"):
        megatron.enable(FlashConfig(quantize_layernorm=True))
