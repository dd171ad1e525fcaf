"""The overlap arithmetic: by hand on small numbers, and properties that hold for any cluster and layout."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_allreduce_plugin.cli.plan.cost_model import (
    DIFFERENCE_PASSES,
    Cluster,
    Group,
    Model,
    Shares,
    Traffic,
    cost,
    dp_ratio,
    pp_ratio,
    tp_ratio,
)
from flash_allreduce_plugin.cli.plan.step_model import (
    ATTENTION,
    BACKWARD,
    EXPERT,
    FORWARD,
    FSDP_PARAMETERS,
    GATHER,
    GRADIENT,
    PARAMETERS,
    PIPELINE,
    PIPELINE_BACKWARD,
    Layout,
    advise,
    check,
    group_of,
    predict,
    quantizable,
    traffic,
    widths_at,
)
from flash_allreduce_plugin.codec.format import Format

INT8, INT4 = Format(8, 128), Format(4, 128)  # 132 and 68 bytes a group of 128
# 1 GB/s inside a node, 0.1 between; kernels and arithmetic free.
BOX = Cluster("box", flops=math.inf, codec=math.inf, ranks_per_node=4, intra=1e9, inter=1e8)
NUMEL = 128_000
# 1000 parameters a layer: hidden 10, 1 head; attention 4 x 100, MLP 2 x 300. Vocabulary 50: 500 more.
MODEL = Model(layers=4, hidden=10, heads=1, kv_heads=1, ffn=30, vocabulary=50, sequence=8)


def call(collective="all_reduce", ranks=4, per_node=4, **more) -> Traffic:
    return Traffic("call", None, collective, NUMEL, 2, 1, Group(ranks, per_node), **more)


def parts(layout, cluster=BOX, widths=None, model=MODEL):
    return {part.kind: part for part in predict(model, cluster, layout, widths or {}, min_bytes=0).parts}


# One call ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective, volumes", [("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)])
def test_a_call_inside_a_node(collective, volumes):
    """Check that each half sends (N-1)/N of the tensor or of the payload over the link of a node."""
    full, narrow = cost(call(collective), BOX), cost(call(collective), BOX, INT4)
    assert full.bytes_sent == volumes * 3 / 4 * 256_000
    assert full.seconds == pytest.approx(volumes * 3 / 4 * 256_000 / 1e9)
    assert narrow.bytes_sent == volumes * 3 / 4 * 68_000
    assert narrow.seconds == pytest.approx(volumes * 3 / 4 * 68_000 / 1e9)
    assert (full.way, narrow.way) == ("ring", "flat")


def test_a_call_between_nodes_of_one_rank():
    full, narrow = cost(call(per_node=1), BOX), cost(call(per_node=1), BOX, INT8)
    assert full.seconds == pytest.approx(2 * 3 / 4 * 256_000 / 1e8)
    assert narrow.seconds == pytest.approx(2 * 3 / 4 * 132_000 / 1e8)


def test_a_call_between_nodes_of_several_ranks():
    """Check that a ring uses the links of all ranks of a node, and that two levels send an L-th between nodes."""
    t = call(ranks=8)
    slow = replace(BOX, inter=1e6)  # only this link matters
    assert cost(t, slow).seconds == pytest.approx(2 * 7 / 8 * 256_000 / 4e6)
    narrow = cost(t, slow, INT4)
    assert narrow.way == "two levels"
    assert narrow.link == pytest.approx(2 * 1 / 2 * 68_000 / 4 / 1e6)
    assert narrow.bytes_sent == 3 / 4 * (132_000 + 68_000) + 2 * 1 / 2 * 68_000 / 4
    fast = cost(t, replace(BOX, intra=1e6, inter=1e12), INT4)
    assert fast.way == "flat" and fast.link == pytest.approx(2 * 3 / 8 * 68_000 / 1e6)


@pytest.mark.parametrize("collective, volumes", [("reduce_scatter", 1), ("all_gather", 1)])
def test_two_levels_of_one_half(collective, volumes):
    slow = replace(BOX, inter=1e6)
    narrow = cost(call(collective, ranks=8), slow, INT4)
    assert narrow.link == pytest.approx(volumes * 1 / 2 * 68_000 / 4 / 1e6)
    inside = 132_000 if collective == "reduce_scatter" else 68_000
    assert narrow.bytes_sent == 3 / 4 * inside + 1 / 2 * 68_000 / 4


def test_the_codec_is_busy_for_the_bytes_that_its_kernels_move():
    c = replace(BOX, codec=1e9, intra=math.inf)
    tensor, payload = 256_000, 68_000
    assert cost(call(), c, INT4).busy == pytest.approx((2 * tensor + 3 * payload + payload / 4) / 1e9)
    assert cost(call("reduce_scatter"), c, INT4).busy == pytest.approx((tensor * 5 / 4 + 2 * payload) / 1e9)
    assert cost(call("all_gather"), c, INT4).busy == pytest.approx((tensor + payload) * 5 / 4 / 1e9)
    assert cost(call(), c).busy == 0


def test_each_kernel_reaches_its_own_share():
    """Use the share of each kernel's width: the first sum of two levels is at 8 bits."""
    four, eight = Shares(0.5, 0.25, 0.125, 0.1), Shares(0.8, 0.4, 0.2, 0.01)
    c = replace(BOX, codec=1e9, intra=math.inf, shares={4: four, 8: eight})
    tensor, payload, wide = 256_000, 68_000, 132_000
    encode, decode = (tensor + payload) / 0.5, (tensor + payload) / 0.25
    assert cost(call(), c, INT4).busy == pytest.approx((encode + decode + 5 / 4 * payload / 0.1) / 1e9)
    scattered = encode + (payload + tensor / 4) / 0.125
    assert cost(call("reduce_scatter"), c, INT4).busy == pytest.approx(scattered / 1e9)
    assert cost(call("all_gather"), c, INT4).busy == pytest.approx((encode / 4 + decode) / 1e9)
    slow = replace(c, inter=1.0)  # two levels, 8 ranks on 2 nodes
    inside = (tensor + wide) / 0.8 + (wide + payload / 4) / 0.01
    between, last = (payload / 4 + payload / 8) / 0.1, (payload / 4 + tensor / 8) / 0.125
    assert cost(call(ranks=8), slow, INT4).busy == pytest.approx((inside + between + decode) / 1e9)
    assert cost(call("reduce_scatter", ranks=8), slow, INT4).busy == pytest.approx((inside + last) / 1e9)
    assert cost(call("all_gather", ranks=8), slow, INT4).busy == pytest.approx((encode / 8 + decode) / 1e9)
    assert cost(call(), c, Format(6, 128)).busy == cost(call(), replace(c, shares={}), Format(6, 128)).busy


def test_the_host_starts_the_chunks_of_a_quantized_call():
    c = replace(BOX, host=(1.0, 0.1))
    assert cost(call(), c, INT4).host == 1 and cost(call(), c).host == 0
    assert cost(replace(call(), calls=3), c, INT4).host == 3
    assert cost(replace(call(), numel=30 << 20), c, INT4).host == pytest.approx(1.1)  # 15.9 MiB
    assert cost(replace(call(), numel=1 << 40), c, INT4).host == pytest.approx(1.7)
    assert cost(call(), c, INT4) == replace(cost(call(), BOX, INT4), host=1.0)


def test_no_step_is_shorter_than_the_host_needs_for_its_calls():
    c = replace(BOX, host=(1.0, 0.0))
    step = predict(MODEL, c, Layout(tp=2), {FORWARD: 8}, min_bytes=0)
    assert step.host == 8 == step.after
    assert predict(MODEL, c, Layout(tp=2), {}, min_bytes=0).host == 0
    ahead = replace(c, flops=1e3)
    assert predict(MODEL, ahead, Layout(tp=2), {FORWARD: 8}, min_bytes=0).after > 8


def test_a_call_takes_the_longer_of_link_and_device_and_hides_the_difference():
    # INT4, all_reduce: link 0.75 ms, kernels 0.733 x 1e6 / codec
    c = replace(BOX, intra=136e6, codec=733_000 / 0.0002)
    assert cost(call(), c, INT4).exposed == pytest.approx(0.00075)
    hidden = cost(call(hide=0.0003), c, INT4)
    assert (hidden.hidden, hidden.exposed) == pytest.approx((0.0003, 0.00045))
    most = cost(call(hide=1.0), c, INT4)
    assert (most.hidden, most.exposed) == pytest.approx((0.00055, 0.0002))
    busy = cost(call(hide=1.0), replace(c, codec=733_000 / 0.002), INT4)
    assert (busy.hidden, busy.exposed) == pytest.approx((0.0, 0.002))


def test_the_start_of_a_quantized_call_comes_on_top_and_is_not_hidden():
    c = replace(BOX, start=1.0)
    assert cost(call(), c, INT4).exposed == pytest.approx(1 + cost(call(), BOX, INT4).exposed)
    assert cost(call(hide=9.0), c, INT4).exposed == pytest.approx(1.0)
    assert cost(call(), c).exposed == cost(call(), BOX).exposed


def test_a_gather_by_differences_sends_as_much_and_reads_the_weights_again():
    """Check that the ranks also compare their checksums before the first byte, which nothing hides."""
    c = replace(BOX, codec=1e9, latency=0.5)
    values, differences = (cost(call("all_gather", hide=9.0, differences=d), c, INT4) for d in (False, True))
    assert (differences.bytes_sent, differences.link) == (values.bytes_sent, values.link)
    assert differences.busy == pytest.approx(values.busy + DIFFERENCE_PASSES * 256_000 / 1e9)
    assert differences.exposed == pytest.approx(0.5 + differences.busy)
    assert cost(call("all_gather", differences=True), c) == cost(call("all_gather"), c)


def test_a_device_that_sends_is_busy():
    c = replace(BOX, transport=1e6)
    assert cost(call(), c).busy == pytest.approx(2 * 3 / 4 * 256_000 / 1e6) == cost(call(), c).exposed


def test_gloo():
    """Check gloo: its reduce-scatter is an all-reduce."""
    gloo = replace(BOX, backend="gloo")
    assert cost(call("reduce_scatter"), gloo).bytes_sent == cost(call(), gloo).bytes_sent == 2 * 3 / 4 * 256_000
    assert cost(call("reduce_scatter"), gloo, INT4).bytes_sent == 3 / 4 * 68_000
    for collective in ("all_reduce", "reduce_scatter"):  # gloo advances both without a wait
        alone = cost(call(collective), gloo, INT4)
        assert cost(call(collective, hide=1.0), gloo, INT4).hidden == pytest.approx(max(0.0, alone.link - alone.busy))


def test_latency_is_of_each_exchange():
    c = replace(BOX, latency=1.0, intra=math.inf, inter=math.inf)
    assert cost(call(), c).link == 2 == cost(call(), c, INT4).link
    assert cost(call("all_gather"), c, INT4).link == 1 == cost(call("send"), c).link
    c = replace(c, far=10.0, latency=1.0)
    assert cost(call(per_node=1), c).link == 20 == cost(call(per_node=1), c, INT4).link
    near = replace(c, inter=1.0, intra=math.inf)  # two levels are the faster here
    assert cost(call(ranks=8), near, INT4).link == 22 + 2 * 1 / 2 * 68_000 / 4


def test_one_rank_costs_nothing():
    assert cost(call(ranks=1), BOX).seconds == 0 == cost(call(ranks=1), BOX, INT4).seconds


# A step, kind by kind ------------------------------------------------------------------------------------------------


def test_parameters_and_flops_by_hand():
    assert MODEL.parameters == 4 * 1000 + 500
    assert replace(MODEL, tied=False, positions=3).parameters == 4 * 1000 + 2 * 500 + 30
    gated = replace(MODEL, gated=True, heads=5, kv_heads=1)
    assert (gated.qkv_columns, gated.parameters) == (14, 4 * (10 * 14 + 100 + 3 * 300) + 500)
    several = replace(MODEL, experts=6, experts_per_token=2)
    assert several.parameters == 4 * (400 + 6 * 600) + 500 and several.expert_parameters == 4 * 6 * 600
    assert several.layer_flops(16) == 16 * (2 * (400 + 2 * 600) + 4 * 8 * 10)
    assert MODEL.layer_flops(16) == 16 * (2 * 1000 + 4 * 8 * 10)
    assert MODEL.forward_flops(16) == 4 * MODEL.layer_flops(16) + 2 * 16 * 500


def test_tensor_parallel():
    """Count 2 all-reduces a layer and direction, of tokens x hidden; one more for embedding and output layer."""
    found = parts(Layout(tp=2, micro_batch=3, accumulation=2))
    one = 2 * 1 / 2 * (3 * 8 * 10 * 2)  # bytes sent
    assert found["TP forward (g)"].before.bytes_sent == 2 * 8 * one
    assert found["TP forward (embedding)"].before.bytes_sent == 2 * one
    assert found["TP backward (f)"].before.bytes_sent == 2 * 9 * one
    assert found["TP forward (g)"].before.seconds == pytest.approx(2 * 8 * one / 1e9)
    assert {part.field for part in found.values()} == {FORWARD, BACKWARD, None}
    again = parts(Layout(tp=2, micro_batch=3, accumulation=2, recompute=True))
    assert again["TP forward (g)"].before.bytes_sent == 2 * 16 * one


def test_the_backward_reduction_hides_behind_the_weight_gradient():
    slow = replace(BOX, flops=1e6, intra=1.0)  # GEMMs of a rank: 2 x 8 x 10 x columns / 2 flops
    found = parts(Layout(tp=2), slow)
    assert found["TP forward (g)"].before.hidden == 0
    assert found["TP backward (f)"].before.hidden == pytest.approx(80 * (4 * 30 + 4 * 30 + 50) / 1e6)


def test_sequence_parallel():
    """Count a scatter and a gather for each all-reduce, the input gathered again, and those of the embedding."""
    found = parts(Layout(tp=2, sequence_parallel=True))
    one = 1 / 2 * (8 * 10 * 2)
    sent = {kind: part.before.bytes_sent / one for kind, part in found.items()}
    assert sent == {
        "SP forward, scatter": 8,
        "SP forward (embedding)": 1,
        "SP forward, gather": 9,
        "SP backward, scatter": 9,
        "SP backward, input gathered again": 9,
        "SP backward, gradient gathered": 8,
    }
    assert found["SP backward, scatter"].field == BACKWARD and found["SP forward, gather"].field == GATHER


def test_gradients_are_gathered_quantized_only_with_backward_bits():
    layout = Layout(tp=2, sequence_parallel=True)
    alone = parts(layout, widths={GATHER: 8})["SP backward, gradient gathered"]
    both = parts(layout, widths={GATHER: 8, BACKWARD: 4})["SP backward, gradient gathered"]
    assert alone.bits is None and alone.after == alone.before
    assert both.bits == 8 and both.after.bytes_sent < both.before.bytes_sent


def test_pipeline_sends_and_bubble():
    """Count activations forward and gradients back in 4 micro-batches; 1 of 4 batches of bubble with 2 stages."""
    layout = Layout(pp=2, accumulation=4)
    step = predict(MODEL, replace(BOX, flops=1e6), layout, {})
    there, back = step.parts
    assert (there.kind, there.field, back.kind, back.field) == (
        "PP send, activations",
        PIPELINE,
        "PP send, gradients",
        PIPELINE_BACKWARD,
    )
    for part in (there, back):
        assert part.before.bytes_sent == 4 * 8 * 10 * 2
        assert part.before.seconds == pytest.approx(4 * 160 / 1e9)
    assert step.compute == pytest.approx(4 * 3 * MODEL.forward_flops(8) / 2 / 1e6)
    assert step.bubble_before == pytest.approx((step.compute + 2 * there.before.seconds) / 4)
    far = parts(Layout(pp=2, tp=4, accumulation=4))["PP send, activations"]
    assert far.before.seconds == pytest.approx(4 * 160 / 1e8)
    scattered = parts(Layout(pp=2, tp=4, accumulation=4, sequence_parallel=True))["PP send, gradients"]
    assert scattered.before.bytes_sent == far.before.bytes_sent / 4


def test_a_quantized_send_is_its_payload_and_the_kernels_of_its_ends():
    layout, codec = Layout(pp=2, tp=4, accumulation=4, micro_batch=1000), Format(8, 128)
    numel = 1000 * 8 * 10
    payload = numel * codec.bits_per_element / 8
    there = parts(layout, BOX, {PIPELINE: 8})["PP send, activations"]
    assert there.bits == 8 and there.after.bytes_sent == pytest.approx(4 * payload)
    kernels = sum(BOX.kernel(end, 8, 2 * numel + payload) for end in ("encode", "decode"))
    assert there.after.exposed == pytest.approx(4 * (BOX.start + max(payload / BOX.inter + BOX.far, kernels)))
    back = parts(layout, BOX, {PIPELINE: 8})["PP send, gradients"]
    assert back.bits is None and back.after == back.before
    assert {PIPELINE, PIPELINE_BACKWARD} <= set(quantizable(MODEL, BOX, layout))


def test_ranks_that_share_a_sequence_exchange_heads_for_tokens():
    """Count query, key, value and output of a rank's tokens without its own part; once more in the backward pass."""
    model, layout = replace(MODEL, heads=2, kv_heads=2), Layout(cp=2, micro_batch=3, accumulation=2)
    found = parts(layout, model=model, widths={ATTENTION: 8})
    one = 1 / 2 * (3 * 4 * 10 * 2)
    assert (
        found["CP attention, forward"].before.bytes_sent
        == 2 * 4 * 4 * one
        == (found["CP attention, gradients"].before.bytes_sent)
    )
    assert found["CP attention, forward"].after.bytes_sent == pytest.approx(2 * 4 * 4 * one * 8.25 / 16)
    assert found["CP attention, gradients"].bits is None  # of the backward pass
    both = parts(layout, model=model, widths={ATTENTION: 8, BACKWARD: 8})
    assert both["CP attention, gradients"].bits == 8
    again = parts(replace(layout, recompute=True), model=model)
    assert again["CP attention, forward"].before.bytes_sent == 2 * 2 * 4 * 4 * one
    assert found["DP gradients"].group == Group(2, 2)  # they have the same parameters


def test_the_ring_of_context_parallelism_hides_behind_the_attention_and_is_not_served():
    slow = replace(BOX, flops=1e6, intra=1.0)
    found = parts(Layout(cp=4), slow, widths={ATTENTION: 8, BACKWARD: 8}, model=replace(MODEL, sequence=16))
    assert not [kind for kind in found if "ring" in kind]
    found = parts(Layout(cp=4, cp_comm_type="p2p"), slow, model=replace(MODEL, sequence=16))
    ring = found["CP ring, keys and values"]
    assert ring.field is None and ring.before.bytes_sent == 3 * 4 * (4 * 20 * 2)  # rounds, layers, keys and values
    # Next to each: the scores and their products, of 4 tokens with 4: 4 x 4 x 4 x 10 flops.
    assert ring.before.hidden == pytest.approx(3 * 4 * 640 / 1e6)
    assert found["CP ring, backward"].before.bytes_sent == 2 * ring.before.bytes_sent


def test_tokens_go_to_their_experts_and_back():
    model = replace(MODEL, experts=4, experts_per_token=2)
    found = parts(Layout(dp=8, ep=4), model=model, widths={EXPERT: 4})
    one = 3 / 4 * (8 * 2 * 10 * 2)  # tokens, experts of each, hidden size
    assert found["EP forward"].before.bytes_sent == 4 * 2 * one == found["EP gradients"].before.bytes_sent
    assert found["EP forward"].after.bytes_sent == pytest.approx(4 * 2 * one * 4.25 / 16)
    assert found["EP gradients"].bits is None and "EP forward, TP" not in found
    # The others' gradients among all ranks, those of an expert among the two that have it.
    numel = {"DP gradients": 4 * 400 + 500, "DP gradients of experts": 4 * 600}
    ranks = {kind: found[kind].group.ranks for kind in numel}
    assert ranks == {"DP gradients": 8, "DP gradients of experts": 2}
    for kind, elements in numel.items():
        assert found[kind].before.bytes_sent == pytest.approx(2 * (1 - 1 / ranks[kind]) * elements * 2)


def test_experts_and_tensor_parallelism():
    """Count attention's scatter and gather; an expert's tokens are gathered and summed by the ranks that share it."""
    model = replace(MODEL, experts=4, experts_per_token=2)
    found = parts(Layout(tp=2, dp=4, ep=2, sequence_parallel=True), model=model)
    half = 1 / 2 * (8 * 10 * 2)
    assert found["SP forward, scatter"].before.bytes_sent == 4 * half
    assert found["SP forward, gather"].before.bytes_sent == 5 * half
    assert found["EP forward"].before.bytes_sent == 4 * 2 * (2 * half) / 2
    assert found["EP forward, TP"].before.bytes_sent == 4 * 2 * (2 * half)


def test_an_all_to_all_sends_each_rank_its_part():
    t = call("all_to_all", ranks=8, per_node=4)
    full, quantized = cost(t, BOX), cost(t, BOX, INT8)
    assert full.bytes_sent == pytest.approx(7 / 8 * 256_000) and full.way == "flat"
    assert full.link == pytest.approx(4 / 8 * 256_000 / 1e8)  # the slower of 3/8 at 1e9 and 4/8 at 1e8
    assert quantized.bytes_sent == pytest.approx(7 / 8 * 132_000) and quantized.way == "flat"


def test_data_parallel_gradients():
    """Count one all-reduce of all gradients a step, in buckets. Nothing hides the last bucket."""
    layout = Layout(dp=4, gradient_itemsize=4, accumulation=3, bucket=1125)
    slow = replace(BOX, flops=1e9, intra=1e6)
    part = parts(layout, slow)["DP gradients"]
    assert part.field == GRADIENT and part.before.bytes_sent == 2 * 3 / 4 * 4500 * 4
    link = 27_000 / 1e6
    hidden = 2 * MODEL.forward_flops(8) / 1e9 * 3 / 4
    assert part.before.hidden == pytest.approx(hidden) and hidden < link
    assert part.before.exposed == pytest.approx(link - hidden)
    assert parts(replace(layout, overlap=False), slow)["DP gradients"].before.hidden == 0
    narrow = parts(layout, slow, {GRADIENT: 4})["DP gradients"].after
    assert narrow.bytes_sent == pytest.approx(2 * 3 / 4 * 4500 * 68 / 128)


def test_the_distributed_optimizer_and_zero_1_and_2():
    """Check Megatron (reduce to owners, gather parameters) and DeepSpeed (all-reduce; the plugin sends to owners)."""
    megatron = parts(Layout(dp=4, zero=1), widths={GRADIENT: 8})
    assert megatron["DP gradients (ZeRO-1)"].before.bytes_sent == 3 / 4 * 9000
    assert megatron["DP parameters"].before.bytes_sent == 3 / 4 * 9000
    assert megatron["DP parameters"].field == PARAMETERS and megatron["DP parameters"].bits is None
    one = parts(Layout(dp=4, zero=1, framework="deepspeed", accumulation=5), widths={GRADIENT: 8})
    gradients = one["DP gradients (ZeRO-1)"]
    assert gradients.before.bytes_sent == 2 * 3 / 4 * 9000
    assert gradients.after.bytes_sent == pytest.approx(3 / 4 * 4500 * 132 / 128)
    two = parts(Layout(dp=4, zero=2, framework="deepspeed", accumulation=5), widths={GRADIENT: 8})
    assert two["DP gradients (ZeRO-2)"].before.bytes_sent == 5 * gradients.before.bytes_sent
    assert two["DP parameters"].before == one["DP parameters"].before


@pytest.mark.parametrize(
    "layout", [Layout(zero=1), *(Layout(zero=stage, framework="deepspeed") for stage in (1, 2))]
)  # fmt: skip
def test_parameters_are_gathered_by_differences_where_every_rank_keeps_them(layout):
    """Count one gather a step for any number of micro-batches; DeepSpeed waits for it, Megatron computes meanwhile."""
    layout = replace(layout, dp=4, accumulation=5)
    part = parts(layout, replace(BOX, flops=1.0), {PARAMETERS: 4})["DP parameters"]
    assert part.bits == 4 and part.after.bytes_sent == pytest.approx(3 / 4 * 4500 * 68 / 128)
    assert all(t.differences for t in traffic(MODEL, BOX, layout) if t.kind == "DP parameters")
    assert (part.after.hidden > 0) is (layout.framework == "megatron")


def test_zero_3():
    """Count two gathers of the parameters and a scatter of the gradients in every micro-batch."""
    layout = Layout(dp=4, zero=3, framework="deepspeed", accumulation=2)
    found = parts(layout, widths={GRADIENT: 4})
    for kind in ("ZeRO-3 parameters, forward", "ZeRO-3 parameters, backward"):
        assert found[kind].before.bytes_sent == 2 * 3 / 4 * 9000 and found[kind].bits is None
        quantized = parts(layout, widths={PARAMETERS: 8})[kind]
        assert quantized.after.bytes_sent == pytest.approx(2 * 3 / 4 * 4500 * 132 / 128)
    assert not any(t.differences for t in traffic(MODEL, BOX, layout))
    assert found["ZeRO-3 gradients"].before.bytes_sent == 2 * 3 / 4 * 9000
    assert found["ZeRO-3 gradients"].after.bytes_sent == pytest.approx(2 * 3 / 4 * 4500 * 68 / 128)
    slow = replace(BOX, flops=1e6, intra=1e6)  # a layer: 18.56 ms forward; 1.69 ms to gather: hidden but the first
    gathered = parts(layout, slow)["ZeRO-3 parameters, forward"].before
    assert gathered.exposed == pytest.approx(2 * 3 / 4 * 2250 / 1e6)
    assert gathered.hidden == pytest.approx(2 * 3 * 3 / 4 * 2250 / 1e6)
    slower = replace(slow, intra=6e4)  # 28.125 ms to gather, of 37.12 of a layer's backward pass: the rest is left
    assert parts(layout, slower)["ZeRO-3 gradients"].before.hidden == pytest.approx(2 * 3 * (37.12 - 28.125) / 1e3)


def test_placement_is_tensor_parallel_first():
    assert group_of(1, 4, 8) == Group(4, 4) and group_of(1, 16, 8) == Group(16, 8)
    assert group_of(2, 8, 8) == Group(8, 4) and group_of(2, 8, 8).nodes == 2
    assert group_of(8, 4, 8) == Group(4, 1) and group_of(16, 4, 8) == Group(4, 1)
    assert parts(Layout(tp=4, dp=4))["DP gradients"].group.nodes == 4
    assert parts(Layout(tp=2, dp=4))["DP gradients"].group == Group(4, 2)


def test_small_calls_stay_in_full_precision():
    step = predict(MODEL, BOX, Layout(tp=2), {FORWARD: 8}, min_bytes=161)  # a call has 160 bytes
    assert all(part.bits is None for part in step.parts) and step.speedup == 1


# The playbook's ratios -----------------------------------------------------------------------------------------------


def test_ratios_are_those_of_the_step():
    """Check t_comm / t_compute of the model's own parts, where the playbook's block (16 h^2) is the model's."""
    h, tokens = 64, 100
    model = Model(8, h, 1, 1, 6 * h, 1, tokens)  # 4 h^2 + 12 h^2
    c = replace(BOX, flops=1e9, intra=1e6, inter=1e6)
    zero3 = parts(Layout(dp=4, zero=3, framework="deepspeed"), c, model=model)["ZeRO-3 parameters, forward"]
    block = 16 * h * h * 2 * 3 / 4 / 1e6 / (32 * tokens * h * h / 1e9)
    assert dp_ratio(2, tokens, 4, 1e9, 1e6) == pytest.approx(block)
    # The model's embedding is spread over its layers: h parameters more than 8 blocks.
    assert zero3.before.seconds == pytest.approx(
        8 * block * (32 * tokens * h * h / 1e9) * model.parameters / (8 * 16 * h * h)
    )
    assert tp_ratio(2, h, 4, 1e9, 1e6) == pytest.approx(
        (2 * tokens * h * 3 / (4 * 1e6)) / (2 * tokens * h * h / (4 * 1e9))
    )
    send = parts(Layout(pp=2), c, model=model)["PP send, activations"].before.seconds
    assert pp_ratio(2, h, 4, 1e9, 1e6) == pytest.approx(send / (32 * tokens * h * h * 4 / 1e9))


# Properties that must hold ------------------------------------------------------------------------------------------

speeds = st.floats(1e6, 1e12)
collectives = st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
clusters = st.builds(
    Cluster, st.just("any"), flops=st.floats(1e9, 1e15), codec=speeds, ranks_per_node=st.integers(1, 8), intra=speeds,
    inter=speeds, latency=st.floats(0, 1e-4), far=st.floats(0, 1e-4), start=st.floats(0, 1e-3),
    transport=speeds | st.just(math.inf), backend=st.sampled_from(["nccl", "gloo"]),
)  # fmt: skip
calls = st.builds(
    Traffic, st.just("any"), st.none(), collectives, st.integers(1, 1 << 30), st.sampled_from([2, 4]),
    st.just(1), st.builds(Group, st.integers(2, 2048), st.integers(1, 8)), st.floats(0, 1),
)  # fmt: skip
codecs = st.none() | st.builds(Format, st.integers(2, 8), st.just(128))
# A ratio of floats may be off by a rounding.
NEARLY = 1 + 1e-9


@settings(max_examples=200, deadline=None)
@given(calls, clusters, codecs, st.sampled_from(["intra", "inter", "codec", "transport"]), st.floats(1, 100))
def test_a_faster_machine_is_never_slower(t, c, codec, what, factor):
    faster = replace(c, **{what: factor * getattr(c, what)})
    if t.hide == 0 or c.backend == "nccl":
        assert cost(t, faster, codec).exposed <= cost(t, c, codec).exposed * NEARLY
    t = replace(t, hide=0.0)
    assert cost(t, faster, codec).seconds <= cost(t, c, codec).seconds * NEARLY


@settings(max_examples=200, deadline=None)
@given(calls, clusters, codecs)
def test_hidden_and_exposed_make_the_call(t, c, codec):
    found = cost(t, c, codec)
    start = 0.0 if codec is None else c.start
    assert found.seconds == pytest.approx(start + max(found.link, found.busy))
    assert found.hidden >= 0 and found.exposed >= min(found.link, found.busy) - 1e-9 * found.seconds
    assert found.hidden <= t.hide * NEARLY


@settings(max_examples=100, deadline=None)
@given(calls, clusters, codecs, st.integers(2, 50))
def test_bytes_scale_with_the_tensor(t, c, codec, factor):
    larger = replace(t, numel=factor * t.numel)
    c = replace(c, latency=0, far=0, start=0)
    a, b = cost(t, c, codec), cost(larger, c, codec)
    if a.way == b.way:
        assert b.bytes_sent == pytest.approx(factor * a.bytes_sent)
        assert b.link == pytest.approx(factor * a.link)


@settings(max_examples=100, deadline=None)
@given(calls, clusters, st.integers(2, 7))
def test_fewer_bits_are_fewer_bytes_and_no_slower(t, c, bits):
    fewer, more = (cost(replace(t, hide=0.0), c, Format(b, 128)) for b in (bits, bits + 1))
    if fewer.way == more.way:
        assert fewer.bytes_sent < more.bytes_sent
    assert fewer.seconds <= more.seconds * NEARLY


layouts = st.builds(
    Layout, tp=st.sampled_from([1, 2, 4]), dp=st.sampled_from([1, 2, 8, 64]), pp=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(), zero=st.sampled_from([0, 1]), framework=st.sampled_from(["megatron", "deepspeed"]),
    micro_batch=st.integers(1, 4), accumulation=st.integers(1, 8), gradient_itemsize=st.sampled_from([2, 4]),
    overlap=st.booleans(), recompute=st.booleans(),
)  # fmt: skip
LARGE = Model(8, 1024, 16, 16, 4096, 50304, 1024)


@settings(max_examples=60, deadline=None)
@given(clusters, layouts, st.sampled_from([8, 4, 2]))
def test_advice_never_makes_a_step_slower(c, layout, bits):
    widths = advise(LARGE, c, layout, bits)
    step = predict(LARGE, c, layout, widths)
    assert set(widths) <= set(quantizable(LARGE, c, layout))
    assert step.before == pytest.approx(predict(LARGE, c, layout, {}).after)
    assert step.after <= step.before * NEARLY
    if FORWARD in quantizable(LARGE, c, layout) and FORWARD not in widths:
        assert set(widths) <= {GRADIENT, PARAMETERS, PIPELINE, PIPELINE_BACKWARD}
    if layout.framework == "deepspeed" and layout.dp > 1 and GRADIENT not in widths:
        assert not widths


def test_settings_that_pay_are_separated_from_the_others():
    """Check that forward reductions pay; backward ones are hidden anyway and would cost their kernels."""
    c, layout = replace(BOX, flops=1e13, codec=1e11, intra=2e10), Layout(tp=4)
    assert advise(LARGE, c, layout, 8) == {FORWARD: 8}
    both = predict(LARGE, c, layout, {FORWARD: 8, BACKWARD: 8})
    assert both.speedup < 1 < predict(LARGE, c, layout, {FORWARD: 8}).speedup


def test_without_the_forward_pass_nothing_of_tensor_parallelism_is_advised():
    """Use a codec with which gathers alone would pay: the forward pass has no switch of its own."""
    c = replace(BOX, flops=1e15, codec=2.7e9)
    layout = Layout(tp=4, sequence_parallel=True)
    gathers = dict.fromkeys((BACKWARD, GATHER), 8)
    assert predict(LARGE, c, layout, gathers).speedup > 1.01
    assert advise(LARGE, c, layout, 8) == {}


def test_fsdp_quantizes_parameters_too():
    layout = Layout(dp=4, zero=3, framework="torch")
    assert quantizable(LARGE, BOX, layout) == (GRADIENT, FSDP_PARAMETERS)
    assert widths_at(layout, (GRADIENT, FSDP_PARAMETERS), 4) == {GRADIENT: 4, FSDP_PARAMETERS: 4}
    gathered = parts(layout, widths={FSDP_PARAMETERS: 8})["ZeRO-3 parameters, forward"]
    assert gathered.after.bytes_sent == pytest.approx(3 / 4 * 4500 * 132 / 128)
    assert quantizable(LARGE, BOX, replace(layout, zero=0)) == (GRADIENT,)


def test_traffic_that_each_framework_can_quantize():
    """Check that parameters need a gather (not stage 0, not one rank), and check the requirements of gradients."""
    ulysses = Layout(dp=2, cp=2, framework="deepspeed")
    assert quantizable(LARGE, BOX, ulysses) == (GRADIENT, ATTENTION, BACKWARD)
    assert quantizable(LARGE, BOX, replace(ulysses, framework="megatron", cp_comm_type="p2p")) == (GRADIENT,)
    experts = replace(LARGE, experts=4)
    assert quantizable(experts, BOX, Layout(dp=2, ep=2, framework="deepspeed")) == (GRADIENT, EXPERT, BACKWARD)
    deepspeed = Layout(tp=2, dp=2, framework="deepspeed")
    assert quantizable(LARGE, BOX, deepspeed) == (GRADIENT,)
    for stage in (1, 2, 3):
        assert quantizable(LARGE, BOX, replace(deepspeed, zero=stage)) == (GRADIENT, PARAMETERS)
    assert quantizable(LARGE, BOX, Layout(tp=2, dp=2, zero=1)) == (FORWARD, BACKWARD, GRADIENT, PARAMETERS)
    assert quantizable(LARGE, BOX, Layout(tp=2, dp=2)) == (FORWARD, BACKWARD, GRADIENT)
    assert quantizable(LARGE, BOX, Layout()) == ()


def test_parameters_of_stage_3_are_advised_at_8_bits_alone():
    slow = replace(BOX, flops=1e15, intra=1e6)
    three = Layout(dp=4, zero=3, framework="deepspeed")
    for bits in (8, 4, 2):
        assert advise(LARGE, slow, three, bits) == {GRADIENT: bits, PARAMETERS: 8}
        assert advise(LARGE, slow, replace(three, zero=2), bits) == {GRADIENT: bits, PARAMETERS: bits}


def test_parameters_of_deepspeed_are_never_advised_without_the_gradients():
    """Use gradients that are hidden anyway and would cost more than the parameters save: they have no switch."""
    c = replace(BOX, flops=1.2e12, codec=12.6e9)
    layout = Layout(dp=4, zero=1, framework="deepspeed", bucket=1_000_000)
    assert predict(LARGE, c, layout, {PARAMETERS: 4}).speedup > 1.01
    assert predict(LARGE, c, layout, {GRADIENT: 4, PARAMETERS: 4}).speedup < 1
    assert advise(LARGE, c, layout, 4) == {}


@settings(max_examples=60, deadline=None)
@given(clusters, layouts)
def test_free_links_leave_arithmetic_and_bubble(c, layout):
    free = replace(c, intra=math.inf, inter=math.inf, latency=0.0, far=0.0, transport=math.inf)
    step = predict(LARGE, free, layout, {})
    tokens = layout.micro_batch * LARGE.sequence
    compute = layout.accumulation * (4 if layout.recompute else 3) * LARGE.forward_flops(tokens)
    assert step.compute == pytest.approx(compute / (layout.tp * layout.pp * free.flops))
    assert step.before == pytest.approx(step.compute * (1 + (layout.pp - 1) / layout.accumulation))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"tp": 3}, "--tp 3 does not divide the 16 attention heads"),
        ({"pp": 3}, "--pp 3 does not divide the 8 layers"),
        ({"zero": 2, "pp": 2, "framework": "deepspeed"}, "--zero 2 and --pp 2 exclude each other"),
        ({"zero": 3}, "--zero 3 is DeepSpeed's"),
        ({"cp": 3}, "--cp 3 does not divide the sequence of 1024"),
        ({"cp": 32}, "--cp 32 does not divide the 16 heads of keys and values"),
        ({"ep": 2}, "--ep 2 does not divide the 0 experts of a layer"),
        ({"framework": "torch", "cp": 2}, "without --tp, --pp, --cp and --ep"),
    ],
)
def test_layouts_that_cannot_be(change, said):
    with pytest.raises(ValueError, match=said):
        check(LARGE, replace(Layout(), **change))
    with pytest.raises(ValueError, match="does not divide the sequence of 1023"):
        check(replace(LARGE, sequence=1023), Layout(tp=2, sequence_parallel=True))
    experts = replace(LARGE, experts=8, experts_per_token=2)
    check(experts, Layout(dp=4, ep=4))
    for said, layout in (
        ("--ep 4 does not divide --cp 1 x --dp 2", Layout(dp=2, ep=4)),
        ("--tp 2 need --sequence-parallel", Layout(tp=2, dp=2, ep=2)),
        ("--zero 3 and --ep 2 exclude each other", Layout(dp=2, ep=2, zero=3, framework="deepspeed")),
    ):
        with pytest.raises(ValueError, match=said):
            check(experts, layout)
    with pytest.raises(ValueError, match="experts_per_token 9 is more than the 8"):
        check(replace(experts, experts_per_token=9), Layout())
    with pytest.raises(ValueError, match="not a multiple of the 16 attention heads"):
        check(replace(LARGE, hidden=1000), Layout())


def test_every_traffic_has_a_setting_that_exists():
    from flash_allreduce_plugin.config import FlashConfig

    for layout in (
        Layout(tp=2, dp=2, sequence_parallel=True),
        Layout(tp=2, dp=2, zero=1),
        *(Layout(dp=2, zero=stage, framework="deepspeed") for stage in (1, 2, 3)),
    ):
        for t in traffic(LARGE, BOX, layout):
            assert t.field is None or t.field in FlashConfig.model_fields
