"""Sizes of a payload.

``docs/trust/wire_format.md`` draws the byte layout and ``csrc/wire_format.h`` defines it. This module repeats its
sizes, so that a plan needs no compiled library. ``tests/codec/test_format.py`` compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Version of a payload's bytes. The ranks of a group compare it.
WIRE_VERSION = 5

MIN_BITS, MAX_BITS = 2, 8
GROUP_SIZES = (32, 64, 128, 256, 512, 1024)
#: Least group size of the codebook: its groups have eight parts of 16 elements or more.
MIN_CODEBOOK_GROUP_SIZE = 128


@dataclass(frozen=True, slots=True)
class Format:
    """The format of the elements in one half of a collective. csrc/codec_math.h has the arithmetic of each option.

    Args:
        bits: width of a code, 2 to 8.
        group_size: consecutive elements that share a scale (and a zero point), a power of two, 32 to 1024.
        symmetric: a scale alone, codes centred on zero; otherwise a scale and a zero point.
        spikes: a group's least and greatest element are also sent as bf16. With codebook: its two elements of greatest
            magnitude, as short floats, and the codes have the rest of these elements.
        hadamard: each group is rotated before it is quantized, and back after the sum.
        mse: the range with the least squared error among several; otherwise the group's whole range.
        stochastic: codes are rounded stochastically, without a bias; otherwise to the nearest.
        compact: scale and zero point share two bytes, the zero point one of 32 multiples of the scale.
        codebook: a scale for every eighth of a group; up to 6 bits, levels that are closer near zero.

    Attributes:
        options: the options above, encoded for the compiled operators (csrc/wire_format.h).
        metadata_bytes: bytes of a record before its planes: scale, zero point (2 each, or 2 in all), spikes and places;
            codebook: the scale, the eight scales of the parts, and spikes of 2 bytes each.
        record_bytes: bytes of one group: metadata, then the planes of its codes.
    """

    bits: int
    group_size: int
    symmetric: bool = False
    spikes: bool = False
    hadamard: bool = False
    mse: bool = False
    stochastic: bool = False
    compact: bool = False
    codebook: bool = False
    # Every launch reads these, so they are computed once.
    options: int = field(init=False, repr=False, compare=False)
    metadata_bytes: int = field(init=False, repr=False, compare=False)
    record_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        flags = (self.symmetric, self.spikes, self.hadamard, self.mse, self.stochastic, self.compact, self.codebook)
        scales = 8 if self.codebook else 2 if self.symmetric or self.compact else 4
        spike = 2 if self.codebook else 2 + self.place_bytes
        metadata = scales + (2 * spike if self.spikes else 0)
        object.__setattr__(self, "options", sum(1 << i for i, flag in enumerate(flags) if flag))
        object.__setattr__(self, "metadata_bytes", metadata)
        object.__setattr__(self, "record_bytes", metadata + self.group_size * self.bits // 8)

    @property
    def place_bytes(self) -> int:
        """Bytes of an element's place in its group."""
        return 1 if self.group_size <= 256 else 2

    @property
    def spike_mantissa(self) -> int:
        """Bits of mantissa of a spike with codebook, whose 16 bits hold its place, sign and exponent too."""
        return 12 - self.group_size.bit_length()

    @property
    def bits_per_element(self) -> float:
        """Bits of an element on the wire, with metadata, in a full group."""
        return 8 * self.record_bytes / self.group_size

    def groups(self, numel: int) -> int:
        """Return the number of groups of ``numel`` elements, with the ragged last one."""
        return -(-numel // self.group_size)

    def payload_bytes(self, numel: int) -> int:
        """Return the length in bytes of the payload of ``numel`` elements."""
        return self.groups(numel) * self.record_bytes


def residual_format(group_size: int) -> Format:
    """Return the format of error feedback's residuals of 8 bits, in the groups of the payload."""
    return Format(8, group_size, symmetric=True)


@dataclass(frozen=True, slots=True)
class Draw:
    """The random numbers that round the groups of a call: equal for the same key and group, on every device.

    Args:
        key: of the call, 64 bits, signed; see rows.draw_key.
        first_group: the number in the call of the first encoded group.
        groups_a_row: the number of a row's first group minus that of the row before.
    """

    key: int = 0
    first_group: int = 0
    groups_a_row: int = 0


NO_DRAW = Draw()
