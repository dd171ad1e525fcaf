"""Two levels on real ranks, bit for bit against a simulation of the roundings, and the bytes that each rank sends.

encode every rank's tensor -> sum each node in rank order -> encode -> sum the nodes in order -> encode -> decode
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import reference, rows
from flash_allreduce_plugin.codec.format import Draw, Format
from flash_allreduce_plugin.collectives import messages, transport, two_level
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.policy import Plan, Site, make_plan, topology
from flash_allreduce_plugin.policy.topology import Nodes
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.telemetry import counters
from tests import simulation
from tests.codecs import gaussian, same_bits
from tests.distributed import Ranks
from tests.simulation import decoded, digest, encoded

GetRanks = Callable[[int], Ranks]
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
LENGTHS = [0, 1, 127, 128, 129, 997, 7919]
RANKS_PER_NODE = [(2, 1), (2, 2), (3, 2), (4, 2), (4, 3), (5, 2), (5, 3), (8, 3), (8, 4)]
HOSTS = {3: "bab", 4: "abbb", 5: "xyxyy", 8: "aabbaacc"}  # of every rank
CONFIGS: list[dict[str, Any]] = [
    {},
    {"gather_bits": 6, "group_size": 32},
    {"symmetric": True, "group_size": 256},
    {"hadamard": True},
    {"rounding": "stochastic", "hadamard": True, "group_size": 64},
    {"spike_reserving": True, "range": "mse", "group_size": 32},
]


def widths(ranks_per_node: int, intra_bits: int = 8, inter_bits: int = 4) -> dict[str, Any]:
    return {"hierarchical": {"intra_bits": intra_bits, "inter_bits": inter_bits, "ranks_per_node": ranks_per_node}}


@dataclass(frozen=True)
class Call(simulation.Call):
    """A call in two levels. hosts: a letter for every rank, for "auto"."""

    hosts: str = ""

    def run(self, x: Tensor) -> Tensor:
        if self.hosts:
            topology.host = lambda: self.hosts[dist.get_rank()]
            groups.state_of(dist.group.WORLD).hosts = None
        return super().run(x)

    def nodes(self, world_size: int) -> list[list[int]]:
        if self.hosts:
            return [[r for r in range(world_size) if self.hosts[r] == h] for h in dict.fromkeys(self.hosts)]
        count = self.config["hierarchical"]["ranks_per_node"]
        return [list(range(i, min(i + count, world_size))) for i in range(0, world_size, count)]

    def codecs(self) -> tuple[Format, Format, Format]:
        config = self.flash_config
        inside, between = (8, config.bits) if self.hosts else (config.hierarchical.intra_bits,
                                                               config.hierarchical.inter_bits)  # fmt: skip
        return (
            config.format(inside),
            config.format(config.reduce_bits or between),
            config.format(config.gather_bits or between),
        )

    def simulate(self, world_size: int) -> list[Tensor]:
        nodes, (inside, reduce, gather) = self.nodes(world_size), self.codecs()
        if len(nodes) == 1 or len(nodes) == world_size:
            bits = {"bits": inside.bits, "reduce_bits": None, "gather_bits": None} if len(nodes) == 1 else {
                "bits": reduce.bits}  # fmt: skip
            flat = simulation.Call(self.collective, self.numel, self.dtype, {**self.config, **bits}, self.op, self.kind)
            return flat.simulate(world_size)
        inputs = [self.input(rank, world_size) for rank in range(world_size)]
        factor = 1 / world_size if self.op == "AVG" else 1.0
        key = rows.draw_key(self.flash_config.seed, 0)
        if self.collective == "all_gather":
            draws = [Draw(rows.draw_key(key, 1), rank * gather.groups(self.numel)) for rank in range(world_size)]
            values = [decoded(encoded(x, gather, draw), x, gather) for x, draw in zip(inputs, draws, strict=True)]
            return [torch.cat(values)] * world_size
        if self.collective == "reduce_scatter":
            shards = [x.view(world_size, -1) for x in inputs]
            results = []
            for owner in range(world_size):
                output = torch.empty_like(shards[0][0])
                if output.numel():
                    sums = sums_of_nodes([s[owner] for s in shards], nodes, inside, reduce, key, owner)
                    reference.decode_sum(sums, output, reduce, factor)
                results.append(output)
            return results
        if self.numel == 0:
            return inputs
        total = torch.empty(gather.payload_bytes(self.numel), dtype=torch.uint8)
        sums = sums_of_nodes(inputs, nodes, inside, reduce, key)
        reference.decode_sum_encode(sums, total, reduce, gather, factor, Draw(rows.draw_key(key, 1)))
        return [decoded(total.view(1, -1), inputs[0], gather)] * world_size


def sums_of_nodes(
    inputs: list[Tensor], nodes: list[list[int]], inside: Format, reduce: Format, key: int, owner: int = 0
) -> Tensor:
    """Return the payloads [nodes, bytes] under reduce."""
    first = owner * inside.groups(inputs[0].numel())
    sums = torch.empty(len(nodes), reduce.payload_bytes(inputs[0].numel()), dtype=torch.uint8)
    for node, (row, ranks) in enumerate(zip(sums, nodes, strict=True)):
        payloads = [encoded(inputs[rank], inside, Draw(rows.draw_key(key, 0, rank), first)) for rank in ranks]
        draw = Draw(rows.draw_key(key, 2, node), first)
        reference.decode_sum_encode(torch.cat(payloads), row, inside, reduce, 1.0, draw)
    return sums


def results_of(calls: list[Call]) -> list[str]:
    host = topology.host
    try:
        return simulation.results_of(calls)
    finally:
        topology.host = host
        groups.state_of(dist.group.WORLD).hosts = None


def check(ranks: GetRanks, world_size: int, calls: list[Call]) -> None:
    expected = simulation.expected_of(calls, world_size)
    for rank, results in enumerate(ranks(world_size).run(results_of, calls)):
        for call, ours, theirs in zip(calls, results, expected[rank], strict=True):
            assert ours == theirs, f"rank {rank}: {call}"


def calls_of(config: dict[str, Any], hosts: str = "") -> list[Call]:
    calls = []
    for k, collective in enumerate(COLLECTIVES):
        for i, numel in enumerate(LENGTHS):
            dtype = ("float32", "bfloat16", "float16")[(i + k) % 3]
            op = "AVG" if i % 2 and collective != "all_gather" else "SUM"
            calls.append(Call(collective, numel, dtype, {**CONFIGS[(i + k) % 6], **config}, op, hosts=hosts))
    return calls


@pytest.mark.parametrize(("world_size", "ranks_per_node"), RANKS_PER_NODE)
def test_any_world_nodes_length_and_dtype(ranks: GetRanks, world_size: int, ranks_per_node: int) -> None:
    check(ranks, world_size, calls_of(widths(ranks_per_node)))


@pytest.mark.parametrize("world_size", HOSTS)
def test_auto_finds_the_nodes_wherever_their_ranks_are(ranks: GetRanks, world_size: int) -> None:
    check(ranks, world_size, calls_of({"hierarchical": "auto", "bits": 3}, HOSTS[world_size]))


def test_auto_on_one_host_is_flat_with_eight_bits(ranks: GetRanks) -> None:
    calls = [Call(c, 997, config={"hierarchical": "auto", "bits": 3, "gather_bits": 2}) for c in COLLECTIVES]
    flat = [simulation.Call(call.collective, 997, config={"bits": 8}) for call in calls]
    for ours, theirs in zip(ranks(2).run(results_of, calls), simulation.expected_of(flat, 2), strict=True):
        assert ours == theirs


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(3, 2), (4, 2), (5, 3)])
def test_many_slabs_asynchronous_or_not(ranks: GetRanks, world_size: int, ranks_per_node: int) -> None:
    options = {"rounding": "stochastic", "hadamard": True}
    check(
        ranks,
        world_size,
        [
            Call(collective, 70_001, dtype, {**widths(ranks_per_node, 6, 3), **options}, async_op=async_op)
            for collective in COLLECTIVES
            for dtype, async_op in (("float32", False), ("bfloat16", True))
        ],
    )


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, 2), (3, 2), (4, 2), (5, 3), (8, 3)])
def test_guarantee_8_zeros_of_all_ranks_are_zero_in_the_result(
    ranks: GetRanks, world_size: int, ranks_per_node: int
) -> None:
    """Check zeros through three roundings, each at a different width."""
    options: list[dict[str, Any]] = [
        *({}, {"compact": True}, {"symmetric": True}, {"range": "mse"}, {"compact": True, "range": "mse"}),
        *({"rounding": "stochastic"}, {"spike_reserving": True, "compact": True, "rounding": "stochastic"}),
    ]
    calls = []
    for i, (inter_bits, chosen) in enumerate((b, o) for b in range(2, 9) for o in options):
        config = {**widths(ranks_per_node, 10 - inter_bits, inter_bits), "gather_bits": 2 + i % 7, **chosen}
        dtype = ("float32", "bfloat16", "float16")[i % 3]
        calls += [Call(c, 1999, dtype, {"group_size": (32, 128, 512)[i % 3], **config}, kind="embedding")
                  for c in COLLECTIVES]  # fmt: skip
    assert ranks(world_size).run(simulation.lost_zeros, calls) == [[]] * world_size
    check(ranks, world_size, calls[::13])


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_guarantee_3_neither_the_chunk_size_nor_async_matters(ranks: GetRanks, collective: str) -> None:
    calls = [
        Call(collective, 30_011, "bfloat16", {**widths(3), **options, "chunk_bytes": chunk_bytes}, async_op=async_op)
        for options in ({}, {"rounding": "stochastic"})
        for chunk_bytes in (4096, 5000, 1 << 20)
        for async_op in (False, True)
    ]
    for results in ranks(5).run(results_of, calls):
        assert len(set(results[:6])) == len(set(results[6:])) == 1 and results[0] != results[6]


def through_all_to_all(calls: list[Call]) -> list[str]:
    """Exchange over torch.distributed's all_to_all, as on other backends; gloo's own takes equal sizes only."""
    by_messages, all_to_all = transport.by_messages, dist.all_to_all

    def stand_in(received: list[Tensor], sent: list[Tensor], group: Any, async_op: bool) -> Any:
        assert len(received) == len(sent) == dist.get_world_size() and async_op
        assert all(part.is_contiguous() for part in received + sent)
        return transport._exchange(received, sent, Label("all_to_all", "test", group))

    transport.by_messages, dist.all_to_all = lambda group, device: False, stand_in
    try:
        return results_of(calls)
    finally:
        transport.by_messages, dist.all_to_all = by_messages, all_to_all


def test_the_exchange_of_other_backends(ranks: GetRanks) -> None:
    calls = [Call(c, 5003, config=widths(3)) for c in COLLECTIVES]
    assert ranks(5).run(through_all_to_all, calls) == simulation.expected_of(calls, 5)


def part_of_longer_tensors() -> set[str]:
    """Reduce the same 2048 elements alone, and at a group's boundary in other tensors."""
    config = fap.FlashConfig(bits=5, min_bytes=0, chunk_bytes=4096, **widths(3, 6, 4))
    rank, digests = dist.get_rank(), set()
    for before, after in ((0, 0), (128, 0), (1280, 7777), (128 * 77, 3), (128 * 300, 20_000)):
        x = torch.cat([gaussian(before, seed=50 + rank), gaussian(2048, seed=rank), gaussian(after, seed=90) * 1e6])
        fap.all_reduce(x, config=config)
        digests.add(digest(x[before : before + 2048]))
    return digests


def test_guarantee_3_a_group_does_not_depend_on_the_rest_of_the_tensor(ranks: GetRanks) -> None:
    assert len(set.union(*ranks(5).run(part_of_longer_tensors))) == 1


simulation.VALUES["cancelling nodes"] = lambda noise, rank: simulation.VALUES["cancelling"](noise, rank // 2)


@pytest.mark.parametrize(("ranks_per_node", "kind"), [(4, "cancelling"), (2, "cancelling nodes")])
def test_guarantee_3_sums_are_taken_in_rank_order_and_then_in_node_order(
    ranks: GetRanks, ranks_per_node: int, kind: str
) -> None:
    """Use values with a float32 sum that depends on the order of a node's four ranks, or of the four nodes."""
    calls = [Call(c, 5003, config=widths(ranks_per_node, 8, 8), kind=kind) for c in COLLECTIVES[:2]]
    inputs = [calls[0].input(rank, 8) for rank in range(8)]
    inside, reduce, _ = calls[0].codecs()
    if ranks_per_node == 4:
        payloads = torch.cat([encoded(x, inside) for x in inputs[:4]])
    else:
        payloads = sums_of_nodes(inputs, calls[0].nodes(8), inside, reduce, 0)
    both_ways = [torch.empty(5003), torch.empty(5003)]
    reference.decode_sum(payloads, both_ways[0], reduce, 1.0)
    reference.decode_sum(payloads.flip(0), both_ways[1], reduce, 1.0)
    assert not torch.equal(*both_ways)
    check(ranks, 8, calls)


def values_of(call: Call) -> Tensor:
    return call.run(call.input(dist.get_rank(), dist.get_world_size()))


@pytest.mark.parametrize("kind", ["nan", "inf", "-inf"])
def test_guarantee_2_non_finite_values_take_their_group_only(ranks: GetRanks, kind: str) -> None:
    bad = torch.arange(4099) % 1000 == 5
    lost = torch.zeros(4224, dtype=torch.bool)
    lost[:4099] = bad
    lost = lost.view(-1, 128).any(1).repeat_interleave(128)[:4099]
    for dtype in ("float32", "float16"):
        call = Call("all_reduce", 4099, dtype, widths(2), kind=kind)
        clean = replace(call, kind="gaussian").simulate(3)[0]
        for result in ranks(3).run(values_of, call):
            assert result[lost].isnan().all()
            assert same_bits(result[~lost], clean[~lost])
    check(ranks, 3, [replace(call, collective=c) for c in COLLECTIVES])


def step(x: Tensor, bits: int) -> Tensor:
    """Return the largest step that each element's group may have (docs/trust/numerics.md, guarantee 6)."""
    padded = torch.nn.functional.pad(x.double().view(1, -1), (0, -x.numel() % 128), "replicate").view(-1, 128)
    low, high = padded.amin(1), padded.amax(1)
    steps = (high - low + low.abs() * 2.0**-7) / (2**bits - 1) * (1 + 2.0**-7)
    return steps.repeat_interleave(128)[: x.numel()]


@pytest.mark.parametrize(("intra_bits", "inter_bits"), [(8, 4), (6, 6), (4, 2)])
def test_guarantee_6_the_error_of_three_roundings(intra_bits: int, inter_bits: int) -> None:
    """Check the simulation, which the ranks equal: half a step a rank, a node and once for the sum."""
    call = Call("all_reduce", 5003, config=widths(3, intra_bits, inter_bits))
    inputs = [call.input(rank, 5).double() for rank in range(5)]
    sums = [sum(inputs[:3]), sum(inputs[3:])]
    allowed, both = torch.zeros(5003, dtype=torch.float64), torch.zeros(5003, dtype=torch.float64)
    for part in inputs:
        allowed += step(part, intra_bits) / 2
    # A sum that was rounded before spreads further by the error on both sides.
    for part in sums:
        assert isinstance(part, Tensor)
        both += (step(part, inter_bits) + 2.1 * allowed / (2**inter_bits - 1)) / 2
    exact = sum(inputs)
    assert isinstance(exact, Tensor)
    last = (step(exact, inter_bits) + 2.1 * (allowed + both) / (2**inter_bits - 1)) / 2
    error = (call.simulate(5)[0].double() - exact).abs()
    assert (error <= allowed + both + last + 1e-5).all()
    assert error.max() > (both + last).max() / 4  # the bound says something


@pytest.mark.parametrize("sizes", [(0, 0, 7), (5000, 1, 64), (0, 40_000, 31, 1024, 2), (4100, 0, 129, 3000, 40)])
def test_parts_of_any_sizes_have_the_bits_of_even_ones(ranks: GetRanks, sizes: tuple[int, ...]) -> None:
    ranks(len(sizes)).run(uneven_parts, sizes)


def uneven_parts(sizes: tuple[int, ...]) -> None:
    config = fap.FlashConfig(group_size=32, min_bytes=0, chunk_bytes=4096, **widths(2, 6, 4))
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [gaussian(size, seed=10 * rank + i) for i, size in enumerate(sizes)]
    output = torch.full((sizes[rank],), 7.0)
    fap.reduce_scatter(output, parts, dist.ReduceOp.AVG, config=config)
    for owner, size in enumerate(sizes):
        shard = torch.empty(size)
        fap.reduce_scatter(shard, parts[owner].repeat(world), dist.ReduceOp.AVG, config=config)
        assert owner != rank or torch.equal(output, shard)


def what_is_kept() -> tuple[bool, int]:
    """Return True if ten more calls use the same buffers, and how often the ranks exchanged their hosts."""
    config = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096, hierarchical="auto")
    gather, told, host = messages.gather, 0, topology.host

    def counting(mine: bytes, *rest: Any) -> list[bytes]:
        nonlocal told
        told += rest[-1] == "gathering the names of the hosts"
        return gather(mine, *rest)

    group = dist.new_group()
    pool = groups.state_of(group).pool(torch.device("cpu"))
    messages.gather, topology.host = counting, lambda: "aab"[dist.get_rank()]
    try:
        fap.all_reduce(gaussian(60_000), group=group, config=config)
        before = {id(buffer) for buffer in pool._free}
        for _ in range(10):
            fap.all_reduce(gaussian(60_000), group=group, config=config)
        return {id(buffer) for buffer in pool._free} == before, told
    finally:
        messages.gather, topology.host = gather, host
        dist.destroy_process_group(group)


def test_buffers_and_hosts_are_kept_with_the_group(ranks: GetRanks) -> None:
    assert ranks(3).run(what_is_kept) == [(True, 1)] * 3


def measured_bytes(calls: list[Call]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return (bytes, bytes between nodes) of each call: from stats(), and as handed to the group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    results_of(calls)  # the configurations are agreed on
    sent = [0] * world
    exchange = transport.exchange

    def counting(received: list[Tensor], parts: list[Tensor], *rest: Any) -> Any:
        for peer, part in enumerate(parts):
            assert part.dtype == torch.uint8
            sent[peer] += part.numel()
        return exchange(received, parts, *rest)

    transport.exchange = counting
    counted = []
    try:
        for call in calls:
            counters.reset_stats()
            sent[:] = [0] * world
            results_of([call])
            node = next(ranks for ranks in call.nodes(world) if rank in ranks)
            ours = sum(n for peer, n in enumerate(sent) if peer != rank)
            stats = counters.stats()
            counted.append(
                (
                    (stats["bytes_sent"], stats["bytes_between_nodes"]),
                    (ours, sum(n for peer, n in enumerate(sent) if peer not in node)),
                )
            )
    finally:
        transport.exchange = exchange
        counters.reset_stats()
    return counted


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(3, 2), (4, 2), (5, 3)])
def test_counted_bytes_equal_sent_bytes(ranks: GetRanks, world_size: int, ranks_per_node: int) -> None:
    calls = [
        Call(collective, numel, "bfloat16", {**widths(ranks_per_node), "gather_bits": 6})
        for collective in COLLECTIVES
        for numel in (1, 129, 5003, 60_013)
    ]
    for rank in ranks(world_size).run(measured_bytes, calls):
        for call, (counted, sent) in zip(calls, rank, strict=True):
            assert counted == sent, call


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 1, 2), (3, 4)), ((0, 3), (1,), (2, 4, 5))])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_between_nodes_each_node_sends_one_payload(collective: str, nodes: Nodes) -> None:
    """Check 2 (N-1)/N of the tensor's payload for any number of ranks in the node; flat, each rank sends as much."""
    plan = Plan(Format(4, 128), Format(4, 128), 1 << 20, Format(8, 128), nodes)
    world, numel = sum(map(len, nodes)), 6 * 10_000_000
    sizes = numel if collective == "all_reduce" else [numel // world] * world
    shares = [len(ranks) / world for ranks in nodes]
    for node, ranks in enumerate(nodes):
        between = sum(two_level.sent_bytes(collective, sizes, plan, rank)[1] for rank in ranks)
        halves = {
            "all_reduce": 2 * (len(nodes) - 1) / len(nodes),
            "reduce_scatter": 1 - shares[node],
            "all_gather": shares[node] * (len(nodes) - 1),
        }
        assert 0.99 < between / (halves[collective] * plan.reduce.payload_bytes(numel)) < 1.01


@pytest.mark.parametrize(
    ("config", "nodes", "bits"),
    [
        ({"hierarchical": "off", "bits": 3}, ((0, 1), (2, 3)), (None, 3, 3)),
        ({"hierarchical": "auto", "bits": 3}, ((0, 1), (2, 3)), (8, 3, 3)),
        ({"hierarchical": "auto", "bits": 3, "gather_bits": 5}, ((0, 1), (2, 3)), (8, 3, 5)),
        ({"hierarchical": "auto", "bits": 3, "gather_bits": 5}, ((0, 1, 2, 3),), (None, 8, 8)),
        ({"hierarchical": "auto", "bits": 3}, ((0,), (1,), (2,), (3,)), (None, 3, 3)),
        ({"bits": 3, **widths(2, 6, 4)}, ((0, 1), (2, 3)), (6, 4, 4)),
        ({"bits": 3, **widths(4, 6, 4)}, ((0, 1, 2, 3),), (None, 6, 6)),
        ({"bits": 3, **widths(1, 6, 4)}, ((0,), (1,), (2,), (3,)), (None, 4, 4)),
        ({"bits": 3, **widths(2, 6, 4)}, None, (None, 3, 3)),  # a caller that has no two levels
    ],
)
def test_widths(config: dict[str, Any], nodes: Nodes | None, bits: tuple[int | None, int, int]) -> None:
    plan = make_plan(
        "all_reduce", numel=1 << 20, dtype=torch.float32, world_size=4, op="sum", site=Site("test"), nodes=nodes,
        config=fap.FlashConfig(hadamard=True, **config),
    )  # fmt: skip
    assert isinstance(plan, Plan)
    assert (plan.inside and plan.inside.bits, plan.reduce.bits, plan.gather.bits) == bits
    assert (plan.nodes is not None) == (plan.inside is not None)
    assert all(c is None or c.hadamard for c in (plan.inside, plan.reduce, plan.gather))


def test_error_feedback_excludes_it() -> None:
    with pytest.raises(fap.ConfigError, match="hierarchical='auto' excludes error_feedback=True"):
        fap.FlashConfig(hierarchical="auto", error_feedback=True)
