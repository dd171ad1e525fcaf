"""Sizes of a payload.

The byte layout itself is drawn in ``docs/trust/wire_format.md`` and written down in ``csrc/wire_format.h``; this
leaf repeats only its sizes, so that a plan can be made without the compiled library. ``tests/codec/test_format.py``
holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Changes whenever the bytes of a payload change; compared across the ranks of a group.
WIRE_VERSION = 5

MIN_BITS, MAX_BITS = 2, 8
GROUP_SIZES = (32, 64, 128, 256, 512, 1024)
#: Of the codebook: its groups have eight parts of 16 elements or more.
MIN_CODEBOOK_GROUP_SIZE = 128


@dataclass(frozen=True, slots=True)
class Format:
    """How the elements of one half of a collective travel. csrc/codec_math.h has the arithmetic of each option.

    Args:
        bits: width of a code, 2 to 8.
        group_size: consecutive elements that share a scale (and a zero point), a power of two, 32 to 1024.
        symmetric: a scale alone, codes centred on zero; otherwise a scale and a zero point.
        spikes: a group's least and greatest element travel beside the codes, as bf16. With codebook: its two elements
            of greatest magnitude, as short floats; the codes carry what these have rounded off.
        hadamard: each group is rotated before it is quantized, and back after the sum.
        mse: of several ranges, the one with the least squared error; otherwise the group's whole range.
        stochastic: codes are rounded at random, without a bias; otherwise to the nearest.
        compact: scale and zero point share two bytes, the zero point one of 32 multiples of the scale.
        codebook: a scale for every eighth of a group, and up to 6 bits levels that lie closer near zero.

    Attributes:
        options: those above as the compiled operators take them (csrc/wire_format.h).
        metadata_bytes: of a record before its planes: scale, zero point (2 each, or 2 in all), spikes and places;
            codebook: the scale and the eight of the parts, spikes of 2 bytes each.
        record_bytes: of one group on the wire: metadata, then the planes of its codes.
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
    # Asked for with every launch, so that they are worked out once.
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
        """Bits an element costs on the wire, metadata included, in a group that is full."""
        return 8 * self.record_bytes / self.group_size

    def groups(self, numel: int) -> int:
        """Number of groups, the ragged last one included, of ``numel`` elements."""
        return -(-numel // self.group_size)

    def payload_bytes(self, numel: int) -> int:
        """Length in bytes of the payload of ``numel`` elements."""
        return self.groups(numel) * self.record_bytes


def residual_format(group_size: int) -> Format:
    """Of what error feedback keeps in 8 bits, in the groups of the payload."""
    return Format(8, group_size, symmetric=True)


@dataclass(frozen=True, slots=True)
class Draw:
    """Which random numbers round the groups of a call: the same for the same key and group, on every device.

    Args:
        key: of the call, 64 bits, signed; see rows.draw_key.
        first_group: the number, in the call, of the first group that is encoded.
        groups_a_row: by how much the number grows from one row to the next.
    """

    key: int = 0
    first_group: int = 0
    groups_a_row: int = 0


NO_DRAW = Draw()
