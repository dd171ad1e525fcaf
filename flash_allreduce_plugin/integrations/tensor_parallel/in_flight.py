"""A tensor that a collective of ours still writes. Import it where torch.distributed.tensor is loaded already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.utils._pytree import tree_map_only


class InFlight(functional.AsyncCollectiveTensor):
    """torch's AsyncCollectiveTensor with a handle of ours: views do not wait, every other use does.

    torch's own waits for a work that its registry knows by the tensor's storage. Ours is in no registry.
    """

    __slots__ = ["handle"]
    handle: Any

    @staticmethod
    def of(tensor: Tensor, handle: Any) -> InFlight:
        """Return `tensor`, to be used when handle.wait() has returned."""
        in_flight: InFlight = InFlight(tensor)
        in_flight.handle = handle
        return in_flight

    def trigger_wait(self) -> Tensor:
        if not self.completed:
            self.handle.wait()
            self.completed = True
        return self.elem

    def wait(self) -> Tensor:
        return self.trigger_wait()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        self.trigger_wait()
        return ["elem"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_view = functional._is_view_op(func)
        handles = []

        def unwrap(tensor: functional.AsyncCollectiveTensor) -> Tensor:
            if is_view and isinstance(tensor, InFlight) and not tensor.completed:
                handles.append(tensor.handle)
                return tensor.elem
            return tensor.trigger_wait()

        args = tree_map_only(functional.AsyncCollectiveTensor, unwrap, args)
        result = func(*args, **tree_map_only(functional.AsyncCollectiveTensor, unwrap, kwargs or {}))
        if not handles:
            return result
        return tree_map_only(torch.Tensor, lambda tensor: InFlight.of(tensor, handles[0]), result)
