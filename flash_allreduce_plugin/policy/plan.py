"""The plan of a call: quantized or not, and how. A pure function of the call and the configuration.

make_plan returns a Plan, or the reason for full precision. The checks run in a fixed order, and the first that applies
gives the reason: a counter's key means the same on every rank.

1. enabled is false, or lists other sites   4. the operator of a sum is not sum, avg or premul_sum
2. the group has one rank                   5. the message is empty
3. the dtype is not fp32, bf16 or fp16      6. the message is below min_bytes
7. the role is in full precision: a field of its width is "full", or the switch of embeddings or layer norms is off
8. the module's name is not in include, or is in exclude
9. the step is one of the first warmup_steps

An all_to_all skips 5 and 6: its ranks have different numbers of elements and must decide the same. It decides about
each run (collectives/all_to_all.py). The two ends of a send use no other facts, so they decide the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from flash_allreduce_plugin.codec.format import MAX_BITS, Format
from flash_allreduce_plugin.policy.roles import (
    DISABLED,
    EMPTY,
    EXCLUDED,
    NOT_ENABLED,
    NOT_INCLUDED,
    ONE_RANK,
    SMALL,
    WARM_UP,
    Role,
    Site,
    is_full,
)
from flash_allreduce_plugin.policy.topology import Nodes

if TYPE_CHECKING:
    from flash_allreduce_plugin.config import FlashConfig

WithAll = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
WithOneRoot = Literal["broadcast", "reduce", "gather", "scatter"]
BetweenTwo = Literal["send", "recv"]
Collective = WithAll | WithOneRoot | BetweenTwo
SUMS = ("all_reduce", "reduce_scatter", "reduce")
_TWO_LEVELS = (*SUMS, "all_gather")  # a node has nothing to add up or to share in the others

_RANKS = 128  # a chunk of 1 MiB is 8 KiB a rank
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run one quantized call.

    reduce: codec of the half before the sum (all_reduce, reduce_scatter, reduce).
    gather: codec of the half after the sum (all_reduce), and of collectives without a sum (all_gather, a send ...).
    chunk_bytes: payload bytes of one chunk in flight.
    inside: codec of the sum inside a node, if the call is hierarchical; reduce and gather are between nodes then.
    nodes: None: the call is flat, every rank exchanges data with every other rank.
    width: the width that target_sqnr_db may change; None: no target, or the configuration fixes all widths of the call.
    """

    reduce: Format
    gather: Format
    chunk_bytes: int
    inside: Format | None = None
    nodes: Nodes | None = None
    width: int | None = None

    def bits(self, collective: Collective) -> int:
        """Return the width of the collective's half; of two halves, the narrower width."""
        if collective == "all_reduce":
            return min(self.reduce.bits, self.gather.bits)
        return self.reduce.bits if collective in SUMS else self.gather.bits

    def narrowest(self, collective: Collective) -> int:
        """Return the least width of the collective, inside a node too."""
        bits = self.bits(collective)
        return bits if self.inside is None or collective not in SUMS else min(bits, self.inside.bits)

    @property
    def widest(self) -> Format:
        """The codec with the longest payload."""
        formats = (self.reduce, self.gather, *([] if self.inside is None else [self.inside]))
        return max(formats, key=lambda one: one.record_bytes)

    def at_least(self, bits: int) -> Plan:
        """Return the plan with every width below `bits` raised to `bits`."""
        inside = None if self.inside is None else _at_least(self.inside, bits)
        return replace(self, reduce=_at_least(self.reduce, bits), gather=_at_least(self.gather, bits), inside=inside)


@dataclass(frozen=True, slots=True)
class FullPrecision:
    """The answer "full precision". `reason` is short and stable, e.g. "message below min_bytes"."""

    reason: str


def make_plan(
    collective: Collective,
    *,
    numel: int,
    dtype: torch.dtype,
    world_size: int,
    op: str,
    site: Site,
    config: FlashConfig,
    step: int | None = None,
    nodes: Nodes | None = None,
    width: int | None = None,
) -> Plan | FullPrecision:
    """Plan one call, or return the reason for full precision.

    numel: of the whole tensor: input of reduce_scatter, scatter; output of all_gather, gather. all_to_all: not used.
    op: "sum", "avg" or another operator's name; used by collectives with a sum.
    step: number of the training step, from 0; None: no warm-up.
    nodes: of the group, if config.hierarchical is on. A group within one node is flat with the width inside, one with a
        rank a node flat with the width between nodes. Only sums and all_gather have two levels.
    width: replaces the role's width and inter_bits, not reduce_bits and gather_bits, which override that of their half.
    """
    if not config.enabled:
        return FullPrecision(DISABLED)
    if isinstance(config.enabled, tuple) and not any(fnmatchcase(site.name, one) for one in config.enabled):
        return FullPrecision(NOT_ENABLED)
    if world_size == 1:
        return FullPrecision(ONE_RANK)
    if dtype not in _DTYPES:
        return FullPrecision(f"dtype {str(dtype).removeprefix('torch.')}")
    if collective in SUMS and op not in ("sum", "avg", "premul_sum"):
        return FullPrecision(f"operator {op}")
    if collective != "all_to_all":
        if numel == 0:
            return FullPrecision(EMPTY)
        if numel * dtype.itemsize < config.min_bytes:
            return FullPrecision(SMALL)
    configured = bits_of(site.role, config)
    if isinstance(configured, FullPrecision):
        return configured
    bits = width or configured
    if site.module is not None:
        if config.include and not matches(site.module, config.include):
            return FullPrecision(NOT_INCLUDED)
        if matches(site.module, config.exclude):
            return FullPrecision(EXCLUDED)
    if step is not None and step < config.warmup_steps:
        return FullPrecision(WARM_UP)
    form = partial(_format, site.role, config)
    given = config.hierarchical
    if nodes is None or given == "off" or collective not in _TWO_LEVELS:
        inside, between, nodes = bits, bits, None
    elif given == "auto":
        inside, between = MAX_BITS, bits
    else:
        inside, between = given.intra_bits, width or given.inter_bits
    if nodes is not None and len(nodes) == 1:
        return Plan(form(inside), form(inside), _chunk_bytes(config, world_size))
    plan = Plan(
        reduce=form(config.reduce_bits or between),
        gather=form(config.gather_bits or between),
        chunk_bytes=_chunk_bytes(config, world_size),
        width=between if _adapts(collective, config) else None,
    )
    if nodes is None or len(nodes) == world_size:
        return plan
    return replace(plan, inside=form(inside), nodes=nodes)


def _format(role: Role, config: FlashConfig, bits: int) -> Format:
    """Return the configured format, except for two kinds of tensors ("Pretraining" in docs/decide/benchmarks.md).

    Tensors of backward_bits are rounded by backward_rounding. Stochastic rounding excludes the codebook and the
    searched range, which round to the nearest. Spikes stay, as bf16, rounded stochastically.

    Differences of parameters have no codebook, and no spikes with it: the codebook clips values far from zero. The
    elements of an Adam step are nearly equal, and a clipped part would be applied one step late.
    """
    form = config.format(bits)
    if role is Role.PARAMETER_DIFFERENCE:
        return replace(form, codebook=False, spikes=form.spikes and not form.codebook)
    if config.backward_rounding is not None and role.backward:
        stochastic = config.backward_rounding == "stochastic"
        nearest = not stochastic
        return replace(form, stochastic=stochastic, codebook=form.codebook and nearest, mse=form.mse and nearest)
    return form


def _chunk_bytes(config: FlashConfig, world_size: int) -> int:
    """Return chunk_bytes, larger in proportion for a large group: every chunk is cut among all ranks into messages."""
    return config.chunk_bytes * max(_RANKS, world_size) // _RANKS


def matches(module: str, patterns: Iterable[str]) -> bool:
    """Return True if one of the fnmatch patterns names the module or a module that contains it."""
    return any(fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*") for pattern in patterns)


def unmatched(config: FlashConfig, modules: Collection[str]) -> list[tuple[str, str]]:
    """Return each pattern of include and exclude that names none of the modules, as (field, pattern)."""
    patterns = [(field, pattern) for field in ("include", "exclude") for pattern in getattr(config, field)]
    return [(field, one) for field, one in patterns if not any(matches(name, (one,)) for name in modules)]


def _at_least(codec: Format, bits: int) -> Format:
    return replace(codec, bits=max(codec.bits, bits))


def widths_follow_errors(config: FlashConfig) -> bool:
    """Return True if measured errors may change the width of a call."""
    return config.target_sqnr_db is not None or config.min_sqnr_db is not None


def _adapts(collective: Collective, config: FlashConfig) -> bool:
    """Return True if there is a target, and a half of the collective without a fixed width."""
    if config.target_sqnr_db is None or collective in ("send", "recv"):  # the two ends of a send have no agreement
        return False
    if collective == "all_reduce":
        return config.reduce_bits is None or config.gather_bits is None
    return (config.reduce_bits if collective in SUMS else config.gather_bits) is None


def bits_of(role: Role, config: FlashConfig) -> int | FullPrecision:
    """Return the width of a role, or the reason for full precision."""
    if role.switch is not None and not getattr(config, role.switch[0]):
        return FullPrecision(role.switch[1])
    if role.backward and config.backward_bits == "full":
        return FullPrecision(is_full("backward_bits"))
    for name in role.widths:
        width: int | str | None = getattr(config, name)
        if isinstance(width, int):
            return width
        if width == "full":
            return FullPrecision(is_full(name))
    raise AssertionError(f"{role.widths[-1]} of FlashConfig is None")
