"""Attach to every model that FSDP shards while `fap.fsdp.enable` is on.

FSDP2: each group of parameters gets our reduce-scatter, and with param_bits our all-gather, as by the public setters of
FSDPModule. Between replicas (HSDP, `replicate`) torch has no setter for another all-reduce: the `dist.all_reduce` of
its foreach_reduce is replaced. FSDP1: the root gets a hook when torch determines the root.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.fsdp._init_utils import HYBRID_SHARDING_STRATEGIES

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.config import FlashConfig, refusals
from flash_allreduce_plugin.integrations import autosave, patching
from flash_allreduce_plugin.integrations.contract import ModelIntegration, described, unknown_group
from flash_allreduce_plugin.integrations.fsdp import fsdp1, fsdp2
from flash_allreduce_plugin.integrations.optimizer_steps import optimizer_steps
from flash_allreduce_plugin.integrations.patching import Function, Patchset, Seam
from flash_allreduce_plugin.integrations.registry import BY_NAME
from flash_allreduce_plugin.policy import FROZEN, Role, Site, widths_follow_errors
from flash_allreduce_plugin.telemetry import notices
from flash_allreduce_plugin.telemetry.other_traffic import counted_at

GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
MODULE = "torch.distributed.fsdp._fully_shard._fully_shard"
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
RUNTIME = "torch.distributed.fsdp._runtime_utils"

SITES = {
    fsdp2.GRADIENTS.name: (f"{GROUP}.FSDPParamGroup", "the reduce-scatter of FSDP2's gradients"),
    fsdp2.REPLICAS.name: (f"{GROUP}.foreach_reduce", "the all-reduce of gradients between FSDP2's replicas"),
    fsdp2.PARAMETERS.name: (f"{GROUP}.FSDPParamGroup", "the all-gather of FSDP2's parameters, with param_bits"),
    fsdp1.SITE.name: (f"{FSDP1}.FullyShardedDataParallel", "the gradients of FSDP1"),
}
_PARAMETERS = Site(fsdp2.PARAMETERS.name, Role.PARAMETER)  # while param_bits is "full"
_found: WeakKeyDictionary[FSDPParamGroup, tuple[Any, Any]] = WeakKeyDictionary()  # the replaced communication
_exact: WeakKeyDictionary[FSDPParamGroup, FlashConfig] = WeakKeyDictionary()  # param_bits would quantize their gathers
_said: WeakSet[Any] = WeakSet()  # comm_ctx, common to the groups of a model, of models with a line
_roots: WeakSet[FullyShardedDataParallel] = WeakSet()


class _FSDP(ModelIntegration):
    def stopped(self) -> None:
        """Restore torch's own communication of attached models."""
        for group, (reduce_scatter, all_gather) in _found.items():
            _put_back(group, reduce_scatter, all_gather)
        for root in list(_roots):
            _take_hook(root)
        _found.clear()
        _exact.clear()


def _patchset() -> Patchset:
    group, module, fsdp1_class = "FSDPParamGroup", "FSDPModule", "FullyShardedDataParallel"
    theirs = "lets the program's own go before ours"
    seams: list[tuple[str, str, str, Any, Callable[[Function], Function], str]] = [
        ("group", GROUP, f"{group}.__init__", ("self", "params", "modules", "mesh_info", ...), _with_ours, "FSDP2"),
        ("reduce_scatter", MODULE, f"{module}.set_custom_reduce_scatter", ("self", "comm"), _noticing, theirs),
        ("all_gather", MODULE, f"{module}.set_custom_all_gather", ("self", "comm"), _noticing, theirs),
        ("parameters", GROUP, f"{group}.unshard", ("self", "async_op"), _counting, "counts gathers of parameters"),
        ("replicas", GROUP, "foreach_reduce", ("fsdp_params", ...), _with_replicas, "the replicas' all-reduce"),
        ("root", RUNTIME, "_share_state_and_init_handle_attrs", ("root_state", "root_module"), _with_hook, "FSDP1"),
        ("hook", FSDP1, f"{fsdp1_class}.register_comm_hook", ("self", "state", "hook"), _giving_way, theirs),
    ]
    for name in ("set_symm_mem", "set_allocate_memory_from_process_group"):
        if hasattr(FSDPParamGroup, name):  # of recent releases; each refuses a group with communication of others
            seams.append((name, GROUP, f"{group}.{name}", ("self", ...), _given_back, theirs))
    made = [Seam(f"fsdp.{name}", *rest) for name, *rest in seams]
    return Patchset("fsdp", made, f"{BY_NAME['fsdp'].fits} (installed: {torch.__version__})")


integration = _FSDP("fsdp", _patchset, SITES)


# ---- FSDP2 ----


class _Served:
    """The mixin of a class of fsdp2.py for one group of parameters. It counts the optimizer's steps."""

    _lacks: Mapping[str, str] = integration.row.refused
    _serves: Container[str] = refusals.OF_MEGATRON  # the environment may have them for another integration
    _attached_to: str | None = None
    config: FlashConfig

    def __init__(self, config: FlashConfig, group: FSDPParamGroup) -> None:
        self._of = weakref.ref(group)
        super().__init__(config)  # type: ignore[call-arg]

    def _step(self) -> int:
        return optimizer_steps.finished

    def _begin(self, site: Site, calls: Mapping[str, Any]) -> Site:
        autosave.before_reduction()
        group = self._of()
        if group is not None and group.comm_ctx not in _said:
            _said.add(group.comm_ctx)
            integration.note(_line(group, self.config))
            few = None if self.config.param_bits == "full" else notices.few_bits("param_bits", self.config.param_bits)
            if few is not None:
                integration.note(few)
        return super()._begin(site, calls)  # type: ignore[misc]


class _ReduceScatter(_Served, fsdp2.FlashReduceScatter):
    """Also keeps the all-reduce between replicas."""

    def __init__(self, config: FlashConfig, group: FSDPParamGroup) -> None:
        super().__init__(config, group)
        self.replicas = _Replicas(config, group) if isinstance(group.mesh_info, DDPMeshInfo) else None


class _Replicas(_Served, fsdp2.Gradients):
    """The all-reduce between replicas, called by torch's foreach_reduce."""

    def __call__(self, tensor: torch.Tensor, op: Any, group: dist.ProcessGroup, calls: Mapping[str, Any]) -> None:
        site = self._begin(fsdp2.REPLICAS, calls)
        fsdp2.all_reduced(calls)
        reductions.all_reduce(
            tensor,
            op,
            group,
            self.config,
            site=site,
            step=self._step(),
            feedback=self._slot(calls),
            exact=fsdp2.copies_in(calls, self.config),
            plain=lambda: dist.all_reduce(tensor, op=op, group=group),
        )


class _AllGather(_Served, fsdp2.FlashAllGather):
    """A group with frozen parameters, or with copies on tensor-parallel ranks, is gathered in full precision.

    Copies must stay equal.
    """

    def __init__(self, config: FlashConfig, group: FSDPParamGroup, has_copies: bool) -> None:
        changed = {"bits": config.param_bits, "gather_bits": None, "param_bits": "full", "quantize_frozen": False}
        changed["error_feedback"] = False
        super().__init__(config.model_copy(update=changed), group)
        self._copies, self._rounds_frozen = has_copies, config.quantize_frozen

    @property
    def _exactly(self) -> str | None:  # type: ignore[override]
        if self._copies:
            return replicated_params.REASON
        group = self._of()
        frozen = group is not None and not all(one.sharded_param.requires_grad for one in group.fsdp_params)
        return FROZEN if frozen and not self._rounds_frozen else None

    def _begin(self, site: Site, calls: Mapping[str, Any]) -> Site:
        return fsdp2.FlashAllGather._begin(self, site, calls)  # the gradients print the line


def _with_ours(original: Function) -> Function:
    @functools.wraps(original)
    def __init__(self: FSDPParamGroup, *arguments: Any, **keywords: Any) -> None:
        config = integration.for_a_model()
        original(self, *arguments, **keywords)
        why = unknown_group(_groups(self), self.device)
        if why is not None:
            line = f"FSDP2 ({type(self.modules[0]).__name__}) is left alone: {why}"
            if line not in integration.models:
                integration.note(line)
            return
        has_copies = _has_copies(self, config)  # may refuse the configuration, before the model trains
        alive = weakref.ref(self)
        autosave.watch(lambda: _sharded(alive()), _size(self, "shard") * _size(self, "replicate"))
        _found[self] = (self._reduce_scatter_comm, self._all_gather_comm)
        self._reduce_scatter_comm = _ReduceScatter(config, self)
        if isinstance(self.mesh_info, FSDPMeshInfo) and config.param_bits != "full":
            self._all_gather_comm = _AllGather(config, self, has_copies)
        elif isinstance(self.mesh_info, FSDPMeshInfo) and not has_copies:
            _exact[self] = config

    return __init__


def _counting(original: Function) -> Function:
    @functools.wraps(original)
    def unshard(self: FSDPParamGroup, *arguments: Any, **keywords: Any) -> None:
        ours = _found.get(self)
        if ours is None or self not in _exact or self._all_gather_comm is not ours[1]:
            return original(self, *arguments, **keywords)
        config = _exact[self]
        site = fsdp2.first_passes(config, None).of(_PARAMETERS)
        with counted_at(site, config):
            original(self, *arguments, **keywords)

    return unshard


def _line(group: FSDPParamGroup, config: FlashConfig) -> str:
    """Return the line about the model of a group. The groups of a model share one comm_ctx."""
    groups = [one for one in _found if one.comm_ctx is group.comm_ctx]
    ours = [one for one in groups if isinstance(one._reduce_scatter_comm, _ReduceScatter)]
    gathers = [one for one in groups if isinstance(one._all_gather_comm, _AllGather)]
    state: Any = _get_module_fsdp_state(group.modules[0])
    root = next(one for one in state._state_ctx.all_states if one._is_root)._modules[0]
    name = type(root).__mro__[2].__name__  # below the class that fully_shard has created
    meshes = {f"{_size(one, 'shard')} x {_size(one, 'replicate')}" for one in groups}
    to = f"FSDP2 ({described(name, root.parameters())}, shards x replicas {' and '.join(sorted(meshes))})"
    gives = f"gradients of {len(ours)} of {len(groups)} modules in {config.bits} bits"
    if config.param_bits == "full":
        gives += ", parameters in full precision"
    else:
        gives += f", parameters of {len(gathers)} in {config.param_bits}"
    return notices.attached(to, gives, config, said=("bits", "param_bits"))


def _groups(group: FSDPParamGroup) -> list[dist.ProcessGroup]:
    names = ("shard_process_group", "replicate_process_group")
    return [getattr(group.mesh_info, name) for name in names if hasattr(group.mesh_info, name)]


def _sharded(group: FSDPParamGroup | None) -> list[torch.Tensor]:
    """Return this rank's part of a group's parameters."""
    parameters: list[Any] = [] if group is None else group.fsdp_params
    return [parameter.sharded_param.to_local() for parameter in parameters]


def _size(group: FSDPParamGroup, dimension: str) -> int:
    """Return the ranks over which a group of parameters is sharded or replicated; 1 if it is not."""
    return int(getattr(group.mesh_info, f"{dimension}_mesh_size", 1))


def _has_copies(group: FSDPParamGroup, config: FlashConfig) -> bool:
    sharded: list[Any] = [parameter.sharded_param for parameter in group.fsdp_params]
    return any(
        replicated_params.among(
            [replicated_params.sharding(one.device_mesh, one.placements) for one in sharded],
            widths_follow_errors(config),
        )
    )


def _noticing(original: Function) -> Function:
    @functools.wraps(original)
    def set_custom(self: Any, comm: Any) -> None:
        original(self, comm)
        if not isinstance(comm, _Served):
            line = f"FSDP2 ({type(self).__name__}): the program's own {type(comm).__name__} replaces ours"
            integration.note(line)

    return set_custom


def _given_back(original: Function) -> Function:
    @functools.wraps(original)
    def set_buffers(self: FSDPParamGroup, *arguments: Any, **keywords: Any) -> None:
        if self in _found:
            name = type(self.modules[0]).__name__
            integration.note(f"FSDP2 ({name}) is left alone: {original.__name__} needs torch's own communication")
            _put_back(self, *_found.pop(self))
        original(self, *arguments, **keywords)

    return set_buffers


def _put_back(group: FSDPParamGroup, reduce_scatter: Any, all_gather: Any) -> None:
    if isinstance(group._reduce_scatter_comm, _Served):
        group._reduce_scatter_comm = reduce_scatter
    if isinstance(group._all_gather_comm, _Served):
        group._all_gather_comm = all_gather


def _with_replicas(original: Function) -> Function:
    def all_reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> Any:
        calls = patching.locals_of("foreach_reduce") or {}
        ours = calls.get("reduce_scatter_comm")
        if not isinstance(ours, _ReduceScatter) or ours.replicas is None:
            return dist.all_reduce(tensor, op=op, group=group)
        return ours.replicas(tensor, op, group, calls)

    return patching.rebound(original, "dist.all_reduce", all_reduce)


# ---- FSDP1 ----


def _with_hook(original: Function) -> Function:
    @functools.wraps(original)
    def _share_state_and_init_handle_attrs(root_state: Any, root_module: Any) -> None:
        config = integration.for_a_model()
        original(root_state, root_module)
        if not isinstance(root_state, FullyShardedDataParallel):
            return
        size = described(type(root_state.module).__name__, root_module.parameters())
        model = f"FullyShardedDataParallel ({size} on this rank)"
        why = _why_not(root_state, config)
        if why is not None:
            integration.note(f"{model} is left alone: {why}")
            return
        autosave.watch(None, dist.get_world_size(root_state.process_group))
        served = config
        if config.param_bits != "full":
            model += ", parameters in full precision, whose gathers have no hook"
        without = {"error_feedback": False, "param_bits": "full", "quantize_frozen": False}
        if any(getattr(config, key) != value for key, value in without.items()):
            served = config.model_copy(update=without)
        _roots.add(root_state)
        root_state.register_comm_hook(None, fsdp1.hook_of(served, model, lambda: optimizer_steps.finished))

    return _share_state_and_init_handle_attrs


def _why_not(root: FullyShardedDataParallel, config: FlashConfig) -> str | None:
    """Return why a model cannot be quantized as a whole, or None."""
    states = [one for one in root.modules() if isinstance(one, FullyShardedDataParallel)]
    if any(one.sharding_strategy in HYBRID_SHARDING_STRATEGIES for one in states):
        return "torch takes no hook for the hybrid strategies"
    if any(getattr(one, "_fsdp_extension", None) is not None for one in states):
        return "with tensor parallelism FSDP1 does not identify copies of parameters; take FSDP2"
    if config.given().get("error_feedback"):
        return f"error_feedback has no effect there: {fsdp1.LACKS['error_feedback']}"
    return None


def _giving_way(original: Function) -> Function:
    @functools.wraps(original)
    def register_comm_hook(self: FullyShardedDataParallel, state: object, hook: Any) -> None:
        self.check_is_root()  # makes torch determine the root, which then has our hook
        if self in _roots and self._comm_hook is not None:
            _take_hook(self)
            name = getattr(hook, "__qualname__", "hook")
            line = f"FullyShardedDataParallel: the program's own hook {name} replaces ours"
            integration.note(line)
        original(self, state, hook)

    return register_comm_hook


def _take_hook(root: FullyShardedDataParallel) -> None:
    """Undo register_comm_hook."""
    for one in root.modules():
        if isinstance(one, FullyShardedDataParallel):
            one._comm_hook = one._comm_hook_state = None
    _roots.discard(root)
