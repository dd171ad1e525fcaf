"""The process groups of Megatron's models, taken from the models themselves.

A model has its groups from megatron.core.parallel_state, or from a ProcessGroupCollection of its own (Megatron-Bridge,
MIMO). parallel_state may then be uninitialized, or initialized with other sizes by an importer of weights. So a group
that parallel_state does not know is looked up in the live models:

    tensor parallel     .tp_group of a column- or row-parallel layer or an embedding that is not an expert's,
                        .pg_collection.tp of any module
    context parallel    .pg_collection.cp of any module
    bucket group        .bucket_groups and .expert_parallel_bucket_groups of DistributedDataParallel,
                        which has .tp_group and .pp_group

A look at all live objects takes about 0.1 s, once for each group and each new model. A group is what it was first
found to be: the collective that asks is a model's, so the model exists.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

Kind = Literal["tensor", "context"]

_LAYERS = ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding")

_kinds: WeakKeyDictionary[dist.ProcessGroup, frozenset[Kind]] = WeakKeyDictionary()


class Layout(NamedTuple):
    """Ranks among which the parameters of one model are split.

    tensor: of dense parameters. expert: of experts' parameters. stages: of the pipeline.
    """

    tensor: int
    expert: int
    stages: int


_layouts: WeakKeyDictionary[Any, Layout] = WeakKeyDictionary()  # of bucket groups


def is_tensor_parallel(group: dist.ProcessGroup | None) -> bool:
    """True if `group` is the tensor-parallel group of a model. False for experts' groups."""
    return _is("tensor", group)


def is_context_parallel(group: dist.ProcessGroup | None) -> bool:
    """True if `group` is the context-parallel group of a model."""
    return _is("context", group)


def layout_of(bucket_group: Any) -> Layout:
    """Return the layout of the model that owns a bucket group of megatron-core's DistributedDataParallel."""
    if bucket_group not in _layouts:
        for model in alive("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"):
            for name in ("bucket_groups", "expert_parallel_bucket_groups"):
                for one in _attribute(model, name, ()):
                    _layouts[one] = _layout(model)
    return _layouts.setdefault(bucket_group, _layout(None))


def _is(kind: Kind, group: dist.ProcessGroup | None) -> bool:
    if group is None:
        return False
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None:
        known = state.get_tensor_model_parallel_group if kind == "tensor" else state.get_context_parallel_group
        if group is known(check_initialized=False):
            return True
    kinds = _kinds.get(group)
    if kinds is None:
        kinds = _kinds[group] = frozenset(_kinds_of(group))
    return kind in kinds


def _kinds_of(group: dist.ProcessGroup) -> Iterator[Kind]:
    """Yield the kinds of `group` in the live modules."""
    layers = sys.modules.get("megatron.core.tensor_parallel.layers")
    parallel = tuple(getattr(layers, name) for name in _LAYERS if hasattr(layers, name))
    for module in alive("torch.nn", "Module"):
        collection = _attribute(module, "pg_collection", None) or _attribute(module, "model_comm_pgs", None)  # in 0.13
        dense = isinstance(module, parallel) and not _attribute(module, "is_expert", False)
        if getattr(collection, "tp", None) is group or (dense and _attribute(module, "tp_group", None) is group):
            yield "tensor"
        if getattr(collection, "cp", None) is group:
            yield "context"


def _layout(model: Any) -> Layout:
    """Return the layout of a model by its own groups, or by parallel_state's where it has none."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        tensor = state.get_tensor_model_parallel_world_size()
        expert = state.get_expert_tensor_parallel_world_size()
        known = Layout(tensor, expert, state.get_pipeline_model_parallel_world_size())
        own = _attribute(model, "tp_group", None)
        if own is None or own is state.get_tensor_model_parallel_group():
            return known
    else:
        known = Layout(2, 2, 2)  # unknown: too many copies in full precision, never too few
    tensor = _size(_attribute(model, "tp_group", None), known.tensor)
    # The model does not keep the tensor-parallel group of its experts: without it their whole parameters are taken
    # for copies as dense ones are.
    return Layout(tensor, tensor, _size(_attribute(model, "pp_group", None), known.stages))


def _size(group: Any, otherwise: int) -> int:
    """Ranks of a group, or of all in a list of groups."""
    if isinstance(group, (list, tuple)):
        return max((_size(one, otherwise) for one in group), default=otherwise)
    return otherwise if group is None else int(group.size())


def _attribute(owner: Any, name: str, otherwise: Any) -> Any:
    """Return an attribute that is set on the object itself; a module's __getattr__ is not asked."""
    return otherwise if owner is None else vars(owner).get(name, otherwise)


def alive(module: str, name: str) -> list[Any]:
    """Return every live object of a class; none if its module is not imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return [] if kind is None else [one for one in gc.get_objects() if issubclass(type(one), kind)]
