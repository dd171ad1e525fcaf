"""make_plan: the order of its checks, the width of each role, and the resulting codecs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_allreduce_plugin import policy
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.policy import FullPrecision, Plan, Role, Site, make_plan

QUANTIZED: dict[str, Any] = {
    "collective": "all_reduce",
    "numel": 1 << 20,
    "dtype": torch.float32,
    "world_size": 4,
    "op": "sum",
    "site": Site("test"),
    "config": FlashConfig(),
    "step": None,
}


def plan(**changes: Any) -> Plan | FullPrecision:
    call = {**QUANTIZED, **changes}
    return make_plan(call.pop("collective"), **call)


def test_the_call_of_these_tests_is_quantized() -> None:
    assert plan() == Plan(Format(8, 128), Format(8, 128), FlashConfig().chunk_bytes)


@pytest.mark.parametrize(("world_size", "times"), [(2, 1), (128, 1), (1024, 8), (16_384, 128)])
def test_chunks_grow_with_large_groups(world_size: int, times: int) -> None:
    """Cut a chunk among all ranks: its part for each rank stays at 8 KiB."""
    planned = plan(world_size=world_size)
    assert isinstance(planned, Plan) and planned.chunk_bytes == times * FlashConfig().chunk_bytes


def test_the_inner_codec_is_the_widest_where_nodes_are_equal() -> None:
    nodes = ((0, 1), (2, 3))
    levels = plan(config=FlashConfig(bits=4, hierarchical="auto"), nodes=nodes)
    assert isinstance(levels, Plan) and levels.widest == levels.inside == Format(8, 128)
    both = plan(config=FlashConfig(reduce_bits=3, gather_bits=5))
    assert isinstance(both, Plan) and both.widest == both.gather


# Every obstacle alone, in the order of the checks.  `config` holds changes of the configuration.
OBSTACLES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("disabled by configuration", {}, {"enabled": False}),
    ("site not in enabled", {}, {"enabled": ["another"]}),
    ("one-rank group", {"world_size": 1}, {}),
    ("dtype int64", {"dtype": torch.int64}, {}),
    ("operator max", {"op": "max"}, {}),
    ("empty message", {"numel": 0}, {}),
    ("message below min_bytes", {}, {"min_bytes": 1 << 30}),
    ("backward_bits is full", {"site": Site("test", Role.BACKWARD)}, {"backward_bits": "full"}),
    ("not in include", {"site": Site("test", Role.BACKWARD, "b")}, {"include": ["a"], "backward_bits": 8}),
    ("in exclude", {"site": Site("test", Role.BACKWARD, "a.b")}, {"exclude": ["a"], "backward_bits": 8}),
    ("warm-up", {"step": 2}, {"warmup_steps": 3}),
]


@pytest.mark.parametrize("first", range(len(OBSTACLES)))
def test_the_first_obstacle_gives_the_reason(first: int) -> None:
    reason, call, config = OBSTACLES[first]
    assert plan(**call, config=FlashConfig(**config)) == FullPrecision(reason)
    all_calls: dict[str, Any] = {}
    all_configs: dict[str, Any] = {}
    for _, call, config in OBSTACLES[first:]:
        all_calls = call | all_calls
        all_configs = config | all_configs
    assert plan(**all_calls, config=FlashConfig(**all_configs)) == FullPrecision(reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_min_bytes_counts_the_tensor_in_its_own_dtype(dtype: torch.dtype) -> None:
    config = FlashConfig(min_bytes=4096)
    numel = 4096 // dtype.itemsize
    assert isinstance(plan(config=config, dtype=dtype, numel=numel), Plan)
    assert plan(config=config, dtype=dtype, numel=numel - 1) == FullPrecision(policy.SMALL)


def test_min_bytes_0_still_leaves_the_empty_message_out() -> None:
    assert isinstance(plan(config=FlashConfig(min_bytes=0), numel=1), Plan)
    assert plan(config=FlashConfig(min_bytes=0), numel=0) == FullPrecision(policy.EMPTY)


@pytest.mark.parametrize("name", ["float64", "int32", "uint8", "bool", "complex64", "float8_e4m3fn"])
def test_other_dtypes(name: str) -> None:
    assert plan(dtype=getattr(torch, name)) == FullPrecision(f"dtype {name}")


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_other_operators_count_only_where_there_is_a_sum(op: str) -> None:
    assert plan(op=op) == FullPrecision(f"operator {op}")
    assert plan(op=op, collective="reduce_scatter") == FullPrecision(f"operator {op}")
    assert plan(op=op, collective="all_gather") == plan()


def test_avg_is_planned_like_sum() -> None:
    assert plan(op="avg") == plan()


# The field that decides about each role: None where the role is never kept in full precision.
ROLES = [
    (Role.ANY, "bits", None),
    (Role.FORWARD, "bits", None),
    (Role.BACKWARD, "backward_bits", policy.is_full("backward_bits")),
    (Role.SEQUENCE_PARALLEL_GATHER, "sequence_parallel_gather_bits", policy.is_full("sequence_parallel_gather_bits")),
    (Role.SEQUENCE_PARALLEL_GRADIENT, "sequence_parallel_gather_bits", policy.is_full("sequence_parallel_gather_bits")),
    (Role.GRADIENT, "grad_bits", policy.is_full("grad_bits")),
    (Role.PARAMETER, "param_bits", policy.is_full("param_bits")),
    (Role.PARAMETER_BACKWARD, "param_backward_bits", policy.is_full("param_backward_bits")),
    (Role.PARAMETER_DIFFERENCE, "param_bits", policy.is_full("param_bits")),
    (Role.EXPERT, "expert_bits", policy.is_full("expert_bits")),
    (Role.EXPERT_GRADIENT, "expert_bits", policy.is_full("expert_bits")),
    (Role.EXPERT_COMBINE, "expert_combine_bits", policy.is_full("expert_combine_bits")),
    (Role.EXPERT_COMBINE_GRADIENT, "expert_combine_bits", policy.is_full("expert_combine_bits")),
    (Role.ATTENTION, "attention_bits", policy.is_full("attention_bits")),
    (Role.ATTENTION_GRADIENT, "attention_bits", policy.is_full("attention_bits")),
    (Role.PIPELINE, "pipeline_bits", policy.is_full("pipeline_bits")),
    (Role.PIPELINE_BACKWARD, "pipeline_backward_bits", policy.is_full("pipeline_backward_bits")),
]


@pytest.mark.parametrize(("role", "key", "full"), ROLES)
def test_width_by_role(role: Role, key: str, full: str | None) -> None:
    site = Site("test", role)
    widths: dict[str, Any] = {
        "bits": 8,
        "backward_bits": 8,
        "sequence_parallel_gather_bits": 8,
        "grad_bits": 8,
        "param_bits": 8,
        "param_backward_bits": 8,
        "expert_bits": 8,
        "expert_combine_bits": 8,
        "attention_bits": 8,
        "pipeline_bits": 8,
        "pipeline_backward_bits": 8,
        key: 5,
    }
    planned = plan(site=site, config=FlashConfig(**widths))
    assert planned == Plan(Format(5, 128), Format(5, 128), FlashConfig().chunk_bytes)
    if full is not None:
        overridden = FlashConfig(**{**widths, key: "full", "reduce_bits": 4, "gather_bits": 4})
        assert plan(site=site, config=overridden) == FullPrecision(full)


def test_the_embedding_is_quantized_only_on_request() -> None:
    site = Site("test", Role.EMBEDDING)
    assert plan(site=site) == FullPrecision(policy.EMBEDDING)
    config = FlashConfig(bits=5, quantize_embedding=True)
    assert plan(site=site, config=config) == plan(config=FlashConfig(bits=5))


def test_layer_norms_are_quantized_only_on_request() -> None:
    site = Site("test", Role.LAYER_NORM)
    assert plan(site=site, config=FlashConfig(grad_bits=5)) == FullPrecision(policy.LAYER_NORM)
    config = FlashConfig(grad_bits=5, quantize_layernorm=True)
    assert plan(site=site, config=config) == plan(config=FlashConfig(bits=5))
    assert plan(site=site, config=FlashConfig(quantize_layernorm=True)) == FullPrecision(policy.is_full("grad_bits"))


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.EMBEDDING])
def test_one_half_can_be_overridden_for_every_role(role: Role) -> None:
    widths: dict[str, Any] = {
        "bits": 6,
        "backward_bits": 6,
        "sequence_parallel_gather_bits": 6,
        "grad_bits": 6,
        "param_bits": 6,
        "expert_bits": 6,
        "attention_bits": 6,
        "pipeline_bits": 6,
        "pipeline_backward_bits": 6,
        "quantize_layernorm": True,
    }
    site = Site("test", role)
    for key, expected in [("reduce_bits", (4, 6)), ("gather_bits", (6, 4))]:
        planned = plan(site=site, config=FlashConfig.from_dict({**widths, key: 4}))
        assert isinstance(planned, Plan)
        assert (planned.reduce.bits, planned.gather.bits) == expected


def test_the_way_back_from_the_experts_has_the_width_of_the_way_there_if_none_of_its_own() -> None:
    combine = Site("test", Role.EXPERT_COMBINE)
    assert plan(site=combine, config=FlashConfig(expert_bits=5)) == plan(config=FlashConfig(bits=5))
    assert plan(site=combine, config=FlashConfig()) == FullPrecision(policy.is_full("expert_bits"))
    assert plan(site=combine, config=FlashConfig(expert_bits=5, expert_combine_bits=7)) == plan(
        config=FlashConfig(bits=7)
    )


def test_parameters_of_the_backward_pass_have_the_width_of_the_forward_pass_if_none_of_their_own() -> None:
    backward = Site("test", Role.PARAMETER_BACKWARD)
    assert plan(site=backward, config=FlashConfig(param_bits=5)) == plan(config=FlashConfig(bits=5))
    assert plan(site=backward, config=FlashConfig()) == FullPrecision(policy.is_full("param_bits"))
    assert plan(site=Site("test", Role.PARAMETER), config=FlashConfig(param_backward_bits=4)) == FullPrecision(
        policy.is_full("param_bits")
    )


@pytest.mark.parametrize(
    "role",
    [
        Role.SEQUENCE_PARALLEL_GRADIENT,
        Role.EXPERT_GRADIENT,
        Role.EXPERT_COMBINE_GRADIENT,
        Role.ATTENTION_GRADIENT,
    ],
)
def test_gathered_and_exchanged_gradients_need_backward_bits_as_well(role: Role) -> None:
    config = FlashConfig(backward_bits="full", sequence_parallel_gather_bits=8, expert_bits=8, attention_bits=8)
    assert plan(site=Site("test", role), config=config) == FullPrecision(policy.is_full("backward_bits"))


@pytest.mark.parametrize("role", Role)
def test_backward_rounding_rounds_traffic_of_backward_bits(role: Role) -> None:
    widths = {key: 4 for _, key, _ in ROLES} | {"quantize_embedding": True, "quantize_layernorm": True}
    options = {"codebook": True, "spike_reserving": True, "range": "mse", "hadamard": True}
    nearest = FlashConfig.from_dict({**widths, **options})
    stochastic = nearest.model_copy(update={"backward_rounding": "stochastic"})
    site = Site("test", role)
    before, after = plan(site=site, config=nearest), plan(site=site, config=stochastic)
    if plan(site=site, config=nearest.model_copy(update={"backward_bits": "full"})) == before:
        assert after == before
    else:
        unbiased = Format(4, 128, spikes=True, hadamard=True, stochastic=True)
        assert after == Plan(unbiased, unbiased, nearest.chunk_bytes)
    every = FlashConfig.from_dict({**widths, "rounding": "stochastic"})
    back = plan(site=site, config=every.model_copy(update={"backward_rounding": "nearest"}))
    assert isinstance(before, Plan) and isinstance(back, Plan)
    assert back.reduce.stochastic == (after == before)


def test_differences_of_parameters_have_no_codebook() -> None:
    config = FlashConfig(param_bits=4, codebook=True, spike_reserving=True, range="mse")
    of_values = plan(site=Site("test", Role.PARAMETER), config=config)
    of_differences = plan(site=Site("test", Role.PARAMETER_DIFFERENCE), config=config)
    assert isinstance(of_values, Plan) and of_values.gather == config.format(4)
    assert of_differences == plan(config=FlashConfig(bits=4, range="mse"))


@pytest.mark.parametrize(
    ("module", "include", "exclude", "reason"),
    [
        ("decoder.layers.0.mlp.linear_fc1", ["decoder.layers.0"], [], None),
        ("decoder.layers.0.mlp.linear_fc1", ["decoder.layers.0.*"], [], None),
        ("decoder.layers.0.mlp.linear_fc1", ["*.linear_fc1"], [], None),
        ("decoder.layers.10.mlp.linear_fc1", ["decoder.layers.1"], [], policy.NOT_INCLUDED),
        ("decoder.layers.0.mlp.linear_fc1", ["Decoder*"], [], policy.NOT_INCLUDED),
        ("decoder.layers.0.mlp.linear_fc1", [], ["*.mlp"], policy.EXCLUDED),
        ("decoder.layers.0.mlp.linear_fc1", ["decoder"], ["*.mlp.*"], policy.EXCLUDED),
        ("decoder.layers.0.mlp.linear_fc1", [], ["output_layer"], None),
        ("", ["decoder"], [], policy.NOT_INCLUDED),
        ("", ["*"], [], None),
        (None, ["decoder"], ["*"], None),
    ],
)
def test_names(module: str | None, include: list[str], exclude: list[str], reason: str | None) -> None:
    config = FlashConfig(include=include, exclude=exclude)
    expected = plan() if reason is None else FullPrecision(reason)
    assert plan(site=Site("test", Role.FORWARD, module), config=config) == expected


@pytest.mark.parametrize(("step", "quantized"), [(0, False), (2, False), (3, True), (100, True), (None, True)])
def test_warm_up(step: int | None, quantized: bool) -> None:
    assert isinstance(plan(step=step, config=FlashConfig(warmup_steps=3)), Plan) == quantized


@settings(deadline=None)
@given(
    st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
    st.integers(0, 1 << 33),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 64),
    st.sampled_from([32, 64, 128, 256, 512, 1024]),
    st.booleans(),
    st.integers(4096, 1 << 30),
    st.sampled_from([Role.ANY, Role.FORWARD, Role.BACKWARD]),
)
def test_a_plan_has_the_widths_of_the_configuration(
    collective: str,
    numel: int,
    dtype: torch.dtype,
    world_size: int,
    group_size: int,
    symmetric: bool,
    chunk_bytes: int,
    role: Role,
) -> None:
    config = FlashConfig(bits=3, backward_bits=3, group_size=group_size, symmetric=symmetric, chunk_bytes=chunk_bytes)
    call = {"collective": collective, "numel": numel, "dtype": dtype, "world_size": world_size}
    planned = plan(**call, config=config, site=Site("test", role))
    assert planned == plan(**call, config=config, site=Site("another name", role))
    if world_size > 1 and numel * dtype.itemsize >= config.min_bytes:
        codec = Format(3, group_size, symmetric)
        assert planned == Plan(codec, codec, chunk_bytes)
    else:
        assert isinstance(planned, FullPrecision)


def test_an_exchange_is_decided_without_its_sizes() -> None:
    """Decide without sizes, which differ between ranks. Never in two levels; in all else as an all_gather."""
    config = FlashConfig(
        reduce_bits=3, gather_bits=5, hierarchical={"intra_bits": 8, "inter_bits": 2, "ranks_per_node": 2}
    )
    nodes = ((0, 1), (2, 3))
    for numel in (0, 1, 1 << 30):
        for op in ("sum", "max"):
            call = {"collective": "all_to_all", "numel": numel, "op": op, "world_size": 4, "nodes": nodes}
            answer = plan(**call, config=config)
            assert isinstance(answer, Plan)
            assert answer.nodes is None and answer.inside is None and answer.bits("all_to_all") == 5
            assert answer.narrowest("all_to_all") == 5 and answer.width is None
            assert plan(**call, config=FlashConfig(enabled=False)) == FullPrecision(policy.DISABLED)
    adapting = FlashConfig(target_sqnr_db=30.0, quality_interval=1, reduce_bits=4)
    answer = plan(collective="all_to_all", numel=0, config=adapting)
    assert isinstance(answer, Plan) and answer.width == 8


@pytest.mark.parametrize("collective", ["broadcast", "gather", "scatter", "send", "recv"])
def test_other_collectives_than_sums_have_one_level_and_gather_bits(collective: str) -> None:
    nodes, levels = ((0, 1), (2, 3)), {"intra_bits": 8, "inter_bits": 2, "ranks_per_node": 2}
    config = FlashConfig(reduce_bits=3, gather_bits=5, hierarchical=levels)
    for op in ("sum", "max"):
        answer = plan(collective=collective, op=op, nodes=nodes, config=config)
        assert isinstance(answer, Plan) and answer.nodes is None and answer.bits(collective) == 5
    assert plan(collective=collective, numel=0) == FullPrecision(policy.EMPTY)
    assert plan(collective=collective, numel=10) == FullPrecision(policy.SMALL)
    adapting = plan(collective=collective, config=FlashConfig(target_sqnr_db=30.0, quality_interval=1, reduce_bits=4))
    assert isinstance(adapting, Plan) and adapting.width == (None if collective in ("send", "recv") else 8)


def test_a_sum_at_one_rank_has_two_levels_and_the_width_before_the_sum() -> None:
    levels = {"intra_bits": 8, "inter_bits": 2, "ranks_per_node": 2}
    config = FlashConfig(reduce_bits=3, gather_bits=5, hierarchical=levels)
    answer = plan(collective="reduce", nodes=((0, 1), (2, 3)), config=config)
    assert isinstance(answer, Plan) and answer.nodes is not None and answer.bits("reduce") == 3
    assert plan(collective="reduce", op="max") == FullPrecision("operator max")


def test_every_width_of_a_plan_is_raised() -> None:
    levels = Plan(Format(4, 128), Format(6, 128), 4096, inside=Format(3, 128), nodes=((0, 1), (2,)))
    assert [levels.narrowest(name) for name in ("all_reduce", "reduce_scatter", "all_gather")] == [3, 3, 6]
    flat = Plan(Format(4, 128), Format(6, 128), 4096)
    assert [flat.narrowest(name) for name in ("all_reduce", "reduce_scatter", "all_gather")] == [4, 4, 6]
    raised = levels.at_least(5)
    assert (raised.inside, raised.reduce, raised.gather) == (Format(5, 128), Format(5, 128), Format(6, 128))
    assert (raised.nodes, raised.chunk_bytes) == (levels.nodes, 4096)
    assert flat.at_least(2) == flat and flat.at_least(8).inside is None
