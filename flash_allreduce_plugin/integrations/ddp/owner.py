"""The model of a DDP communication hook: its process group, and the division of `join`.

torch calls a hook with a bucket and does not name the model. The hook finds it in this order:

1. In register_comm_hook, which reads the name of a hook without a wrapper.
2. In the state, if that is the model.
3. By the first bucket: the one live DistributedDataParallel with a hook that trains the bucket's parameters.
4. Otherwise the first step raises. No hook assumes the default group.

A hook belongs to one model: it counts the model's steps, and keeps residuals of its buckets.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from flash_allreduce_plugin.collectives import replicated_params


class Owner:
    """A weak reference to the model of one hook.

    has_dtensors: True if the model holds DTensors; other ranks then have copies of its other parameters.
    split: dimensions of a device mesh over which parameters of the model are split.
    """

    def __init__(self, replicated: Sequence[torch.Tensor] = ()) -> None:
        """replicated: parameters that the model must train."""
        self.has_dtensors = False
        self.split: replicated_params.Sharding = frozenset()
        self._replicated = replicated
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self._parameters: set[int] = set()  # identities; the model keeps them alive
        self._registered = False

    def registered_with(self, model: DistributedDataParallel) -> None:
        """Note that `model` takes the hook. Raises ValueError as `of`."""
        self._set(model)
        self._registered = True

    def of(self, state: Any, parameters: Sequence[torch.Tensor]) -> DistributedDataParallel:
        """Return the model that trains `parameters`, those of one bucket. state: the hook's first argument.

        Raises ValueError if no model or several models train them, if another model that is alive has the hook, and if
        the model does not train all of `replicated`.
        """
        model = None if self._model is None else self._model()
        if model is None or id(parameters[0]) not in self._parameters:
            model = _found([state] if isinstance(state, DistributedDataParallel) else None, parameters)
            self._set(model)
        return model

    def with_gradients(self) -> list[torch.Tensor]:
        """Return the model's parameters that have gradients now."""
        model = None if self._model is None else self._model()
        return [] if model is None else [one for one in model._module_parameters if one.grad is not None]

    def in_graph(self, state: Any, parameter: torch.Tensor) -> DistributedDataParallel:
        """Return the same in code that Dynamo may trace.

        Dynamo has no identities: in a wrapper each call breaks the graph and compares them outside.
        """
        model = self._model() if self._registered and self._model is not None else None
        return self._outside(state, parameter) if model is None else model

    @torch._disable_dynamo
    def _outside(self, state: Any, parameter: torch.Tensor) -> DistributedDataParallel:
        return self.of(state, [parameter])

    def _set(self, model: DistributedDataParallel) -> None:
        if self._serves_another(model):
            gc.collect()  # a model that is wrapped again leaves its former wrapper as garbage
        if self._serves_another(model):
            raise ValueError(
                "one ddp_hook serves two models; make a hook for each: "
                "model.register_comm_hook(None, fap.ddp_hook(config))."
            )
        parameters = set(map(id, model._module_parameters))
        unknown = [tuple(one.shape) for one in self._replicated if one.requires_grad and id(one) not in parameters]
        if unknown:
            raise ValueError(f"replicated has parameters of shapes {unknown}, of which the model reduces no gradient.")
        self._model, self._parameters = weakref.ref(model), parameters
        self.has_dtensors = any(hasattr(one, "_st_info") for one in model._module_parameters)
        self.split = frozenset().union(*map(sharding_of, model._module_parameters))

    def _serves_another(self, model: DistributedDataParallel) -> bool:
        return self._model is not None and self._model() not in (None, model)


def sharding_of(parameter: torch.Tensor) -> replicated_params.Sharding:
    """Return the layout of a DTensor; DDP has its local part (torch.distributed.tensor.parallel.ddp)."""
    spec = getattr(parameter, "_st_info", None)
    return frozenset() if spec is None else replicated_params.sharding(spec.mesh, spec.placements)


def group_of(state: Any) -> Any:
    """Return the process group that a hook's state is or has (a model, PowerSGDState); None if the state is None."""
    return getattr(state, "process_group", state)


def _found(
    models: Iterable[DistributedDataParallel] | None, parameters: Sequence[torch.Tensor]
) -> DistributedDataParallel:
    """Return the one model that trains all of `parameters`, by identity. models: None: all that are alive."""
    wanted = set(map(id, parameters))

    def matching() -> list[DistributedDataParallel]:
        return [one for one in (_alive() if models is None else models) if wanted <= _trained(one)]

    found = matching()
    if len(found) > 1:
        found.clear()
        gc.collect()
        found = matching()
    if len(found) != 1:
        count = len(found) or "none"
        raise ValueError(
            f"ddp_hook found {count} of DistributedDataParallel with a hook that trains the bucket's parameters; "
            "expected one. Give the model as the state: model.register_comm_hook(model, hook)."
        )
    return found[0]


def _alive() -> list[DistributedDataParallel]:
    """Return every model that the garbage collector tracks: some 0.1 s in a program of 300,000 objects."""
    return [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]


def _trained(model: DistributedDataParallel) -> set[int]:
    """Return the identities of the parameters that a model with a hook reduces."""
    hooks = getattr(model, "_comm_hooks", None)  # not there in a model that another thread is building
    return set(map(id, model._module_parameters)) if hooks else set()
