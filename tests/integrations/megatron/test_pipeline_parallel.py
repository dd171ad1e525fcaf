"""Sends between pipeline stages: Megatron's own schedules train a GPT over two and four stages."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from flash_allreduce_plugin import policy
from flash_allreduce_plugin.codec.format import NO_DRAW
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError, MismatchError
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import pipeline_parallel, scopes
from flash_allreduce_plugin.telemetry import counters
from tests.integrations.megatron.test_groups import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    CpuForCuda,
    batch,
    start,
    transformer_config,
)
from tests.simulation import decoded, encoded

FORWARD, BACKWARD = pipeline_parallel.FORWARD.name, pipeline_parallel.BACKWARD.name
INT8 = {"pipeline_bits": 8, "pipeline_backward_bits": 8, "group_size": 32, "min_bytes": 0}
STEPS, MICRO_BATCHES = 3, 4
MESSAGE = SEQUENCE * BATCH * HIDDEN * 4

# Ranks, and the sizes and options of Megatron's.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "1F1B": (2, {}),
    "1F1B, isend and irecv": (2, {"batch_p2p_comm": False}),
    "1F1B of four, variable lengths": (
        4,
        {"stages": 4, "variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"},
    ),
    "VPP, overlapped": (2, {"chunks": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}),
    "VPP, overlapped with warm-up": (
        2,
        {"chunks": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False, "overlap_p2p_comm_warmup_flush": True},
    ),
    "VPP of four, batched": (4, {"stages": 4, "chunks": 2}),
    "VPP of four, overlapped": (4, {"stages": 4, "chunks": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}),
    "TP 2 x PP 2": (4, {"tensor_model_parallel_size": 2}),
}


class Training:
    """A GPT of one layer in each chunk of each stage, and the schedule that Megatron takes for it."""

    def __init__(self, stages: int = 2, chunks: int = 1, tensor_model_parallel_size: int = 1, **options: Any) -> None:
        sizes = {
            "tensor_model_parallel_size": tensor_model_parallel_size,
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        }
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            start(**sizes)
        torch.cuda.synchronize = lambda *_: None  # after the shapes of tensors of variable lengths
        given = {"batch_p2p_sync": False, "deallocate_pipeline_outputs": False, **options}
        self.config = transformer_config(
            num_layers=stages * chunks, pipeline_dtype=torch.float32, attention_softmax_in_fp32=True, **sizes, **given
        )
        self.first = parallel_state.get_pipeline_model_parallel_rank() == 0
        self.last = parallel_state.get_pipeline_model_parallel_rank() == stages - 1
        self.chunks = chunks

    def model(self) -> list[torch.nn.Module]:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        torch.manual_seed(1)
        found = []
        for chunk in range(self.chunks):
            model = GPTModel(
                self.config,
                get_gpt_layer_local_spec(),
                vocab_size=64,
                max_sequence_length=SEQUENCE,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                pre_process=self.first and chunk == 0,
                post_process=self.last and chunk == self.chunks - 1,
                **({"vp_stage": chunk} if self.chunks > 1 else {}),
            )
            model.model_type = None
            found.append(model)
        return found

    def losses(self, steps: int = STEPS, forward_only: bool = False) -> tuple[list[float], str]:
        """Return the loss of every step (the last stage has them), and a digest of the weights."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        model = self.model()
        optimizer = torch.optim.AdamW([p for chunk in model for p in chunk.parameters()], lr=1e-3)

        def forward_step(micro_batches: Any, stage: Any, *_: Any) -> Any:
            tokens, positions, mask, labels = next(micro_batches)
            output = stage(tokens, positions, mask, labels=labels)
            return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

        found = []
        for step in range(steps):
            batches = [batch(100 * step + number) for number in range(MICRO_BATCHES)]
            with CpuForCuda(), torch.set_grad_enabled(not forward_only):
                seen = get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=[iter(batches) for _ in model] if self.chunks > 1 else iter(batches),
                    model=model if self.chunks > 1 else model[0],
                    num_microbatches=MICRO_BATCHES,
                    seq_length=SEQUENCE,
                    micro_batch_size=BATCH,
                    forward_only=forward_only,
                )
            found += [float(one["loss"]) for one in seen]
            if not forward_only:
                optimizer.step()
                optimizer.zero_grad()
        weights = b"".join(p.detach().numpy().tobytes() for chunk in model for p in chunk.parameters())
        return found, str(hash(weights))


def sites() -> dict[str, tuple[int, dict[str, int]]]:
    every = counters.stats()["sites"]
    return {
        name: (every[name]["quantized"], every[name]["full_precision"]) for name in (FORWARD, BACKWARD) if name in every
    }


def served(training: Training, config: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Train with the plugin. Return losses, weights, counters, and operations left unfinished in the groups."""
    counters.reset_stats()
    megatron.enable(FlashConfig(**config))
    losses, weights = training.losses(**how)
    seen = {"losses": losses, "weights": weights, "sites": sites(), "report": megatron.report()}
    megatron.disable()
    return seen


def observe(options: dict[str, Any]) -> bytes:
    training = Training(**options)
    stock = training.losses()
    seen: dict[str, Any] = {"stock": {"losses": stock[0], "weights": stock[1]}}
    seen["full"] = served(training, {})
    # torch's own handles do not keep the tensors that gloo is still sending: with freed outputs the losses are NaN.
    training.config.deallocate_pipeline_outputs = True
    seen["int8"] = served(training, INT8)
    seen["int8 again"] = served(training, INT8)
    seen["small"] = served(training, {**INT8, "min_bytes": MESSAGE + 1})
    return pickle.dumps(seen)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    world, options = CASES[request.param]
    return request.param, [pickle.loads(seen) for seen in run_ranks(world, observe, options, preload=MEGATRON)]


def messages(seen: dict[str, Any]) -> dict[str, int]:
    return {name: quantized + sum(reasons.values()) for name, (quantized, reasons) in seen["sites"].items()}


def test_full_precision_has_the_bits_of_a_run_without_the_plugin(case: Any) -> None:
    for seen in case[1]:
        for how, reason in (("full", None), ("small", policy.SMALL)):
            assert seen[how]["losses"] == seen["stock"]["losses"]
            assert seen[how]["weights"] == seen["stock"]["weights"]
            forward, backward = seen[how]["sites"][FORWARD], seen[how]["sites"][BACKWARD]
            assert forward == (0, {reason or policy.is_full("pipeline_bits"): messages(seen["int8"])[FORWARD]})
            assert backward == (
                0,
                {reason or policy.is_full("pipeline_backward_bits"): messages(seen["int8"])[BACKWARD]},
            )


def test_every_send_and_receive_is_quantized_in_both_directions(case: Any) -> None:
    name, ranks = case
    chunks = CASES[name][1].get("chunks", 1)
    stages = CASES[name][1].get("stages", 2)
    forward = 0
    for seen in ranks:
        assert seen["int8"]["sites"].keys() == {FORWARD, BACKWARD}
        for quantized, reasons in seen["int8"]["sites"].values():
            assert quantized > 0 and not reasons
        assert all(seen["int8"]["report"][site]["in_place"] for site in (FORWARD, BACKWARD))
        forward += messages(seen["int8"])[FORWARD]
    # Both ends count a message; a micro-batch crosses every border of stages and chunks once.
    tensor_parallel = len(ranks) // stages
    assert forward == 2 * tensor_parallel * STEPS * MICRO_BATCHES * (stages * chunks - 1)


def test_quantized_training_stays_near_and_is_repeated_bit_for_bit(case: Any) -> None:
    several = [seen for seen in case[1] if seen["stock"]["losses"]]
    assert several
    for seen in several:
        assert seen["int8"]["losses"] == pytest.approx(seen["stock"]["losses"], rel=5e-3)
        assert seen["int8"]["losses"] != seen["stock"]["losses"]
    for seen in case[1]:
        assert seen["int8"]["weights"] == seen["int8 again"]["weights"] != seen["stock"]["weights"]


# ---- received values, by Megatron's two functions themselves ----


def tensor(rank: int, which: str) -> torch.Tensor:
    return torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(2 * rank + (which == "next")))


def exchange(function: str, wait: bool = True, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange around a ring in both directions. Return the tensors from the rank before and the one after."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import p2p_communication

    rank, world = dist.get_rank(), dist.get_world_size()
    received = torch.empty(8, 2, 64, requires_grad=True), torch.empty(8, 2, 64, requires_grad=True)
    tensors: dict[str, Any] = {
        "tensor_send_prev": tensor(rank, "prev"),
        "tensor_recv_prev": received[0],
        "tensor_send_next": tensor(rank, "next").requires_grad_(),
        "tensor_recv_next": received[1],
    }
    handles = getattr(p2p_communication, function)(
        **{**tensors, **changes},
        group=parallel_state.get_pipeline_model_parallel_group(),
        prev_pipeline_rank=(rank - 1) % world,
        next_pipeline_rank=(rank + 1) % world,
    )
    for handle in (handles.values() if isinstance(handles, dict) else handles) if wait else []:
        handle.wait()
    return received[0].detach(), received[1].detach()


def exchanges() -> bytes:
    start(pipeline_model_parallel_size=dist.get_world_size())
    seen: dict[str, Any] = {}
    for function in ("_batched_p2p_ops", "_p2p_ops"):
        for name, config in WIDTHS.items():
            counters.reset_stats()
            megatron.enable(FlashConfig(**config))
            seen[function, name] = *exchange(function), sites(), counters.stats()["sites"], counters.stats()["beside"]
            megatron.disable()
    return pickle.dumps(seen)


WIDTHS: dict[str, dict[str, Any]] = {
    "both": {"pipeline_bits": 4, "pipeline_backward_bits": 8, "group_size": 64, "min_bytes": 0, "quality_interval": 1},
    "forward": {"pipeline_bits": 4, "hadamard": True, "group_size": 64, "min_bytes": 0},
    "backward": {"pipeline_backward_bits": 3, "group_size": 64, "min_bytes": 0},
    "off": {"pipeline_bits": 4, "enabled": False},
}


def arrives(x: torch.Tensor, config: dict[str, Any], bits: int | None) -> torch.Tensor:
    if bits is None or config.get("enabled") is False:
        return x
    codec = FlashConfig(**config).format(bits)
    flat = x.reshape(-1)
    return decoded(encoded(flat, codec, NO_DRAW), flat, codec).view(x.shape)


def test_messages_have_the_width_of_their_direction() -> None:
    world = 4
    for rank, pickled in enumerate(run_ranks(world, exchanges, preload=MEGATRON)):
        for (function, name), (before, after, counts, every, beside) in pickle.loads(pickled).items():
            config = WIDTHS[name]
            forward, backward = config.get("pipeline_bits"), config.get("pipeline_backward_bits")
            assert torch.equal(before, arrives(tensor((rank - 1) % world, "next"), config, forward)), (function, name)
            assert torch.equal(after, arrives(tensor((rank + 1) % world, "prev"), config, backward)), (function, name)
            reasons = {FORWARD: policy.is_full("pipeline_bits"), BACKWARD: policy.is_full("pipeline_backward_bits")}
            for site, bits in ((FORWARD, forward), (BACKWARD, backward)):
                plain = policy.DISABLED if name == "off" else reasons[site]
                assert counts[site] == ((0, {plain: 2}) if bits is None or name == "off" else (2, {})), (function, name)
            assert (every[FORWARD]["sqnr_db"] is not None) == (name == "both")
            assert not beside, "a send that was served is counted once"


# ---- the sent messages, and unfinished ones ----


def choices() -> bytes:
    training = Training()
    seen: dict[str, Any] = {"stock": training.losses(1, forward_only=True)}
    seen["evaluation"] = served(training, {**INT8, "quantize_evaluation": False}, steps=1, forward_only=True)
    seen["quantized evaluation"] = served(training, INT8, steps=1, forward_only=True)
    with megatron.full_precision():
        seen["request"] = served(training, INT8, steps=1)
    seen["warm-up"] = served(training, {**INT8, "warmup_steps": 2})
    seen["forward alone"] = served(training, {**INT8, "pipeline_backward_bits": "full"})
    seen["exclude"] = served(training, {**INT8, "exclude": ["*"]})
    return pickle.dumps(seen)


def test_evaluation_requests_and_warm_up_are_the_same_at_both_ends() -> None:
    crossings = MICRO_BATCHES
    for pickled in run_ranks(2, choices, preload=MEGATRON):
        seen = pickle.loads(pickled)
        assert seen["evaluation"]["losses"] == seen["stock"][0]
        assert seen["evaluation"]["sites"] == {FORWARD: (0, {scopes.EVALUATION: crossings})}
        assert seen["quantized evaluation"]["sites"] == {FORWARD: (crossings, {})}
        assert seen["request"]["sites"] == dict.fromkeys((FORWARD, BACKWARD), (0, {scopes.ON_REQUEST: crossings}))
        for site in (FORWARD, BACKWARD):
            assert seen["warm-up"]["sites"][site] == (crossings, {policy.WARM_UP: 2 * crossings})
        assert seen["forward alone"]["sites"] == {
            FORWARD: (STEPS * crossings, {}),
            BACKWARD: (0, {policy.is_full("pipeline_backward_bits"): STEPS * crossings}),
        }
        assert seen["exclude"]["sites"] == dict.fromkeys((FORWARD, BACKWARD), (STEPS * crossings, {}))


def left_behind() -> list[int]:
    """Return after each step the messages without a wait. Megatron does not wait for the last sends of a step."""
    from megatron.core import parallel_state

    training = Training(chunks=2, overlap_p2p_comm=True, batch_p2p_comm=False)
    found = []
    for steps in (1, 4):
        megatron.enable(FlashConfig(**INT8))
        training.losses(steps)
        labels = [
            Label("send", "test", group)
            for group in (dist.group.WORLD, parallel_state.get_pipeline_model_parallel_group())
        ]
        found.append(sum(len(label.messages().unfinished) for label in labels))
        megatron.disable()
    return found


def test_traffic_that_megatron_hides_is_not_added() -> None:
    for found in run_ranks(2, left_behind, preload=MEGATRON):
        assert found[1] == found[0] <= 4


# ---- mistakes ----


def differing() -> str:
    training = Training()
    with pytest.raises(MismatchError) as raised:
        served(training, {**INT8, **({"pipeline_bits": "full"} if dist.get_rank() else {})})
    return str(raised.value)


def test_stages_that_differ_in_their_configuration_are_named_on_both() -> None:
    for said in run_ranks(2, differing, preload=MEGATRON):
        assert "pipeline_bits" in said


def shorter() -> str:
    """Let rank 1 expect another shape than rank 0 sends, which fails when the group's timeout has passed."""
    start(pipeline_model_parallel_size=2)
    megatron.enable(FlashConfig(**INT8))
    given: dict[str, Any] = {"tensor_send_prev": None, "tensor_recv_next": None}
    if dist.get_rank() == 0:
        exchange("_p2p_ops", wait=False, tensor_recv_prev=None, **given)
        return ""
    with pytest.raises(MismatchError) as raised:
        exchange("_p2p_ops", tensor_send_next=None, **{**given, "tensor_recv_prev": torch.empty(8, 2, 32)})
    return str(raised.value)


def test_ends_that_expect_another_shape_are_both_named() -> None:
    said = run_ranks(2, shorter, preload=MEGATRON)[1]
    assert FORWARD in said and "[8, 2, 64]" in said and "[8, 2, 32]" in said


def refused() -> list[str]:
    said = []

    def attempt(what: Any) -> None:
        try:
            what()
        except ConfigError as error:
            said.append(str(error))

    megatron.enable(FlashConfig(pipeline_bits=8))  # the number of stages is not known yet
    start(pipeline_model_parallel_size=1)  # nor now: a program may convert weights in such groups, and train in others
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.transformer.module import MegatronModule

    config = transformer_config(tensor_model_parallel_size=1)
    stages: dict[str, Any] = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    staged = transformer_config(tensor_model_parallel_size=1, **stages)
    _BaseDataParallel(config=staged, module=torch.nn.Linear(1, 1))  # groups of its own
    attempt(lambda: _BaseDataParallel(config=config, module=torch.nn.Linear(1, 1)))
    wrapped = _BaseDataParallel(config=staged, module=torch.nn.Linear(1, 1))
    wrapped.config = config
    attempt(lambda: megatron.enable(FlashConfig(pipeline_backward_bits=4)))  # a wrapped model is there
    del wrapped
    megatron.disable()

    model: Any = MegatronModule(config)  # which nothing wraps
    model.weight = torch.nn.Parameter(torch.ones(1))
    model.weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    megatron.enable(FlashConfig(pipeline_bits=4))
    optimizer.step()  # of a part without Megatron's collectives
    scopes.current()
    attempt(optimizer.step)
    optimizer.step()
    megatron.enable(FlashConfig(pipeline_bits="full"))
    _BaseDataParallel(config=config, module=torch.nn.Linear(1, 1))
    megatron.disable()
    return said


def test_widths_without_a_pipeline_are_refused() -> None:
    [said] = run_ranks(1, refused, preload=MEGATRON)
    why = "has no effect: there is no pipeline here; leave it out."
    assert said == [f"pipeline_bits=8 {why}", f"pipeline_backward_bits=4 {why}", f"pipeline_bits=4 {why}"]


def ring_exchange() -> str:
    start(pipeline_model_parallel_size=2)
    megatron.enable(FlashConfig(pipeline_bits=8))
    with pytest.raises(ConfigError) as raised:
        transformer_config(
            tensor_model_parallel_size=1,
            use_ring_exchange_p2p=True,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
        )
    return str(raised.value)


def test_sends_by_a_function_that_only_nvidia_has_are_refused() -> None:
    for said in run_ranks(2, ring_exchange, preload=MEGATRON):
        assert "use_ring_exchange_p2p and pipeline_bits exclude each other" in said
