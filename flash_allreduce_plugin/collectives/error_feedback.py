"""Error feedback: the quantization error of a gradient at one step is added to the gradient of the next step.

F. Seide et al., "1-Bit Stochastic Gradient Descent" (2014); S. P. Karimireddy et al., "Error Feedback Fixes SignSGD"
(arXiv 1901.09847); X. Xie et al., "LoCo" (arXiv 2407.04480), which keeps the error in 8 bits and resets it at times.

    x = gradient + residual;  payload = encode(x);  residual = m residual + (1 - m) (x - decode(payload))

An exact zero is sent as zero and keeps its residual. So an embedding's row without tokens stays untouched, and its
residual is added when the row is used again. With hadamard a zero gets an error, as every element of its group, and the
error is carried over as the others are. If it were kept instead, it would grow without bound.

A momentum m of 0 is the method of the first two papers. LoCo's 0.8 adds the lasting part of the error and little of its
noise. In both cases the sum of the errors stays bounded.

A residual belongs to one rank: the ranks need not agree about it, and all of them decode the same bits with or without
it. Residuals of copies (replicated_params.py) are the same on all ranks that have the copy, and outlive other
residuals. A residual has 8 bits, symmetric, in the groups of the payload: 1 byte an element and 2 a group.
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
_DTYPES = {8: torch.uint8, 16: torch.bfloat16}  # bits of a residual's element: its dtype
_LOOKED_AT = 1 << 16  # records checked at a time
_MOST_KEPT = 1000  # pending checks of results


class Residual:
    """The error that one call left: records of 8 bits [groups, bytes], or bf16 [groups, group_size].

    before: the errors of the encoding before the sum, all groups of the call.
    after: the errors of the encoding after the sum, the groups that this rank sums; rotated if hadamard is on.
    momentum: the share of the residual that stays when a call adds its error.
    """

    __slots__ = ("after", "before", "layout", "loaded", "momentum", "site")

    def __init__(self, layout: str, before: Tensor, after: Tensor, momentum: float) -> None:
        self.layout = layout
        self.momentum = momentum
        self.before = before
        self.after = after
        self.site: Site | None = None  # of the last call
        self.loaded = False  # from a checkpoint, and not used since

    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(self.before.shape), tuple(self.after.shape)]

    def dtype(self) -> torch.dtype:
        return self.before.dtype


class Feedback:
    """The residuals of one owner of gradients: an engine, a communication hook, a module's reduce-scatter.

    Create one for each model: two models with the same keys would add each other's errors. A call finds its residual
    by a key, or by its position in the backward pass. A residual of another layout (sizes, dtype, ranks, codec,
    chunk_bytes) is dropped; fap.stats() counts the dropped residuals by reason under "residuals_dropped". Calls in full
    precision neither use nor change a residual.
    """

    def __init__(self, reset_interval: int = 0, momentum: float = 0.8, bits: int = 8) -> None:
        """reset_interval: steps after which all residuals are dropped; 0: never.

        momentum: the share of a residual that stays at each step, 0 or more and below 1.
        bits: bits of a residual's element, 8 or 16 (bf16).
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
        # One flag a result since the last `begin`, on its device, not yet waited for. Copies have their own list.
        self._finite: list[Tensor] = []
        self._finite_copies: list[Tensor] = []
        self._residuals: dict[str, Residual] = {}

    @classmethod
    def from_config(cls, config: FlashConfig) -> Feedback:
        """Create one with error_feedback_reset_interval, error_feedback_momentum and error_feedback_bits.

        The field error_feedback is not read: every call with a slot carries its error over.
        """
        return cls(config.error_feedback_reset_interval, config.error_feedback_momentum, config.error_feedback_bits)

    def begin(self, step: int | None = None) -> None:
        """Start a backward pass. step: finished steps so far; None: one more than at the last call."""
        step = self.step + 1 if step is None else step
        if self._interval and step // self._interval != self.step // self._interval:
            self.reset(INTERVAL)
        elif not _all(self._finite_copies):  # the step may have been skipped and the loss scale changed
            self.reset(NOT_FINITE)
        elif not _all(self._finite):  # on this rank; other ranks with the same copies may have finite results
            for key in self.keys():
                if not key.startswith(_COPY):
                    self.drop(key, NOT_FINITE)
        self._finite.clear()
        self._finite_copies.clear()
        self.step = step
        self._order = 0

    def slot(self, key: object = None, holds: str = "") -> Slot:
        """Return the slot in which a call finds its residual.

        key: identifies the call within a pass by its text. None: the position among the calls without a key.
        holds: a description of the tensor's contents, if its size does not determine them; part of the layout.
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
        """Return the keys of the present residuals."""
        return list(self._residuals)

    def nbytes(self) -> int:
        """Return the memory of the residuals in bytes."""
        return sum(residual.before.nbytes + residual.after.nbytes for residual in self._residuals.values())

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, copied to the CPU. Call it between steps.

        The state has strings, numbers and tensors, which torch.load reads with weights_only=True.
        """
        copies_last = _all(self._finite_copies)  # False: the next step drops them
        residuals = {
            key: {"layout": residual.layout, "before": _copy(residual.before), "after": _copy(residual.after)}
            for key, residual in self._residuals.items()
            if copies_last or not key.startswith(_COPY)
        }
        return {"step": self.step, "finite": copies_last and _all(self._finite), "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that state_dict returned on this rank.

        A residual that does not fit its next call (another number of ranks, other buckets) is dropped by that call,
        with a warning.

        Raises:
            ValueError: the state has another shape; the message says where. Nothing has changed.
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
    """The residual of one call in its owner; see Feedback.slot."""

    __slots__ = ("_feedback", "_holds", "_key")

    def __init__(self, feedback: Feedback, key: str, holds: str) -> None:
        self._feedback = feedback
        self._key = key
        self._holds = holds

    def open(self, layout: str, site: Site, groups: tuple[int, int], group_size: int, device: torch.device) -> Residual:
        """Return the residual of the last call of the same layout, or a new one. groups: before and after the sum."""
        layout = f"{layout}, {self._holds}" if self._holds else layout
        return self._feedback._open(self._key, layout, site, groups, group_size, device)

    def of_copy(self, number: int) -> Slot:
        """Return the slot of a copy in the same owner. It does not depend on the call that has the copy."""
        return Slot(self._feedback, f"{_COPY}{number}", "")

    def check(self, result: Tensor) -> None:
        """Note a result. One that is not finite drops the owner's residuals when the next backward pass starts.

        Residuals of copies are dropped only by a copy's result, which is the same on all ranks that have the copy.
        """
        finite = self._feedback._finite_copies if self._key.startswith(_COPY) else self._feedback._finite
        finite.append(_is_finite(result))
        if len(finite) > _MOST_KEPT:  # the caller never calls begin
            finite[:] = [torch.tensor(_all(finite))]


def _all(flags: Sequence[Tensor]) -> bool:
    """True if all flags are true. Waits once for each of their devices."""
    devices = {flag.device for flag in flags}
    return all(bool(torch.stack([f for f in flags if f.device == device]).all()) for device in devices)


def _is_finite(x: Tensor) -> Tensor:
    """Return, as a bool on the device, if a vector is finite. x.isfinite().all() takes 20 to 60 times as long."""
    if x.numel() == 0 or (x.device.type == "cpu" and x.dtype is torch.float32 and x.dot(x).isfinite()):
        return torch.ones((), dtype=torch.bool, device=x.device)
    low, high = x.aminmax()
    return low.isfinite() & high.isfinite()


def _are_kept(value: Any) -> bool:
    """True if a loaded value can be a residual: no more memory than was read, a known group size, finite."""
    if not isinstance(value, Tensor) or value.dtype not in _DTYPES.values() or value.dim() != 2:
        return False
    if value.layout is not torch.strided or value.is_meta or not value.is_contiguous():  # expanded: shares its bytes
        return False
    sizes = [size for size in GROUP_SIZES if _width(value.dtype, size) == value.shape[1]]
    return bool(sizes) and all(_finite(some, sizes[0]) for some in value.split(_LOOKED_AT) if len(some))


def _width(dtype: torch.dtype, group_size: int) -> int:
    """Return the columns of a residual."""
    return residual_format(group_size).record_bytes if dtype is torch.uint8 else group_size


def _finite(groups: Tensor, group_size: int) -> bool:
    if groups.dtype is not torch.uint8:
        return bool(_is_finite(groups.view(-1)))
    numbers = torch.empty(1, len(groups) * group_size, dtype=torch.float32, device=groups.device)
    rows.decode(groups.view(1, -1), numbers, residual_format(group_size))
    return bool(_is_finite(numbers.view(-1)))


# The shape of a state_dict, in the language of collectives/state_shapes.py.
_RESIDUAL = {"layout": str, "before": _are_kept, "after": _are_kept}
STATE = {"step": int, "finite": bool, "residuals": {...: _RESIDUAL}}


def _copy(records: Tensor) -> Tensor:
    return records.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
