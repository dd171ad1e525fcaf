"""Sizes of a payload.

The byte layout itself is drawn in ``docs/wire_format.md`` and written down in ``csrc/wire_format.h``; this
leaf repeats only its sizes, so that a plan can be made without the compiled library. ``tests/test_wire.py``
holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Changes whenever the bytes of a payload change; compared across the ranks of a group.
WIRE_VERSION = 1

MIN_BITS, MAX_BITS = 2, 8
GROUP_SIZES = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Codec:
    """How the elements of one half of a collective travel.

    Args:
        bits: width of a code, 2 to 8.
        group_size: consecutive elements that share a scale (and a zero point), a power of two, 32 to 1024.
        symmetric: a scale alone, codes centred on zero; otherwise a scale and a zero point.
    """

    bits: int
    group_size: int
    symmetric: bool = False

    @property
    def metadata_bytes(self) -> int:
        """Bytes of scale and zero point in one record: 4 asymmetric, 2 symmetric (bfloat16 each)."""
        return 2 if self.symmetric else 4

    @property
    def record_bytes(self) -> int:
        """Bytes of one group on the wire: metadata, then the planes of its codes."""
        return self.metadata_bytes + self.group_size * self.bits // 8

    @property
    def bits_per_element(self) -> float:
        """Bits an element costs on the wire, metadata included, in a group that is full."""
        return 8 * self.record_bytes / self.group_size

    def groups(self, numel: int) -> int:
        """Number of groups, the ragged last one included, of ``numel`` elements."""
        return -(-numel // self.group_size)

    def payload_bytes(self, numel: int) -> int:
        """Length in bytes of the payload of ``numel`` elements."""
        return self.groups(numel) * self.record_bytes
