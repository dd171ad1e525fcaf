"""Parameters of megatron-core's distributed optimizer: the all-gather after its step, by differences.

Megatron rounds the new values of this rank's part into the buffer of weights, and gathers the buffer. Differences
(collectives/weight_differences.py) need the values that all ranks hold there until the gather. So while Megatron
copies, the target buffers are meta tensors without memory, and the gather takes the exact values from the optimizer.

A gather without a step before it (in the first forward pass, of the experts' buckets in the step of the others) is
skipped if all ranks hold the same values, which they compare. Otherwise it is Megatron's own.

With overlap_param_gather the gather starts in the next forward pass. A parameter that other code has written meanwhile
keeps the written values, and its bucket is gathered in whole values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.collectives.weight_differences import HeldWeights, digest_of
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.megatron import data_parallel, refusals, replicated, scopes
from flash_allreduce_plugin.integrations.megatron.scopes import CurrentConfig
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.runtime.decision import ring_bytes
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.other_traffic import counted_at

PARAMETERS = Site("megatron.data_parallel.parameters", Role.PARAMETER_DIFFERENCE)
NO_MASTERS = "parameters without exact values"
"""The reason of buckets in float32: the optimizer steps on the parameters themselves."""
NOTHING_NEW = "all ranks hold the parameters already"
"""The reason of gathers that are left out; they send nothing."""

_ROUNDED = (torch.bfloat16, torch.float16)
_DIGEST = "parameters."  # of a checkpoint's numbers, and which one


def seams(config: CurrentConfig) -> list[Seam]:
    """The seam of the gather; `config` is asked at every call."""
    return [
        Seam(
            PARAMETERS.name,
            data_parallel.BUFFERS,
            "_ParamAndGradBucketGroup.start_param_sync",
            ("self", "force_sync"),
            lambda original: _start_param_sync(original, config),
            "all-gather of the distributed optimizer's parameter buckets, after its step or in the next forward pass",
        ),
    ]


def helpers(config: CurrentConfig) -> list[Seam]:
    """Return the seam that keeps the held values from being overwritten before the gather. It sends nothing."""
    return [
        Seam(
            "megatron.data_parallel.masters",
            "megatron.core.optimizer.distrib_optimizer",
            "DistributedOptimizer._copy_main_params_to_model_params",
            ("self",),
            lambda original: _copy_main_params(original, config),
            "leaves the exact values where they are for the gather of differences",
        ),
    ]


class _Piece:
    """Exact values [numel] of a parameter, or of a part of it, from element `first` of its bucket on."""

    def __init__(self, first: int, master: Tensor, parameter: Tensor) -> None:
        self._first, self._master, self._parameter = first, master, parameter
        self._version = parameter._version

    def write(self, target: Tensor, start: int = 0) -> None:
        """Write into `target`, the bucket from element `start` on, unless other code wrote to the parameter since.

        A gather writes to the bucket, which has another version counter.
        """
        if self._parameter._version == self._version:
            first = self._first - start
            target[first : first + self._master.numel()].copy_(self._master.detach().view(-1))


class _Bucket:
    """The state of one bucket. stepped: exact values for the next gather; None: no step since the last one."""

    __slots__ = ("held", "stepped")

    def __init__(self) -> None:
        self.held = HeldWeights()
        self.stepped: list[_Piece] | None = None


class Buckets:
    """All buckets of parameters of this process that are served."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, _Bucket] = WeakKeyDictionary()
        self._loaded: frozenset[int] = frozenset()

    def configure(self, config: FlashConfig | None) -> None:
        """Set the configuration. None, or one without param_bits: drop the state, and gather Megatron's copies next."""
        if config is not None and config.param_bits != "full":
            return
        for bucket, known in self._known.items():
            for piece in known.stepped or ():
                piece.write(bucket.param_data)
        self._known.clear()
        self._loaded = frozenset()

    def stepped(self, bucket: Any, pieces: list[_Piece]) -> None:
        """Note the optimizer's new values for this rank's part of the bucket."""
        self._of(bucket).stepped = pieces

    def take(self, bucket: Any, part: Tensor) -> tuple[Tensor | None, HeldWeights]:
        """Return the exact values of `part`, this rank's part of the bucket, and the state of the held weights.

        The values are [numel] in float32; None without a step.
        """
        known = self._of(bucket)
        if known.held.digest is None and self._loaded:
            digest = digest_of(bucket.param_data)
            known.held.digest = digest if digest in self._loaded else None
        pieces, known.stepped = known.stepped, None
        if pieces is None:
            return None, known.held
        master = part.detach().view(-1).float()  # padding, which pieces leave out, has a difference of zero
        start = (part.data_ptr() - bucket.param_data.data_ptr()) // part.element_size()
        for piece in pieces:
            piece.write(master, start)
        return master, known.held

    def forget(self, bucket: Any) -> None:
        """Drop the state of the held weights."""
        self._of(bucket).held = HeldWeights()

    def numbers(self) -> dict[str, int]:
        """Return the digests of the held weights, for a checkpoint."""
        digests = [known.held.digest for known in self._known.values()]
        return {f"{_DIGEST}{number}": one for number, one in enumerate(digests) if one is not None}

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        """A checkpoint was loaded. Which bucket a digest was of does not matter: it is of its bits."""
        self._loaded = frozenset(int(one) for name, one in numbers.items() if name.startswith(_DIGEST))
        for known in self._known.values():
            known.held.digest = None

    def _of(self, bucket: Any) -> _Bucket:
        return self._known.setdefault(bucket, _Bucket())


buckets = Buckets()
_unserved: WeakSet[Any] = WeakSet()  # buckets of optimizers that param_bits is refused for
# The bucket group that starts its gathers now.
_starting: ContextVar[Any] = ContextVar("flash_allreduce_gathered_bucket_group")


def _copy_main_params(original: Function, config: CurrentConfig) -> Function:
    @functools.wraps(original)
    def _copy_main_params_to_model_params(self: Any) -> None:
        other = self.is_stub_optimizer or refusals.in_fsdp(self.ddp_config)  # fsdp_parameters.py serves the latter
        pieces = None if other else _pieces(self, config())
        if pieces is None:
            original(self)
            return
        with _stand_ins(pieces):
            original(self)
        for bucket, found in pieces.items():
            buckets.stepped(bucket, found)

    return _copy_main_params_to_model_params


def _could_be_quantized(bucket: Any) -> bool:
    return bucket.param_data.dtype in _ROUNDED and bucket not in _unserved


def _pieces(optimizer: Any, config: FlashConfig) -> dict[Any, list[_Piece]] | None:
    """Return the exact values that the optimizer has for each of its buckets of rounded parameters.

    None: the buckets stay in full precision; those of an optimizer that cannot be served are remembered. Raises
    ConfigError if param_bits was given for such an optimizer.
    """
    asked = config.param_bits != "full"
    ours = scopes.source().spelled("param_bits")
    lines = refusals.of_parameters((optimizer.ddp_config, optimizer.config), refusals.field, ours)
    found = _exact_values(optimizer) if asked and not lines else None
    if found is None and asked and not lines:
        lines = [f"{ours} is not for parameters {refusals.IN_FP8}; leave it at full."]
    if lines:
        of_it = [bucket for buffer in optimizer.buffers or () for bucket in buffer.buckets]
        if asked and not _unserved.issuperset(of_it):
            refusals.leave_out(config, "param_bits", lines)
        _unserved.update(of_it)
    return found


def _exact_values(optimizer: Any) -> dict[Any, list[_Piece]] | None:
    """Return the pieces of each bucket; None if a parameter lies in no bucket of rounded parameters."""
    found: dict[Any, list[_Piece]] = {
        bucket: []
        for buffer in optimizer.buffers
        for bucket in buffer.buckets
        if bucket.param_data is not None and bucket.param_data.dtype in _ROUNDED
    }
    groups = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
    for parameters, masters in groups:
        for parameter, master in zip(parameters, masters, strict=True):
            buffer, _, number = optimizer.model_param_gbuf_map[parameter]
            bucket = optimizer.buffers[buffer].buckets[number]
            if bucket not in found:
                return None
            first = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"].start
            found[bucket].append(_Piece(first, master, parameter))
    return found


@contextmanager
def _stand_ins(found: Iterable[Any]) -> Iterator[None]:
    """Replace the buckets' memory by meta tensors in the block: a copy into one does nothing."""
    real = [(bucket, bucket.param_data) for bucket in found]
    try:
        for bucket, weights in real:
            bucket.param_data = torch.empty_like(weights, device="meta")
        yield
    finally:
        for bucket, weights in real:
            bucket.param_data = weights


def _start_param_sync(original: Function, config: CurrentConfig) -> Function:
    """`original` with its manager and its collective replaced."""
    body = rebound(original, "_coalescing_manager", data_parallel.each_at_once)
    body = rebound(body, "dist_all_gather_func", _all_gather(config))

    @functools.wraps(original)
    def start_param_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        ours = scopes.source().spelled("param_bits")
        lines = refusals.of_parameters([self.ddp_config], refusals.field, ours)
        if lines and config().param_bits != "full":
            refusals.leave_out(config(), "param_bits", lines)
        if config().param_bits == "full" or lines or not _unserved.isdisjoint(self.buckets):
            served = not lines and all(map(_could_be_quantized, self.buckets))
            with counted_at(PARAMETERS, config()) if served else nullcontext():
                original(self, *args, **kwargs)
            return
        token = _starting.set(self)
        try:
            body(self, *args, **kwargs)
        finally:
            _starting.reset(token)

    return start_param_sync


def _all_gather(config: CurrentConfig) -> Function:
    """Replace the all-gather of one bucket: `input` is this rank's part of `output`, in place."""

    def all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
        from megatron.core.distributed import param_and_grad_buffer

        theirs = partial(param_and_grad_buffer.dist_all_gather_func, output, input, group=group, async_op=async_op)
        # Not scopes.current(): a gather between the steps of two chained optimizers does not begin another step.
        how: dict[str, Any] = {"site": PARAMETERS, "step": scopes.step(), "plain": theirs}
        how["full_precision"] = scopes.requested()
        master: Tensor | None = input
        if output.dtype in _ROUNDED:
            bucket_group = _starting.get()
            bucket = next(one for one in bucket_group.buckets if one.param_data is output)
            master, held = buckets.take(bucket, input)
            if master is not None:
                how["held"] = held
                how["exact"] = replicated.parameters(bucket_group, bucket, padding=config().hadamard)
            elif how["full_precision"] is None and _compares(config(), group):
                how["full_precision"] = held.agree(output, Label("all_gather", PARAMETERS.name, group))
                if how["full_precision"] is None:
                    left_out = ring_bytes("all_gather", output.numel() * output.element_size(), group.size())
                    counters.record_full_precision(PARAMETERS, NOTHING_NEW, 0, instead_of=left_out)
                    return None
                buckets.forget(bucket)
        else:
            how["full_precision"] = how["full_precision"] or NO_MASTERS
        master = input if master is None else master
        return data_parallel.started(reductions.all_gather(output, master, group, config(), async_op, **how))

    return all_gather


def _compares(config: FlashConfig, group: dist.ProcessGroup) -> bool:
    """Return True if differences may be sent: the same on all ranks."""
    return bool(config.enabled) and not environment.is_on(environment.DISABLE) and group.size() > 1
