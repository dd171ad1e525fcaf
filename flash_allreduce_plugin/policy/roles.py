"""Roles of tensors in a training step, sites, and the reasons for full precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flash_allreduce_plugin.telemetry.counters import Tally

# The reasons are keys of counters: short, and equal from call to call.
DISABLED = "disabled by configuration"
ONE_RANK = "one-rank group"
EMPTY = "empty message"
SMALL = "message below min_bytes"
EMBEDDING = "embedding"
LAYER_NORM = "layer norm"
FROZEN = "frozen parameter"
NOT_INCLUDED = "not in include"
EVALUATION = "evaluation"
EXCLUDED = "in exclude"
WARM_UP = "warm-up"
NOT_ENABLED = "site not in enabled"
TRIAL = "trial of the speed"  # from enabled "auto", which decides after make_plan (runtime/auto.py)
SLOWER = "faster in full precision"  # the same, after the trial
LOW_SQNR = "below min_sqnr_db"  # from the guard, which decides after make_plan (quality/guard.py)
SPARSE = "sparse gradient"  # from frameworks, which reduce it themselves


def is_full(width: str) -> str:
    """Return the reason of a role whose width, in this field of FlashConfig, is "full"."""
    return f"{width} is full"


class Role(str, Enum):
    """The role of a call's tensor in the training step. One row a role.

    widths: fields of FlashConfig. The first that is not None gives the width; "full" is full precision.
    backward: the tensor is a gradient of activations. It is quantized only if backward_bits is not "full" either, and
        it is rounded as backward_rounding says.
    switch: a field of FlashConfig that must be true, and the reason for full precision if it is false.
    """

    widths: tuple[str, ...]
    backward: bool
    switch: tuple[str, str] | None

    def __new__(
        cls,
        value: str,
        widths: tuple[str, ...] = ("bits",),
        backward: bool = False,
        switch: tuple[str, str] | None = None,
    ) -> Role:
        role = str.__new__(cls, value)
        role._value_ = value
        role.widths, role.backward, role.switch = widths, backward, switch
        return role

    ANY = "any"
    FORWARD = "forward"
    BACKWARD = "backward", ("backward_bits",), True
    SEQUENCE_PARALLEL_GATHER = "sequence_parallel_gather", ("sequence_parallel_gather_bits",)
    SEQUENCE_PARALLEL_GRADIENT = "sequence_parallel_gradient", ("sequence_parallel_gather_bits",), True
    GRADIENT = "gradient", ("grad_bits",)
    PARAMETER = "parameter", ("param_bits",)
    PARAMETER_BACKWARD = "parameter_backward", ("param_backward_bits", "param_bits")
    PARAMETER_DIFFERENCE = "parameter_difference", ("param_bits",)  # to the values that every rank keeps
    EMBEDDING = "embedding", ("bits",), False, ("quantize_embedding", EMBEDDING)
    # Gradients of weights with copies on tensor-parallel ranks, with sequence parallelism.
    LAYER_NORM = "layer_norm", ("grad_bits",), False, ("quantize_layernorm", LAYER_NORM)
    EXPERT = "expert", ("expert_bits",)
    EXPERT_GRADIENT = "expert_gradient", ("expert_bits",), True
    EXPERT_COMBINE = "expert_combine", ("expert_combine_bits", "expert_bits")
    EXPERT_COMBINE_GRADIENT = "expert_combine_gradient", ("expert_combine_bits", "expert_bits"), True
    ATTENTION = "attention", ("attention_bits",)
    ATTENTION_GRADIENT = "attention_gradient", ("attention_bits",), True
    PIPELINE = "pipeline", ("pipeline_bits",)
    PIPELINE_BACKWARD = "pipeline_backward", ("pipeline_backward_bits",)


@dataclass(frozen=True, slots=True)
class Site:
    """The place of a collective in a program: a stable name for the counters, and the role.

    module: the qualified name that include and exclude match; None: they do not apply.
    layer: the number of a layer among those that share the site. On gloo, quantized calls of different layers do not
        match: ranks that mix up two layers get CollectiveError.
    tally: counts the calls of one engine or model, besides the counters of the process; None: no such count.
    """

    name: str
    role: Role = Role.ANY
    module: str | None = None
    layer: int | None = None
    tally: Tally | None = field(default=None, compare=False, repr=False)
