"""The cut of a call into chunks, and the alignment of their addresses to 16 bytes.

NCCL moves 16 bytes at a time only if every pointer is a multiple of 16, and single bytes otherwise (reduceCopy in
NCCL's src/device/common_kernel.h). So every chunk, shard and message starts at a multiple of 16 of its buffer:

    all_reduce                  a shard of a chunk is a multiple of `whole_groups` groups: the last chunk is padded.
                                Without padding where it could be 3 % of the call: a few KiB to each rank
    parts of different ranks    the bytes of each part are padded to the next multiple (`aligned`)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flash_allreduce_plugin.codec.format import Format

ALIGNMENT = 16
# With NCCL the launch of a chunk costs the host tens of microseconds, as much as 8 MiB over NVLink. So chunks are
# larger there, and few.
_QUEUED_BYTES, _QUEUED_CHUNKS = 8 << 20, 8
_SLACK = 1 << 16  # so that rounding up to whole groups does not add a chunk


def aligned(nbytes: int) -> int:
    """Return nbytes rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def whole_groups(*formats: Format) -> int:
    """Return the least number of groups with a multiple of ALIGNMENT bytes in each of the formats."""
    return math.lcm(*(ALIGNMENT // math.gcd(ALIGNMENT, one.record_bytes) for one in formats))


def shard_multiple(groups: int, world_size: int, *formats: Format) -> int:
    """Return the number of groups that divides every shard of an all_reduce's chunks."""
    whole = whole_groups(*formats)
    return whole if groups >= 32 * world_size * whole else 1


def queued_chunk_bytes(configured: int, payload_bytes: int) -> int:
    """Return chunk_bytes for a backend that queues: at most eight chunks, none below 8 MiB or the configured size."""
    return max(configured, _QUEUED_BYTES, payload_bytes // _QUEUED_CHUNKS + _SLACK)


@dataclass(frozen=True, slots=True)
class Chunks:
    """`groups` groups cut into `count` chunks of `size`, the last one smaller; `window` of them in flight.

    multiple: divides the groups of every chunk, after the last one is padded.
    """

    groups: int
    size: int
    count: int
    multiple: int

    @classmethod
    def cut(cls, groups: int, chunk_groups: int, multiple: int) -> Chunks:
        """Cut into chunks of equal size, a multiple of `multiple` near chunk_groups."""
        count = -(-groups // max(chunk_groups, 1))
        size = -(-groups // (count * multiple)) * multiple
        return cls(groups, size, -(-groups // size), multiple)

    @property
    def window(self) -> int:
        return self.count if self.count < 4 else self.count // 2

    def __getitem__(self, i: int) -> tuple[int, int]:
        """Return the first group of chunk i and the group after its last."""
        return i * self.size, min((i + 1) * self.size, self.groups)
