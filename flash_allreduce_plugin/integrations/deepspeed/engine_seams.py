"""The functions of DeepSpeed that reduce gradients, and a few others, with their replacements on an engine.

They are replaced on the engine, its optimizer or its monitor only, not in their classes. DeepSpeed's function still
runs, with another collective (`patching.rebound`), so that its divisors, dtypes and copies stay its own.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from flash_allreduce_plugin.errors import PatchError
from flash_allreduce_plugin.integrations.deepspeed import attention, experts, pipeline, tensor_parallel
from flash_allreduce_plugin.integrations.deepspeed.gathering import BACKWARD, PARAMETERS
from flash_allreduce_plugin.integrations.deepspeed.parameters import counted, parameters
from flash_allreduce_plugin.integrations.deepspeed.reduction import EXPERTS, TIED, Reduction, Slices, gradients, owned
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.telemetry.other_traffic import ours

ENGINE = "deepspeed.runtime.engine"
STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
STAGE_3 = "deepspeed.runtime.zero.stage3"

_BUCKET = "allreduce_bucket of DeepSpeedEngine"
_GATHER = "_dist_allgather_fn, for __all_gather_params_ of PartitionedParameterCoordinator"
_ULYSSES = "_SeqAllToAll of DistributedAttention; _dim_zero_all_to_all of UlyssesSPAttentionHF"
_EXPERTS = "_AllToAll of MOELayer"
_ZERO = "allreduce_bucket and gradient_reduction_w_predivide of DeepSpeedZeroOptimizer"

# The entries of `report`: site -> (place in DeepSpeed, covered tensors).
SITES = {
    gradients(0).name: (_BUCKET, "gradient buckets without ZeRO: all-reduce"),
    gradients(1).name: (f"{_ZERO}; {_BUCKET}", "gradient buckets at stage 1: to their owners"),
    gradients(2).name: (_ZERO, "gradient buckets at stage 2: to their owners"),
    gradients(3).name: (
        "__avg_scatter_grads and __avg_scatter_contiguous_grads of DeepSpeedZeroOptimizer_Stage3",
        "gradient buckets at stage 3: reduce-scatter",
    ),
    **{
        parameters(stage).name: (
            "step and update_lp_params of DeepSpeedZeroOptimizer; update_lp_params of BF16_Optimizer",
            f"parameters after a step at stage {stage}, by their differences: all-gather",
        )
        for stage in (0, 1, 2)
    },
    EXPERTS.name: (f"{_ZERO}; {_BUCKET}", "gradients of experts, over their own data-parallel groups, at any stage"),
    PARAMETERS.name: (_GATHER, "parameters at stage 3, for the forward and the backward pass: all-gather"),
    BACKWARD.name: (_GATHER, "parameters at stage 3 for the backward pass, where it has a width of its own"),
    attention.FORWARD.name: (_ULYSSES, "queries, keys, values and output of Ulysses' attention: all-to-all"),
    attention.BACKWARD.name: (_ULYSSES, "their gradients: all-to-all"),
    experts.DISPATCH.name: (_EXPERTS, "tokens to their experts: all-to-all"),
    experts.DISPATCH_BACKWARD.name: (_EXPERTS, "their gradients: all-to-all"),
    experts.COMBINE.name: (_EXPERTS, "the experts' outputs back: all-to-all"),
    experts.COMBINE_BACKWARD.name: (_EXPERTS, "their gradients: all-to-all"),
    **{site.name: covers for site, covers in (pipeline.COVERS | tensor_parallel.COVERS).items()},
    TIED.name: pipeline.TIED_COVERS,
}


def places(reduction: Reduction | None) -> list[Seam]:
    """Return the seams of all functions, for one engine's reduction. None: only to verify them."""
    reductions = [*_of_engine(reduction), *_of_stages_1_and_2(reduction), *_of_stage_3(reduction)]
    return [*reductions, *_of_parameters(reduction), *pipeline.places(reduction), *_of_the_run(reduction)]


def _collective(reduction: Reduction | None, name: str) -> Function | None:
    """Return a collective for the functions to call; None, never called, if they are only verified."""
    return getattr(reduction, name, None)


def _of_engine(reduction: Reduction | None) -> list[Seam]:
    all_reduce = _collective(reduction, "all_reduce")
    return [
        Seam(
            "deepspeed.engine.bucket",
            ENGINE,
            "DeepSpeedEngine.allreduce_bucket",
            ("self", "bucket", "dp_group", "dp_world_size"),
            lambda original: _bucket(original, rebound(original, "dist.all_reduce", all_reduce), reduction),
            "all-reduce of a bucket: stage 0, BF16_Optimizer, pipeline engine, experts",
        ),
        Seam(
            "deepspeed.engine.sparse",
            ENGINE,
            "DeepSpeedEngine.sparse_allreduce",
            ("self", "sparse", "dp_group", "dp_world_size"),
            lambda original: _counted(original, reduction),
            "counts sparse gradients, which stay in full precision",
        ),
    ]


def _of_stages_1_and_2(reduction: Reduction | None) -> list[Seam]:
    all_reduce, reduce = _collective(reduction, "all_reduce"), _collective(reduction, "reduce")
    bucket = ("self", "bucket", "communication_data_type", "rank", "log", "divide", "process_group")
    ranks = ("self", "small_bucket", "communication_data_type", "log", "divide", "process_group", "bucket_ranks")
    return [
        Seam(
            "deepspeed.zero.bucket",
            STAGE_1_AND_2,
            "DeepSpeedZeroOptimizer.allreduce_bucket",
            bucket,
            lambda original: _bucket(
                original, rebound(rebound(original, "dist.all_reduce", all_reduce), "dist.reduce", reduce), reduction
            ),
            "reduction of a bucket at stages 1 and 2, to all ranks or to one owner",
        ),
        Seam(
            "deepspeed.zero.owners",
            STAGE_1_AND_2,
            "DeepSpeedZeroOptimizer.allreduce_and_copy_with_multiple_ranks",
            ((*ranks, "output_bucket"), ranks),  # with the last one from 0.19.8 on
            _to_owners,
            "names the owners of a bucket's slices",
        ),
        Seam(
            "deepspeed.zero.whole",
            STAGE_1_AND_2,
            "DeepSpeedZeroOptimizer.gradient_reduction_w_predivide",
            ("self", "tensor", "communication_data_type"),
            lambda original: _bucket(original, rebound(original, "dist.all_reduce", all_reduce), reduction),
            "all-reduce of a bucket at stages 1 and 2 with reduce_scatter: false",
        ),
    ]


def _of_stage_3(reduction: Reduction | None) -> list[Seam]:
    all_reduce = _collective(reduction, "all_reduce")
    coalesced = _collective(reduction, "reduce_scatter_coalesced")
    return [
        Seam(
            "deepspeed.stage3.scatter",
            STAGE_3,
            "DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
            (("args", "kwargs"), ("self", "params_to_reduce", "communication_data_type")),
            lambda original: _bucket(
                original, _rebound_below_nvtx(original, "reduce_scatter_coalesced", coalesced), reduction
            ),
            "reduce-scatter of a bucket at stage 3",
        ),
        Seam(
            "deepspeed.stage3.whole",
            STAGE_3,
            "DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads",
            (("args", "kwargs"), ("self", "buffer_to_reduce", "communication_data_type")),
            lambda original: _bucket(original, _rebound_below_nvtx(original, "dist.all_reduce", all_reduce), reduction),
            "all-reduce of a bucket at stage 3 with reduce_scatter: false",
        ),
    ]


def _of_parameters(reduction: Reduction | None) -> list[Seam]:
    """Return the seams of gathers of parameters that every rank keeps."""
    zero = ("parallel_partitioned_bit16_groups", "single_partition_of_fp32_groups", "bit16_groups")
    bf16 = ("bf16_partitioned_groups", "fp32_groups_flat_partition", "bf16_groups")
    return [
        Seam(
            "deepspeed.zero.step",
            STAGE_1_AND_2,
            "DeepSpeedZeroOptimizer.step",
            ("self", "closure"),
            lambda original: _gathered(original, reduction, zero),
            "all-gather of the parameters after a step at stages 1 and 2",
        ),
        Seam(
            "deepspeed.zero.parameters",
            STAGE_1_AND_2,
            "DeepSpeedZeroOptimizer.update_lp_params",
            ("self",),
            lambda original: _gathered(original, reduction, zero),
            "all-gather of the parameters after a universal checkpoint at stages 1 and 2",
        ),
        Seam(
            "deepspeed.bf16.parameters",
            "deepspeed.runtime.bf16_optimizer",
            "BF16_Optimizer.update_lp_params",
            ("self",),
            lambda original: _gathered(original, reduction, bf16),
            "all-gather of the parameters of BF16_Optimizer",
        ),
    ]


def _gathered(original: Function, reduction: Reduction | None, attributes: tuple[str, str, str]) -> Function:
    """Return `original` with our gather. attributes: see Parameters.apart."""
    name = "all_gather_dp_groups"
    if reduction is None:
        return rebound(original, name, None)
    if reduction.parameters is None:
        return rebound(original, name, counted(reduction.site(parameters(reduction.stage)), reduction.config))
    return reduction.parameters.apart(rebound(original, name, reduction.parameters.gather), *attributes)


def _of_the_run(reduction: Reduction | None) -> list[Seam]:
    """Return the seams of checkpoints and monitors."""
    return [
        Seam(
            "deepspeed.engine.save",
            ENGINE,
            "DeepSpeedEngine.save_checkpoint",
            ("self", "save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"),
            lambda original: _saves(original, reduction),
            "writes the state of a resumed run into a checkpoint's folder",
        ),
        Seam(
            "deepspeed.engine.load",
            ENGINE,
            "DeepSpeedEngine.load_checkpoint",
            (
                *("self", "load_dir", "tag", "load_module_strict", "load_optimizer_states"),
                *("load_lr_scheduler_states", "load_module_only", "custom_load_fn"),
            ),
            lambda original: _loads(original, reduction),
            "reads the state of a resumed run in a checkpoint's folder",
        ),
        Seam(
            "deepspeed.monitor",
            "deepspeed.monitor.monitor",
            "MonitorMaster.write_events",
            ("self", "event_list"),
            lambda original: _with_ours(original, reduction),
            "gives the engine's monitors our scalars along with DeepSpeed's own",
        ),
    ]


def _bucket(original: Function, body: Function, reduction: Reduction | None) -> Function:
    """Return `body` with the copies in its bucket, the first argument, marked for the reduction.

    The bucket is a tensor, a list of tensors, or, at stage 3, a list of parameters.
    """

    @functools.wraps(original)
    def reduces(self: Any, bucket: Any, *args: Any, **kwargs: Any) -> Any:
        assert reduction is not None
        tensors: list[Any] = [bucket] if isinstance(bucket, Tensor) else bucket
        gradients: list[Any] = [one.grad if isinstance(one, Parameter) else one for one in tensors]
        with reduction.of(gradients):
            return body(self, bucket, *args, **kwargs)

    return reduces


def _to_owners(original: Function) -> Function:
    """Return `original` (allreduce_and_copy_with_multiple_ranks) with slices sent to their owners only.

    It copies the slices of its own rank and drops the rest, so no other slice is needed.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def allreduce_and_copy_with_multiple_ranks(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        with owned(_slices(given["small_bucket"], given["bucket_ranks"])):
            original(*args, **kwargs)

    return allreduce_and_copy_with_multiple_ranks


def _slices(bucket: Iterable[Any], ranks: Iterable[int | frozenset[int]]) -> Slices | None:
    """Return (owner, elements) of each tensor; None if a tensor has several owners (matrices of Muon)."""
    slices = []
    for tensor, owners in zip(bucket, ranks, strict=True):
        owner = owners if isinstance(owners, frozenset) else frozenset((owners,))
        if len(owner) > 1:
            return None
        slices.append((next(iter(owner)), tensor.numel()))
    return slices


def _counted(original: Function, reduction: Reduction | None) -> Function:
    @functools.wraps(original)
    def sparse_allreduce(self: Any, sparse: Any, dp_group: Any, dp_world_size: Any = None) -> Any:
        assert reduction is not None
        reduction.record_sparse(sparse.values, dp_group)
        with ours:
            return original(self, sparse, dp_group, dp_world_size)

    return sparse_allreduce


def _saves(original: Function, reduction: Reduction | None) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert reduction is not None
        given = signature.bind(self, *args, **kwargs).arguments
        tag = given.get("tag")
        folder = os.path.join(given["save_dir"], f"global_step{self.global_steps}" if tag is None else str(tag))
        # Before DeepSpeed, which writes the name of the latest checkpoint at the end.
        reduction.save(folder)
        return original(self, *args, **kwargs)

    return save_checkpoint


def _loads(original: Function, reduction: Reduction | None) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert reduction is not None
        path, client_state = original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        whole = given.get("load_optimizer_states", True) and not given.get("load_module_only", False)
        if path is not None and whole:
            reduction.load(os.path.dirname(path))
        elif path is not None:
            reduction.forget()
        return path, client_state

    return load_checkpoint


def _with_ours(original: Function, reduction: Reduction | None) -> Function:
    @functools.wraps(original)
    def write_events(self: Any, event_list: Any) -> None:
        assert reduction is not None
        original(self, event_list)
        ours = reduction.events()
        if ours:
            original(self, ours)

    return write_events


def _rebound_below_nvtx(function: Function, path: str, new: Any) -> Function:
    """Return `rebound` of the function inside DeepSpeed's decorator `instrument_w_nvtx`, which does not expose it."""
    if function.__name__ != "wrapped_fn":
        return rebound(function, path, new)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "func" not in cells:
        raise PatchError("a decorator hides the body of the function")
    from deepspeed.utils import instrument_w_nvtx

    decorated: Function = instrument_w_nvtx(rebound(cells["func"].cell_contents, path, new))
    return decorated
