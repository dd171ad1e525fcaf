"""The state of a process group: its name, its nodes, and its lifetime."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.policy.topology import Nodes
from flash_allreduce_plugin.runtime import groups
from tests.collectives.test_work import helpers
from tests.distributed import Ranks

GetRanks = Callable[[int], Ranks]

CONFIG = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096)


def states_left_behind() -> tuple[int, int]:
    gc.collect()
    before, threads = len(groups._states), helpers()
    for _ in range(3):
        group = dist.new_group()
        fap.all_reduce(torch.ones(20_000), group=group, config=CONFIG, async_op=True).wait()
        dist.destroy_process_group(group)
        del group
    gc.collect()
    deadline = time.monotonic() + 10
    while helpers() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(groups._states) - before, helpers() - threads


def test_the_state_of_a_group_ends_with_it(ranks: GetRanks) -> None:
    assert ranks(2).run(states_left_behind) == [(0, 0), (0, 0)]


def names() -> list[str]:
    """Return names of two groups of the same ranks, and of one of fewer; ranks use them in another order."""
    first, second, fewer = dist.new_group(), dist.new_group(), dist.new_group([0])
    made = [second, first, *([fewer] if dist.get_rank() == 0 else [])]
    found = [groups.state_of(group).name for group in made]
    assert [groups.state_of(group).name for group in made] == found
    dist.barrier()  # a rank may still be connecting to a peer that is through
    for group in made:
        dist.destroy_process_group(group)
    return found


def test_a_group_has_a_name_by_its_ranks_and_the_order_of_use(ranks: GetRanks) -> None:
    zero, one = ranks(2).run(names)
    assert zero[:2] == one and len(set(zero)) == 3
    assert " of 2 ranks " in zero[0] and " of 1 ranks " in zero[2]
    assert int(zero[1].rpartition(" ")[2]) == int(zero[0].rpartition(" ")[2]) + 1


def nodes(setting: object) -> Nodes | None:
    group = dist.group.WORLD
    assert group is not None
    config = fap.FlashConfig.from_dict({"hierarchical": setting})
    return groups.nodes_of(Label("all_reduce", "test", group), config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("off", None),
        ("auto", ((0, 1, 2),)),  # one host
        ({"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 2}, ((0, 1), (2,))),
    ],
)
def test_nodes_are_as_the_configuration_has_them(ranks: GetRanks, setting: object, expected: Nodes | None) -> None:
    assert ranks(3).run(nodes, setting) == [expected] * 3


def test_a_mismatch_names_the_fields_and_the_ranks() -> None:
    error = groups.mismatch([b'{"bits": 4, "seed": 0}', b'{"bits": 8, "seed": 0}', b'{"bits": 4, "seed": 0}\0'])
    assert "bits is 4 on ranks 0, 2; 8 on rank 1" in str(error) and "seed" not in str(error)
    assert 'bits is 4 on rank 0; "unknown" on rank 1' in str(groups.mismatch([b'{"bits": 4}', b"not JSON"]))
