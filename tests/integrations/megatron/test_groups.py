"""Four ranks: tensor parallelism with pipeline, context and data parallelism, and experts.

The right groups, and no others, are quantized.
"""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from flash_allreduce_plugin import policy
from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.cli.demo.model import prepare_cpu
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import (
    data_parallel,
    expert_parallel,
    pipeline_parallel,
    tensor_parallel,
)
from flash_allreduce_plugin.telemetry import counters
from tests.signatures import signatures

WORLD, LAYERS, HIDDEN, SEQUENCE, BATCH = 4, 2, 32, 16, 2
CONFIG = FlashConfig(bits=8, backward_bits=8, sequence_parallel_gather_bits=8, min_bytes=0)
G, DGRAD = tensor_parallel.G_FORWARD.name, tensor_parallel.LINEAR_DGRAD.name
EMBEDDING, GRADIENTS = tensor_parallel.EMBEDDING.name, data_parallel.GRADIENTS.name


class Groups:
    """Counts the collectives that reach api/reductions.py, by the ranks of their group."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], int] = {}
        self.real = {name: getattr(reductions, name) for name in ("all_reduce", "reduce_scatter", "all_gather")}

    def __enter__(self) -> Groups:
        for name, real in self.real.items():
            setattr(reductions, name, partial(self._counted, real))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self.real.items():
            setattr(reductions, name, real)

    def _counted(self, real: Any, *arguments: Any, **keywords: Any) -> Any:
        given = (*arguments, keywords.get("group"))
        ranks = tuple(dist.get_process_group_ranks(next(one for one in given if isinstance(one, dist.ProcessGroup))))
        self.counts[ranks] = self.counts.get(ranks, 0) + 1
        return real(*arguments, **keywords)


class CpuForCuda(TorchFunctionMode):
    """A mode that makes tensors on the CPU when Megatron asks for "cuda"."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:  # the schedule of 0.13 counts its tokens there
            return args[0]
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def sites() -> dict[str, Any]:
    return {name: (site["quantized"], site["full_precision"]) for name, site in counters.stats()["sites"].items()}


def start(**sizes: int) -> None:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(**sizes)
    prepare_cpu()


def transformer_config(**changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_attention_heads": 4,
            "tensor_model_parallel_size": 2,
            "use_cpu_initialization": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
            "persist_layer_norm": False,
            **changes,
        }
    )


def gpt(config: Any, **stage: bool) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(1)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=64,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        **stage,
    )


def batch(seed: int) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(64, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    return tokens[:, :-1], torch.arange(SEQUENCE).expand(BATCH, -1), mask, tokens[:, 1:].contiguous()


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def pipeline() -> dict[str, Any]:
    """Run Megatron's own 1F1B schedule, two micro-batches over two stages of one layer."""
    start(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    config = transformer_config(
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        batch_p2p_sync=False,
        variable_seq_lengths=False,
        deallocate_pipeline_outputs=False,
    )
    model = gpt(config, pre_process=first, post_process=last)
    model.model_type = None

    def forward_step(micro_batches: Any, stage: Any) -> Any:
        tokens, positions, mask, labels = next(micro_batches)
        output = stage(tokens, positions, mask, labels=labels)
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    def run() -> Any:
        with CpuForCuda():
            return step()

    def step() -> Any:
        model.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch(0), batch(1)]),
            model=model,
            num_microbatches=2,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        return [float(loss["loss"]) for loss in losses], gradients(model)

    return {"first": first, "last": last, **twice(run)}


def context() -> dict[str, Any]:
    """Run a transformer's MLP: megatron-core's own attention cannot split the context."""
    start(tensor_model_parallel_size=2, context_parallel_size=2)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    torch.manual_seed(1)
    config = transformer_config(context_parallel_size=2)
    model = MLP(config, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(2))

    def run() -> Any:
        model.zero_grad()
        part = x.chunk(2)[parallel_state.get_context_parallel_rank()].clone().requires_grad_()
        output, bias = model(part)
        loss = (output + bias).square().sum()
        loss.backward()
        for parameter in model.parameters():  # Megatron reduces gradients over data and context together
            dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return [float(loss)], gradients(model)

    return twice(run)


def data() -> dict[str, Any]:
    """Run Megatron's DistributedDataParallel around a GPT."""
    start(tensor_model_parallel_size=2)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = transformer_config()
    model = gpt(config)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)

    def run() -> Any:
        wrapped.zero_grad_buffer()
        tokens, positions, mask, labels = batch(parallel_state.get_data_parallel_rank())
        loss = wrapped(tokens, positions, mask, labels=labels).mean()
        loss.backward()
        wrapped.finish_grad_sync()
        return [float(loss)], [p.main_grad.clone() for p in model.parameters()]

    return twice(run)


def moe_layer(dispatcher: str, expert_tensor_parallel: int) -> torch.nn.Module:
    """Return a MoE layer of four experts with sequence parallelism, which routes unevenly."""
    start(
        tensor_model_parallel_size=2,
        expert_model_parallel_size=WORLD // expert_tensor_parallel,
        expert_tensor_parallel_size=expert_tensor_parallel,
    )
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    stream = SimpleNamespace(wait_stream=lambda _: None, record_event=lambda: SimpleNamespace(synchronize=lambda: None))
    torch.cuda.current_stream = torch.cuda.Stream = lambda *_: stream
    torch.cuda.stream = lambda _: nullcontext()
    if expert_tensor_parallel > 1:
        dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter
    moe_utils.te_general_gemm = None  # 0.16 looks it up without Transformer Engine too
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and tensor is not None else tensor
    )
    config = transformer_config(
        sequence_parallel=True,
        num_moe_experts=4,
        expert_model_parallel_size=WORLD // expert_tensor_parallel,
        expert_tensor_parallel_size=expert_tensor_parallel,
        moe_token_dispatcher_type=dispatcher,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        add_bias_linear=False,
    )
    torch.manual_seed(1)
    layer = mixture(config, 1)
    with torch.no_grad():  # equal experts would leave the router a gradient of nothing but rounding
        for parameter in layer.experts.parameters():
            parameter.mul_(3 + parallel_state.get_expert_model_parallel_rank())
    return layer


def mixture(config: Any, number: int) -> torch.nn.Module:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module

    layer = build_module(get_moe_module_spec(use_te=False, num_experts=4), config=config)
    layer.set_layer_number(number)
    return layer


def moe(
    dispatcher: str,
    expert_tensor_parallel: int,
    bits: int | str,
    backward_bits: int | str,
    combine_bits: int | str | None = None,
) -> dict[str, Any]:
    layer = moe_layer(dispatcher, expert_tensor_parallel)
    routed = []
    layer.router.register_forward_hook(lambda _module, _input, output: routed.append(output))
    x = torch.randn(8, BATCH, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))

    def run() -> Any:
        with CpuForCuda():
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            output = layer(leaf)[0]
            output.square().sum().backward()
        return [], [output.detach(), leaf.grad, *gradients(layer)]

    widths = {"expert_bits": bits, "backward_bits": backward_bits, "expert_combine_bits": combine_bits}
    megatron.enable(CONFIG.model_copy(update=widths))
    counters.reset_stats()
    seen: dict[str, Any] = {"quantized": run(), "sites": sites(), "bytes": bytes_of_experts()}
    seen["widths"] = {name: site["bits"] for name, site in counters.stats()["sites"].items() if ".expert." in name}
    other = mixture(layer.config, 2)
    site = expert_parallel.GATHER_COMBINE if dispatcher == "allgather" else expert_parallel.EXCHANGE_COMBINE
    with signatures(site) as seen["signatures"], CpuForCuda():
        for one in (layer, other, layer):
            one(x.clone().requires_grad_())[0].sum().backward()
    megatron.enable(CONFIG.model_copy(update={"expert_bits": "full"}))
    counters.reset_stats()
    run()
    seen["bytes in full precision"] = bytes_of_experts()
    megatron.disable()
    seen["stock"] = run()
    seen["same routing"] = all(all(map(torch.equal, routed[0], other)) for other in routed[1:])
    seen["uneven"] = len(set(routed[0][1].sum(dim=0).tolist())) > 1
    return seen


def bytes_of_experts() -> dict[str, int]:
    """Return the bytes that would have been sent without the plugin, by site."""
    counted = counters.stats()["sites"]
    return {site: counts["bytes_full_precision"] for site, counts in counted.items() if ".expert." in site}


def all_gather(outputs: list[torch.Tensor], input: torch.Tensor, group: Any) -> None:
    """Gather parts of uneven sizes, which gloo cannot gather."""
    for rank, output in zip(dist.get_process_group_ranks(group), outputs, strict=True):
        part = input.clone() if rank == dist.get_rank() else torch.empty_like(output)
        dist.broadcast(part, rank, group=group)
        output.copy_(part)


def reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], group: Any) -> None:
    """Scatter parts of uneven sizes, which gloo cannot scatter."""
    for rank, input in zip(dist.get_process_group_ranks(group), inputs, strict=True):
        part = input.clone()
        dist.all_reduce(part, group=group)
        if rank == dist.get_rank():
            output.copy_(part)


def twice(run: Any) -> dict[str, Any]:
    """Run the same without and with the plugin; return the inputs of api/reductions.py, by group, and the counters."""
    from megatron.core import parallel_state

    megatron.disable()
    seen: dict[str, Any] = {"stock": run()}
    megatron.enable(CONFIG)
    counters.reset_stats()
    with Groups() as groups:
        seen["quantized"] = run()
    seen["sites"], seen["groups"] = sites(), groups.counts
    group = parallel_state.get_tensor_model_parallel_group()
    seen["tensor-parallel"] = tuple(dist.get_process_group_ranks(group))
    megatron.disable()
    return seen


def pickled(observe: Any) -> bytes:
    return pickle.dumps(observe())


def observed(observe: Any) -> list[dict[str, Any]]:
    return [pickle.loads(seen) for seen in run_ranks(WORLD, pickled, observe, preload=MEGATRON)]


def close(seen: dict[str, Any]) -> bool:
    (losses, found), (stock_losses, stock) = seen["quantized"], seen["stock"]
    assert losses == pytest.approx(stock_losses, rel=1e-2)
    assert len(found) == len(stock) > 0
    return all((a - b).norm() <= 0.05 * b.norm() for a, b in zip(found, stock, strict=True))


def test_pipeline_parallel():
    for seen in observed(pipeline):
        micro_batches = 2
        expected = {G: (2 * micro_batches, {}), DGRAD: ((2 + seen["last"]) * micro_batches, {})}
        if seen["first"]:
            expected[EMBEDDING] = (0, {policy.EMBEDDING: micro_batches})
        assert seen["sites"] == {
            **expected,
            pipeline_parallel.FORWARD.name: (0, {policy.is_full("pipeline_bits"): micro_batches}),
            pipeline_parallel.BACKWARD.name: (0, {policy.is_full("pipeline_backward_bits"): micro_batches}),
        }
        calls = sum(quantized + sum(reasons.values()) for quantized, reasons in expected.values())
        assert seen["groups"] == {seen["tensor-parallel"]: calls}
        assert close(seen)


def test_context_parallel():
    for seen in observed(context):
        assert seen["sites"] == {G: (1, {}), DGRAD: (1, {})}
        assert seen["groups"] == {seen["tensor-parallel"]: 2}
        assert close(seen)


def test_data_parallel():
    for seen in observed(data):
        gradient_reductions = seen["sites"].pop(GRADIENTS)
        assert gradient_reductions == (0, {policy.is_full("grad_bits"): 1})
        assert seen["sites"] == {
            G: (2 * LAYERS, {}),
            DGRAD: (2 * LAYERS + 1, {}),
            EMBEDDING: (0, {policy.EMBEDDING: 1}),
        }
        assert seen["groups"].pop(seen["tensor-parallel"]) == 4 * LAYERS + 2
        assert list(seen["groups"].values()) == [1]  # the gradients', which stay in full precision
        assert close(seen)


EXPERT_SITES = {
    "allgather": [expert_parallel.GATHER_DISPATCH, expert_parallel.GATHER_COMBINE],
    "alltoall": [expert_parallel.EXCHANGE_DISPATCH, expert_parallel.EXCHANGE_COMBINE],
    "uneven": [expert_parallel.TENSOR_DISPATCH, expert_parallel.TENSOR_COMBINE],
}


def of_experts(counted: dict[str, Any]) -> dict[str, Any]:
    return {site: counts for site, counts in counted.items() if ".expert." in site}


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_hidden_states_of_experts_are_quantized_forward_and_backward(dispatcher):
    for seen in observed(partial(moe, dispatcher, 1, 8, 8)):
        assert of_experts(seen["sites"]) == {site: (2, {}) for site in EXPERT_SITES[dispatcher]}
        assert seen["same routing"] and seen["uneven"]
        assert seen["bytes"] == seen["bytes in full precision"]
        first, other, again = (seen["signatures"][i : i + 2] for i in (0, 2, 4))
        assert first == again and not set(first) & set(other)  # bytes of one layer never reach another layer
        assert not torch.equal(seen["quantized"][1][0], seen["stock"][1][0])
        assert close(seen)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_experts_stay_in_full_precision_by_default(dispatcher):
    for seen in observed(partial(moe, dispatcher, 1, "full", 8)):
        assert of_experts(seen["sites"]) == {
            site: (0, {policy.is_full("expert_bits"): 2}) for site in EXPERT_SITES[dispatcher]
        }
        assert all(map(torch.equal, seen["quantized"][1], seen["stock"][1]))


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_the_way_back_from_the_experts_has_a_width_of_its_own(dispatcher):
    for seen in observed(partial(moe, dispatcher, 1, 8, 8, 5)):
        assert seen["widths"] == {site: 5 if site.endswith("combine") else 8 for site in EXPERT_SITES[dispatcher]}
    for seen in observed(partial(moe, dispatcher, 1, 8, 8, "full")):
        for site in EXPERT_SITES[dispatcher]:
            full = (0, {policy.is_full("expert_combine_bits"): 2})
            assert seen["sites"][site] == (full if site.endswith("combine") else (2, {}))


def test_the_gradients_of_experts_need_backward_bits_as_well():
    for seen in observed(partial(moe, "alltoall", 1, 8, "full")):
        for site in EXPERT_SITES["alltoall"]:
            assert seen["sites"][site] == (1, {policy.is_full("backward_bits"): 1})


def test_uneven_gathers_over_the_parts_of_an_expert():
    for seen in observed(partial(moe, "alltoall", 2, 8, 8)):
        expected = EXPERT_SITES["alltoall"] + EXPERT_SITES["uneven"]
        assert of_experts(seen["sites"]) == {site: (2, {}) for site in expected}
        assert seen["same routing"] and seen["uneven"]
        assert seen["bytes"] == seen["bytes in full precision"]
        assert close(seen)
