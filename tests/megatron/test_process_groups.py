"""Models with process groups of their own (ProcessGroupCollection), as Megatron-Bridge builds them: four ranks, TP 2 x
DP 2, and a parallel_state that knows nothing of it or something else.

The groups are the model's: its tensor-parallel sites are quantized, and copies on tensor-parallel ranks stay equal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from flash_allreduce_plugin import megatron
from flash_allreduce_plugin.cli.demo.model import prepare_cpu, replicas_equal
from flash_allreduce_plugin.collectives import copies
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.megatron import (
    data_parallel,
    parameters,
    process_groups,
    sequence_parallel,
    shared_gradients,
    tensor_parallel,
)
from flash_allreduce_plugin.telemetry import counters
from tests.megatron.test_data_parallel import CudaIsCpu
from tests.megatron.test_groups import CpuForCuda, transformer_config

STEPS, SEQUENCE, BATCH, VOCABULARY = 20, 16, 2, 64
CONFIG = FlashConfig(
    bits=8,
    backward_bits=8,
    sequence_parallel_gather_bits=8,
    grad_bits=3,
    error_feedback=True,
    quantize_embedding=True,
    quantize_layernorm=True,
    min_bytes=0,
)
DENSE = (tensor_parallel.G_FORWARD, tensor_parallel.LINEAR_DGRAD, tensor_parallel.EMBEDDING)
SEQUENCES = (
    sequence_parallel.G_FORWARD,
    sequence_parallel.G_BACKWARD,
    sequence_parallel.LINEAR_GATHER,
    sequence_parallel.LINEAR_DGRAD,
    shared_gradients.LAYER_NORM,
)


def own_groups() -> Any:
    """Return the groups of TP {0, 1}, {2, 3} and DP {0, 2}, {1, 3}."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    def mine(lists: list[list[int]]) -> Any:
        made = [(ranks, dist.new_group(ranks)) for ranks in lists]
        return next(group for ranks, group in made if dist.get_rank() in ranks)

    tp, dp, alone = mine([[0, 1], [2, 3]]), mine([[0, 2], [1, 3]]), mine([[0], [1], [2], [3]])
    names: dict[str, Any] = dict.fromkeys(("pp", "cp", "ep", "hcp", "tp_ep", "mp_alone"), alone)
    names.pop("mp_alone")
    names |= {"tp": tp, "mp": tp, "tp_cp": tp, "tp_ep_pp": tp, "expt_tp": tp}  # experts share the group of the others
    names |= dict.fromkeys(("dp", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "intra_dist_opt"), dp)
    collection = ProcessGroupCollection()
    for name, group in names.items():
        setattr(collection, name, group)
    collection.embd = collection.pos_embd = None
    return collection


def build(config: Any, groups: Any) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(1 + groups.tp.rank())  # parts of a weight are other numbers on each tensor-parallel rank
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pg_collection=groups,
    )
    for parameter in model.parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            dist.broadcast(parameter.detach(), dist.get_global_rank(groups.tp, 0), group=groups.tp)
    return model


def train(groups: Any, config: FlashConfig | None, sequences: bool, sharded: bool) -> dict[str, Any]:
    """Train 20 steps with Megatron's DDP and Adam. The loss is of the logits: cross entropy asks parallel_state."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    how = transformer_config(
        sequence_parallel=sequences, bf16=sharded, params_dtype=(torch.bfloat16 if sharded else torch.float32)
    )
    model = build(how, groups)
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, grad_reduce_in_fp32=True, bucket_size=5000
    )
    ddp = DistributedDataParallel(how, options, model, pg_collection=groups)
    adam = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=sharded, clip_grad=1.0, bf16=sharded)
    optimizer = get_megatron_optimizer(adam, [ddp], use_gloo_process_groups=False, pg_collection=groups)
    counters.reset_stats()
    if config is not None:
        megatron.enable(config)
    try:
        for step in range(STEPS):
            ddp.zero_grad_buffer()
            seed = 100 * step + groups.dp.rank()
            tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))
            mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
            logits = ddp(tokens, torch.arange(SEQUENCE).expand(BATCH, -1), mask)
            first = groups.tp.rank() * logits.shape[-1]
            wanted = torch.nn.functional.one_hot(tokens, VOCABULARY)[..., first : first + logits.shape[-1]]
            loss = (logits.float() - 4 * wanted.transpose(0, 1).reshape(logits.shape)).square().mean()
            loss.backward()
            finalize_model_grads([ddp], pg_collection=groups)
            assert optimizer.step()[0]
    finally:
        megatron.disable()
    return {
        "loss": float(loss),
        "copies equal": replicas_equal(model.float(), groups.tp),
        "replicas equal": all(_equal(parameter, groups.dp) for parameter in model.parameters()),
        "sites": {name: (one["quantized"], one["full_precision"]) for name, one in counters.stats()["sites"].items()},
    }


def _equal(parameter: torch.Tensor, group: Any) -> bool:
    first = parameter.detach().clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    return torch.equal(first, parameter)


def observe(known: str) -> list[dict[str, Any]]:
    """known: what parallel_state is: "nothing", or "other" sizes, as an importer of weights leaves them."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    prepare_cpu()
    if known == "other":
        parallel_state.initialize_model_parallel()
    else:
        parallel_state._set_global_memory_buffer()  # as Megatron-Bridge does
    groups, runs = own_groups(), []
    with CudaIsCpu(), CpuForCuda():
        for sequences, sharded in ((False, False), (True, False), (True, True)):
            quantized = CONFIG.model_copy(update={"param_bits": 4}) if sharded else CONFIG
            found = {
                name: train(groups, one, sequences, sharded) for name, one in (("stock", None), ("ours", quantized))
            }
            runs.append({"sequences": sequences, "sharded": sharded, **found})
    assert process_groups.is_tensor_parallel(groups.tp) and not process_groups.is_tensor_parallel(groups.dp)
    return runs


@pytest.mark.parametrize("known", ["nothing", "other"])
def test_a_model_with_groups_of_its_own_is_served_and_its_copies_stay_equal(known: str) -> None:
    for runs in run_ranks(4, observe, known, timeout=300, preload=MEGATRON):
        for run in runs:
            found = run["ours"]
            assert found["copies equal"] and found["replicas equal"], run
            assert found["loss"] == pytest.approx(run["stock"]["loss"], rel=0.02)
            served = SEQUENCES if run["sequences"] else DENSE
            for site in served:
                quantized, full = found["sites"][site.name]
                assert quantized > 0 and not full, (site.name, found["sites"])
            quantized, full = found["sites"][data_parallel.GRADIENTS.name]
            # With sequence parallelism gradients of copies are parts, which Megatron adds up afterwards.
            assert quantized >= STEPS and list(full) == ([] if run["sequences"] else [copies.REASON])
            if run["sharded"]:
                quantized, full = found["sites"][parameters.PARAMETERS.name]
                assert quantized > 0
