"""Parameters of Megatron-FSDP (fsdp.py): the gathers of its buckets.

ZeRO 3 frees a bucket after use: its values are rounded, while the optimizer steps on exact ones. Elsewhere buckets stay
whole, and differences are gathered (collectives/weight_differences.py):

    1. Megatron-FSDP rounds the new values of this rank's part into the bucket.
    2. The part gets back the values that all ranks hold.
    3. The gather takes the exact values from where the optimizer has them.

A gather without a step before it is left out if all ranks hold the same, which they compare.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.collectives.replicated_params import Range
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.collectives.weight_differences import HeldWeights
from flash_allreduce_plugin.config import FlashConfig, presets
from flash_allreduce_plugin.integrations.megatron import fsdp
from flash_allreduce_plugin.integrations.megatron.data_parallel import Handle, each_at_once, started
from flash_allreduce_plugin.integrations.megatron.fsdp import Host
from flash_allreduce_plugin.integrations.megatron.fsdp_gradients import stepping
from flash_allreduce_plugin.integrations.megatron.parameters import NO_MASTERS, NOTHING_NEW
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.policy import FROZEN
from flash_allreduce_plugin.runtime.decision import ring_bytes
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.other_traffic import counted_at

_GATHER = "torch.distributed.all_gather_into_tensor"
_SERVED = (torch.float32, torch.bfloat16, torch.float16)


def seams(host: Host) -> list[Seam]:
    """Return the seam of the gathers."""
    return [
        Seam(
            host.parameters.name,
            host.module,
            "AllGatherPipeline.async_bucket_gather",
            ("self", "bucket_id", "bwd"),
            lambda original: _gathers(original, host),
            "all-gather of Megatron-FSDP's parameter buckets in ZeRO 3, before and during both passes",
        )
    ]


def helpers(host: Host) -> list[Seam]:
    """Return the seams that start several gathers, and that keep the held values."""
    return [
        Seam(
            f"{host.name}.all_gather_params",
            host.module,
            "AllGatherPipeline.all_gather_params",
            ("self", "params", "prefetch", "prefetch_order", "suggested_AG_prefetch_size", "async_param_gather", ...),
            lambda original: _gathers_many(original, host),
            "starts the gathers of several buckets, and those between the instances of HSDP",
        ),
        Seam(
            f"{host.name}.masters",
            host.module,
            "ParamAndGradBuffer.copy_main_weights_to_model_weights",
            ("self",),
            lambda original: _copies(original, host),
            "keeps the values that all ranks hold for the gather of differences",
        ),
    ]


class _Bucket:
    """A bucket that stays whole. part: this rank's elements of it; master: their exact values."""

    def __init__(self, part: Tensor, master: Tensor) -> None:
        self.part, self.master = part, master
        self.held = HeldWeights()
        self.stepped = False  # the gather to come is to bring new values


_known: WeakKeyDictionary[Any, _Bucket] = WeakKeyDictionary()  # by the DataParallelBuffer that has the whole bucket
_cleared: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # DataParallelBuffers of ZeRO 3 without padding to clear


def configure(config: FlashConfig | None) -> None:
    """Forget all buckets if `config` is None or gathers in full precision. Steps to be gathered are copied first."""
    if config is not None and not _off(config):
        return
    for bucket in _known.values():
        if bucket.stepped:
            bucket.part.copy_(bucket.master)
    _known.clear()


def _of_values(config: FlashConfig) -> FlashConfig:
    """Return the configuration for gathers by values, which need more bits than a preset has for differences."""
    if config.preset is None or "param_bits" in config.by_hand():
        return config
    return _with_param_bits(config, presets.PRESETS[config.preset]["param_bits"])


@functools.lru_cache(maxsize=8)
def _with_param_bits(config: FlashConfig, bits: int) -> FlashConfig:
    return config if config.param_bits == bits else config.model_copy(update={"param_bits": bits})


def _off(config: FlashConfig) -> bool:
    return not config.enabled or environment.is_on(environment.DISABLE) or config.param_bits == "full"


def _whole(buffers: Any, group: Any) -> Any:
    """Return the DataParallelBuffer of a ParameterGroup that keeps the target of gathered differences, or None.

    That is the bucket in ZeRO 1 and 2, and the part of this instance where instances of HSDP have parts of it.
    """
    weights = group.model_weight_buffer
    if weights is None or weights.dtype not in _SERVED:
        return None
    if buffers.ddp_config.outer_dp_sharding_strategy != "no_shard":
        return getattr(group, "hsdp_wbuf", None) or getattr(group, "hfsdp_helper_wbuf", None)
    alone = weights.data_parallel_group.size() == 1
    return None if weights.is_data_distributed or alone else weights


def _bucket(buffers: Any, group: Any) -> _Bucket | None:
    """Return the bucket of a ParameterGroup, or None if it does not stay whole or has no exact values."""
    whole, exact = _whole(buffers, group), group.main_weight_buffer
    if whole is None or exact is None:
        return None
    bucket = _known.get(whole)
    if bucket is None:
        part, master = (one.get_shard_from_local_buffer() for one in (group.model_weight_buffer, exact))
        fsdp.clear_padding(whole, whole.data, fsdp.window(whole))
        index = exact.shard_bucket_index
        own = (index.bucket_data_index, index.bucket_data_index + index.size)
        fsdp.clear_padding(exact, master, own)
        bucket = _known[whole] = _Bucket(part, master)
    return bucket


def _copies(original: Function, host: Host) -> Function:
    """`original`, which leaves the parts of buckets that stay whole as all ranks hold them."""

    @functools.wraps(original)
    def copy_main_weights_to_model_weights(self: Any) -> None:
        by_step = self in stepping
        stepping.discard(self)
        buckets = [] if _off(host.config()) else [_bucket(self, group) for group in self.parameter_groups]
        found = [bucket for bucket in buckets if bucket is not None]
        before = [bucket.part.clone() if by_step else None for bucket in found]
        original(self)
        for bucket, held in zip(found, before, strict=True):
            if held is None:  # a checkpoint was loaded: differences from older values would be coarse
                bucket.held, bucket.stepped = HeldWeights(), False
            else:
                bucket.part.copy_(held)
                bucket.stepped = True

    return copy_main_weights_to_model_weights


# (ParamAndGradBuffer, ParameterGroup, its DataParallelBuffer) of the bucket that is being gathered.
_gathering: ContextVar[tuple[Any, Any, Any]] = ContextVar("flash_allreduce_fsdp_gather")


def _gathers(original: Function, host: Host) -> Function:
    body = rebound(original, _GATHER, _all_gather(host))

    @functools.wraps(original)
    def async_bucket_gather(self: Any, bucket_id: int, bwd: bool) -> None:
        if _off(host.config()):
            with counted_at(host.parameters, host.config()):
                original(self, bucket_id, bwd)
            return
        weights = self.get_fsdp_buffer(bucket_id, bwd)
        token = _gathering.set((self.buffer, self.buffer.parameter_groups[bucket_id], weights))
        try:
            body(self, bucket_id, bwd)
        finally:
            _gathering.reset(token)

    return async_bucket_gather


def _gathers_many(original: Function, host: Host) -> Function:
    body = rebound(original, "_coalescing_manager", each_at_once)
    body = rebound(body, _GATHER, _all_gather_between_instances(host))

    @functools.wraps(original)
    def all_gather_params(self: Any, *args: Any, **kwargs: Any) -> None:
        if _off(host.config()):
            with counted_at(host.parameters, host.config()):
                original(self, *args, **kwargs)
            return
        token = _gathering.set((self.buffer, None, None))
        try:
            body(self, *args, **kwargs)
        finally:
            _gathering.reset(token)

    return all_gather_params


def _all_gather(host: Host) -> Function:
    """Return the function that stands in for the gather of one bucket."""

    def all_gather_into_tensor(
        output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        buffers, parameters, weights = _gathering.get()
        if weights is _whole(buffers, parameters) and not weights.is_data_distributed and group.size() > 1:
            return _differences(host, buffers, parameters, output_tensor, input_tensor, group, async_op)
        if weights.dtype in _SERVED and weights not in _cleared:
            fsdp.clear_padding(weights, weights.data, fsdp.window(weights))
            _cleared[weights] = True
        handle = reductions.all_gather(
            output_tensor,
            input_tensor,
            group,
            _of_values(host.config()),
            async_op,
            site=host.parameters,
            step=host.step(),
            full_precision=host.full_precision() or _frozen(parameters, host.config()),
            plain=partial(dist.all_gather_into_tensor, output_tensor, input_tensor, group=group, async_op=async_op),
            exact=_exact(buffers, parameters, weights, (0, len(output_tensor))),
        )
        return started(handle)

    return all_gather_into_tensor


def _all_gather_between_instances(host: Host) -> Function:
    """Return the stand-in for the gather between instances of HSDP, into this instance's part of a bucket."""

    def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> Any:
        buffers, _, _ = _gathering.get()
        place = output_tensor.data_ptr()
        for parameters in buffers.parameter_groups:
            whole = _whole(buffers, parameters)
            if whole is not None and whole.data.data_ptr() == place:
                return _differences(host, buffers, parameters, output_tensor, input_tensor, group, False)
        with counted_at(host.parameters, host.config()):  # of a dtype that is not quantized
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)

    return all_gather_into_tensor


def _frozen(parameters: Any, config: FlashConfig) -> str | None:
    """Return the reason of buckets that no optimizer steps on: no later step makes up for their error."""
    return None if parameters.requires_grad or config.quantize_frozen else FROZEN


def _exact(buffers: Any, parameters: Any, weights: Any, to: Range) -> list[Range]:
    """Return the elements of copies that tensor-parallel ranks have, among the elements `to` of a bucket."""
    found = fsdp.copies(buffers.dist_index, parameters, weights, lambda one: True)
    return fsdp.clipped((place for place, _ in found), to)


def _differences(
    host: Host,
    buffers: Any,
    parameters: Any,
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup,
    async_op: bool,
) -> Any:
    config, bucket = host.config(), _bucket(buffers, parameters)
    theirs = partial(dist.all_gather_into_tensor, output, input, group=group, async_op=async_op)
    how: dict[str, Any] = {"site": host.differences, "step": host.step(), "plain": theirs}
    how["full_precision"] = host.full_precision()
    master = input
    if bucket is None:
        how["full_precision"] = how["full_precision"] or NO_MASTERS
    else:
        whole = _whole(buffers, parameters)
        if not bucket.stepped and bucket.held.digest is not None and group.size() > 1:
            if how["full_precision"] is None:
                how["full_precision"] = bucket.held.agree(output, Label("all_gather", host.differences.name, group))
            if how["full_precision"] is None:
                left_out = ring_bytes("all_gather", output.numel() * output.element_size(), group.size())
                counters.record_full_precision(host.differences, NOTHING_NEW, 0, instead_of=left_out)
                return started(Handle())
        master = bucket.master if bucket.stepped else input.clone()
        bucket.stepped = False
        how["held"] = bucket.held
        how["exact"] = _exact(buffers, parameters, whole, fsdp.window(whole))
        if config.hadamard:  # rotated groups would write values there that a checkpoint does not have
            used = [place for place, _ in fsdp.places(whole)]
            gaps = replicated_params.between(used, whole.bucket_index.size)
            how["exact"] = sorted([*how["exact"], *fsdp.clipped(gaps, fsdp.window(whole))])
    return started(reductions.all_gather(output, master, group, config, async_op, **how))
