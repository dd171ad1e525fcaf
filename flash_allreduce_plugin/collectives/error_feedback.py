"""Error feedback: what quantizing took from a gradient at one step is added to it at the next.

F. Seide et al., "1-Bit Stochastic Gradient Descent" (2014); S. P. Karimireddy et al., "Error Feedback Fixes SignSGD"
(arXiv 1901.09847); X. Xie et al., "LoCo" (arXiv 2407.04480), which keeps the error in 8 bits and resets it at times.

    x = gradient + residual;  payload = encode(x);  residual = m residual + (1 - m) (x - decode(payload))

An exact zero is sent as zero and keeps its residual: an embedding's row that no token touched stays untouched,
and what it lost before comes back when it is used again. With hadamard a zero arrives with an error, as every
element of its group: the error is carried over as the others are. Kept apart, it would add up without bound.

With a momentum m of 0 this is the method of the first two. With LoCo's 0.8 what is added is the lasting part of the
error and little of its noise. Either way the sum of what was lost stays bounded.

A residual is this rank's alone: nothing about it has to be agreed on, and what the ranks decode is the same bits with
or without. Residuals of copies (replicated_params.py) are the same on all ranks that have the
copy: they outlive other residuals. A residual is kept in 8 bits, symmetric, in the groups of the payload: 1 byte an
element and 2 a group.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import GROUP_SIZES, residual_format
from flash_allreduce_plugin.collectives.state_shapes import misshapen
from flash_allreduce_plugin.telemetry import counters

if TYPE_CHECKING:
    from flash_allreduce_plugin.config import FlashConfig
    from flash_allreduce_plugin.policy import Site

# Why residuals were dropped: keys of counters.
ASKED = "asked for"
LOADED = "checkpoint loaded"
INTERVAL = "error_feedback_reset_interval"
LAYOUT = "another layout"
NOT_FINITE = "result not finite"
NO_SLOT = "call without a slot"  # error_feedback is true, and the caller keeps no residuals

_COPY = "copy "  # keys of copies begin with it
_DTYPES = {8: torch.uint8, 16: torch.bfloat16}  # of a residual of so many bits
_LOOKED_AT = 1 << 16  # records at a time
_MOST_KEPT = 1000  # results whose finiteness nobody asked for yet


class Residual:
    """The error that one call left: records of 8 bits [groups, bytes], or bf16 [groups, group_size].

    `before` has every group of the call, as it was before the sum; `after` the groups whose sum this rank encodes, as
    they are encoded (rotated, if they are). Zeros: nothing was lost. `momentum` is the share that stays when a call
    adds its own.
    """

    __slots__ = ("after", "before", "layout", "loaded", "momentum", "site")

    def __init__(self, layout: str, before: Tensor, after: Tensor, momentum: float) -> None:
        self.layout = layout
        self.momentum = momentum
        self.before = before
        self.after = after
        self.site: Site | None = None  # of the last call
        self.loaded = False  # and not used since

    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(self.before.shape), tuple(self.after.shape)]

    def dtype(self) -> torch.dtype:
        return self.before.dtype


class Feedback:
    """The residuals of one owner of gradients: an engine, a communication hook, a module's reduce-scatter.

    Make one for each model: where two models use the same keys, each adds the error of the other to its gradients.
    A call finds its residual by a key, or by its place in the backward pass. A residual of a call of another layout
    (sizes, dtype, ranks, codec, chunk_bytes) is dropped; fap.stats() counts under "residuals_dropped" how many were
    dropped and why. Calls in full precision neither use nor change a residual.
    """

    def __init__(self, reset_interval: int = 0, momentum: float = 0.8, bits: int = 8) -> None:
        """reset_interval: every so many steps all residuals are dropped; 0: never.

        momentum: the share of a residual that stays at each step, 0 or more and below 1.
        bits: of a residual's element, 8 or 16 (bf16).
        """
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}; expected 0 or more and below 1.")
        if bits not in _DTYPES:
            raise ValueError(f"bits is {bits}; expected 8 or 16.")
        self._momentum = momentum
        self._dtype = _DTYPES[bits]
        self.step = 0  # finished steps, as `begin` was told
        self._interval = reset_interval
        self._order = 0
        # Whether each result since then was, on its device: nobody waits for it yet. Those of copies apart.
        self._finite: list[Tensor] = []
        self._finite_copies: list[Tensor] = []
        self._residuals: dict[str, Residual] = {}

    @classmethod
    def from_config(cls, config: FlashConfig) -> Feedback:
        """With the configuration's error_feedback_reset_interval, error_feedback_momentum and error_feedback_bits.

        error_feedback itself is not looked at: a call that is given a slot carries its error over.
        """
        return cls(config.error_feedback_reset_interval, config.error_feedback_momentum, config.error_feedback_bits)

    def begin(self, step: int | None = None) -> None:
        """A backward pass begins. step: finished steps so far; None: one more than at the last call."""
        step = self.step + 1 if step is None else step
        if self._interval and step // self._interval != self.step // self._interval:
            self.reset(INTERVAL)
        elif not _all(self._finite_copies):  # the step may have been skipped, and the scale of the loss be another
            self.reset(NOT_FINITE)
        elif not _all(self._finite):  # on this rank: other ranks that have the copies need not see it
            for key in self.keys():
                if not key.startswith(_COPY):
                    self.drop(key, NOT_FINITE)
        self._finite.clear()
        self._finite_copies.clear()
        self.step = step
        self._order = 0

    def slot(self, key: object = None, holds: str = "") -> Slot:
        """Where a call finds its residual.

        key: tells the calls of a pass apart by its text; None: the n-th call that asks for a slot in this pass.
        holds: what the tensor is made of, where its size does not say it; part of the layout.
        """
        if key is None:
            key = self._order
            self._order += 1
        return Slot(self, str(key), holds)

    def reset(self, reason: str = ASKED) -> None:
        """Drop every residual; `reason` is a key of the counters."""
        for key in list(self._residuals):
            self.drop(key, reason)
        self._finite.clear()
        self._finite_copies.clear()

    def drop(self, key: object, reason: str = ASKED) -> None:
        """Drop the residual of one key, if there is one."""
        residual = self._residuals.pop(str(key), None)
        if residual is not None and residual.site is not None:
            counters.record_residual_dropped(residual.site, reason)

    def keys(self) -> list[str]:
        """Of the residuals that there are."""
        return list(self._residuals)

    def nbytes(self) -> int:
        """Memory of the residuals."""
        return sum(residual.before.nbytes + residual.after.nbytes for residual in self._residuals.values())

    def state_dict(self) -> dict[str, Any]:
        """Copies, on the CPU: strings, numbers and tensors, which torch.load reads with weights_only=True.

        Each rank has its own. To be taken between steps.
        """
        copies_last = _all(self._finite_copies)  # else the next step drops them
        residuals = {
            key: {"layout": residual.layout, "before": _copy(residual.before), "after": _copy(residual.after)}
            for key, residual in self._residuals.items()
            if copies_last or not key.startswith(_COPY)
        }
        return {"step": self.step, "finite": copies_last and _all(self._finite), "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what state_dict gave on this rank.

        Residuals that do not fit the calls to come (another number of ranks, other buckets) are dropped, with a
        warning, when those calls come.

        Raises:
            ValueError: it is not such a state; the message says where. Nothing has changed then.
        """
        where = misshapen(state, STATE)
        if where is not None:
            raise ValueError(
                f"state{where} is not as Feedback.state_dict gives it; expected step (a whole number, 0 or more), "
                "finite (a bool) and residuals, each of a layout (a string), before and after (uint8 [groups, bytes] "
                "or bfloat16 [groups, group_size], of finite numbers); nothing was loaded."
            )
        self.reset(LOADED)
        self.step = state["step"]
        self._finite = [torch.tensor(state["finite"])]
        for key, kept in state["residuals"].items():
            residual = Residual(kept["layout"], _copy(kept["before"]), _copy(kept["after"]), self._momentum)
            residual.loaded = True
            self._residuals[key] = residual

    def _open(
        self, key: str, layout: str, site: Site, groups: tuple[int, int], group_size: int, device: torch.device
    ) -> Residual:
        residual = self._residuals.get(key)
        shapes = [(n, _width(self._dtype, group_size)) for n in groups]
        if residual is not None and (residual.layout, residual.dtype(), residual.shapes()) != (
            layout,
            self._dtype,
            shapes,
        ):
            residual.site = site
            self.drop(key, LAYOUT)
            if residual.loaded:
                warnings.warn(
                    f"flash_allreduce: the loaded residual {key!r} of {site.name!r} is dropped: it was left by "
                    f"{residual.layout}, and the call now is {layout}.",
                    stacklevel=2,
                )
            residual = None
        if residual is None:
            before, after = (torch.zeros(shape, dtype=self._dtype, device=device) for shape in shapes)
            residual = self._residuals[key] = Residual(layout, before, after, self._momentum)
        elif residual.before.device != device:
            residual.before, residual.after = residual.before.to(device), residual.after.to(device)
        residual.site, residual.loaded = site, False
        return residual


class Slot:
    """The place of one call's residual in its owner; see Feedback.slot."""

    __slots__ = ("_feedback", "_holds", "_key")

    def __init__(self, feedback: Feedback, key: str, holds: str) -> None:
        self._feedback = feedback
        self._key = key
        self._holds = holds

    def open(self, layout: str, site: Site, groups: tuple[int, int], group_size: int, device: torch.device) -> Residual:
        """The residual that the last call of the same layout left, or a new one. groups: before and after the sum."""
        layout = f"{layout}, {self._holds}" if self._holds else layout
        return self._feedback._open(self._key, layout, site, groups, group_size, device)

    def of_copy(self, number: int) -> Slot:
        """The place of a copy's residual in the same owner: the same in whatever call the copy is."""
        return Slot(self._feedback, f"{_COPY}{number}", "")

    def check(self, result: Tensor) -> None:
        """A result that is not finite drops all residuals of the owner when the next backward pass begins: those of
        copies only if it is a copy's, which is the same on all ranks that have the copy.
        """
        finite = self._feedback._finite_copies if self._key.startswith(_COPY) else self._feedback._finite
        finite.append(_is_finite(result))
        if len(finite) > _MOST_KEPT:  # nobody calls begin
            finite[:] = [torch.tensor(_all(finite))]


def _all(flags: Sequence[Tensor]) -> bool:
    """Whether all of them are true; waits once for each device that they are on."""
    devices = {flag.device for flag in flags}
    return all(bool(torch.stack([f for f in flags if f.device == device]).all()) for device in devices)


def _is_finite(x: Tensor) -> Tensor:
    """Whether every element of a vector is, a bool on its device. x.isfinite().all() takes 20 to 60 times as long."""
    if x.numel() == 0 or (x.device.type == "cpu" and x.dtype is torch.float32 and x.dot(x).isfinite()):
        return torch.ones((), dtype=torch.bool, device=x.device)
    low, high = x.aminmax()
    return low.isfinite() & high.isfinite()


def _are_kept(value: Any) -> bool:
    """Whether they can be a residual's: no more memory than was read, of a known group size, all finite."""
    if not isinstance(value, Tensor) or value.dtype not in _DTYPES.values() or value.dim() != 2:
        return False
    if value.layout is not torch.strided or value.is_meta or not value.is_contiguous():  # expanded: shares its bytes
        return False
    sizes = [size for size in GROUP_SIZES if _width(value.dtype, size) == value.shape[1]]
    return bool(sizes) and all(_finite(some, sizes[0]) for some in value.split(_LOOKED_AT) if len(some))


def _width(dtype: torch.dtype, group_size: int) -> int:
    """Columns of a residual."""
    return residual_format(group_size).record_bytes if dtype is torch.uint8 else group_size


def _finite(groups: Tensor, group_size: int) -> bool:
    if groups.dtype is not torch.uint8:
        return bool(_is_finite(groups.view(-1)))
    numbers = torch.empty(1, len(groups) * group_size, dtype=torch.float32, device=groups.device)
    rows.decode(groups.view(1, -1), numbers, residual_format(group_size))
    return bool(_is_finite(numbers.view(-1)))


# The result of state_dict; in the language of collectives/state_shapes.py.
_RESIDUAL = {"layout": str, "before": _are_kept, "after": _are_kept}
STATE = {"step": int, "finite": bool, "residuals": {...: _RESIDUAL}}


def _copy(records: Tensor) -> Tensor:
    return records.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
