"""How a call is cut for the wire: chunks in flight, and addresses that 16 divides.

NCCL moves 16 bytes at a time only where every pointer is a multiple of 16, and single bytes otherwise (reduceCopy in
NCCL's src/device/common_kernel.h). So every chunk, shard and message begins at such a multiple of its buffer:

    all_reduce                  a shard of a chunk is `whole_groups` groups, or a multiple: the last chunk is filled up.
                                Not so where that could be 3 % of the call: it sends a few KiB to each rank then
    parts of different ranks    each part's bytes are filled up to the next multiple (`aligned`)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flash_allreduce_plugin.codec.format import Format

ALIGNMENT = 16
# Where the backend queues (NCCL), launching a chunk costs the host tens of microseconds, and moving 8 MiB over NVLink
# about as much: larger chunks, and few of them.
_QUEUED_BYTES, _QUEUED_CHUNKS = 8 << 20, 8
_SLACK = 1 << 16  # that whole groups do not make one chunk more


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def whole_groups(*formats: Format) -> int:
    """The least number of groups whose records are a multiple of ALIGNMENT bytes in each of the formats."""
    return math.lcm(*(ALIGNMENT // math.gcd(ALIGNMENT, one.record_bytes) for one in formats))


def shard_multiple(groups: int, world_size: int, *formats: Format) -> int:
    """Of how many groups the shards of an all_reduce's chunks are multiples."""
    whole = whole_groups(*formats)
    return whole if groups >= 32 * world_size * whole else 1


def queued_chunk_bytes(configured: int, payload_bytes: int) -> int:
    """chunk_bytes where the backend queues: eight chunks at most, none below 8 MiB or what is configured."""
    return max(configured, _QUEUED_BYTES, payload_bytes // _QUEUED_CHUNKS + _SLACK)


@dataclass(frozen=True, slots=True)
class Chunks:
    """`groups` groups cut into `count` chunks of `size`, the last one smaller; `window` of them in flight.

    multiple: of so many groups a chunk is a multiple, once the last one is filled up.
    """

    groups: int
    size: int
    count: int
    multiple: int

    @classmethod
    def cut(cls, groups: int, chunk_groups: int, multiple: int) -> Chunks:
        """About chunk_groups groups a chunk, all alike, in multiples of `multiple`."""
        count = -(-groups // max(chunk_groups, 1))
        size = -(-groups // (count * multiple)) * multiple
        return cls(groups, size, -(-groups // size), multiple)

    @property
    def window(self) -> int:
        return self.count if self.count < 4 else self.count // 2

    def __getitem__(self, i: int) -> tuple[int, int]:
        """First group of chunk i, and the group after its last."""
        return i * self.size, min((i + 1) * self.size, self.groups)
