"""Which calls are quantized, and how: a pure function of the call and the configuration.

make_plan answers with a Plan or with the reason why the call goes in full precision.  The checks run in a
fixed order and the first that applies gives the reason, so that a counter's key means the same on every rank:

1. enabled is false, or lists other sites   4. the operator is not sum, avg or premul_sum (of what sums)
2. the group has one rank                   5. the message is empty
3. the dtype is not fp32, bf16 or fp16      6. the message is below min_bytes
7. the role is kept in full precision: one of the fields that decide its width is "full", or the embedding or
   the layer norms are not to be quantized
8. the module's name is not in include, or is in exclude
9. the step is one of the first warmup_steps

5 and 6 are left out for an all_to_all, whose ranks have different numbers of elements and must decide alike: its runs
are asked one by one (collectives/all_to_all.py). The two ends of a send look at
nothing else, and so decide alike.
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
_TWO_LEVELS = (*SUMS, "all_gather")  # the others have nothing that a node could add up or share out

_RANKS = 128  # a chunk of 1 MiB sends each of them 8 KiB
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run one quantized call.

    reduce: codec of the half before the sum (all_reduce, reduce_scatter, reduce).
    gather: codec of the half after the sum (all_reduce), and of what is not summed (all_gather, a send ...).
    chunk_bytes: payload bytes of one chunk in flight.
    inside: codec of what is summed inside a node, if the call is hierarchical; reduce and gather are between nodes.
    nodes: None: the call is flat, every rank deals with every other one.
    width: the one that target_sqnr_db may change; None: no target, or the configuration gives every width of the call.
    """

    reduce: Format
    gather: Format
    chunk_bytes: int
    inside: Format | None = None
    nodes: Nodes | None = None
    width: int | None = None

    def bits(self, collective: Collective) -> int:
        """The width of the half that the collective has; of its two, the narrower one."""
        if collective == "all_reduce":
            return min(self.reduce.bits, self.gather.bits)
        return self.reduce.bits if collective in SUMS else self.gather.bits

    def narrowest(self, collective: Collective) -> int:
        """The least width that the collective has anywhere, inside a node too."""
        bits = self.bits(collective)
        return bits if self.inside is None or collective not in SUMS else min(bits, self.inside.bits)

    @property
    def widest(self) -> Format:
        """The codec whose payload is the longest."""
        formats = (self.reduce, self.gather, *([] if self.inside is None else [self.inside]))
        return max(formats, key=lambda one: one.record_bytes)

    def at_least(self, bits: int) -> Plan:
        """The same with every width below `bits` raised to it."""
        inside = None if self.inside is None else _at_least(self.inside, bits)
        return replace(self, reduce=_at_least(self.reduce, bits), gather=_at_least(self.gather, bits), inside=inside)


@dataclass(frozen=True, slots=True)
class FullPrecision:
    """The call goes the plain way; `reason` is short and stable, e.g. "message below min_bytes"."""

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
    """Plan one call, or say why it goes in full precision.

    numel counts the whole tensor: the input of reduce_scatter and scatter, the output of all_gather and gather; it is
    not looked at for all_to_all. op is "sum", "avg" or another operator's name, and is looked at where there is a sum.
    step counts the training steps from 0; without it there is no warm-up. reduce_bits and gather_bits override the
    width of their half. nodes are the group's if config.hierarchical is to be obeyed: a group within one node is flat
    with the width inside, one with a rank a node with the width between nodes. What is not a sum or an all_gather has
    one level. width takes the place of the role's width, of inter_bits too, but not of reduce_bits and gather_bits.
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

    What backward_bits quantizes is rounded as backward_rounding says. Stochastic rounding knows no codebook and no
    searched range, which only round to the nearest. Spikes stay: as bf16, rounded at random.

    Differences of parameters have no codebook, and no spikes with it: it clips what is far from zero. What it clips of
    an Adam step, whose elements are nearly alike, comes a step late.
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
    """Of a larger group's in proportion: every chunk is cut among all ranks, and messages have costs of their own."""
    return config.chunk_bytes * max(_RANKS, world_size) // _RANKS


def matches(module: str, patterns: Iterable[str]) -> bool:
    """Whether one of the fnmatch patterns names the module or one that it is part of."""
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
    """Whether there is a target, and a half that the collective has whose width is not given."""
    if config.target_sqnr_db is None or collective in ("send", "recv"):  # whose two ends agree on nothing
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
