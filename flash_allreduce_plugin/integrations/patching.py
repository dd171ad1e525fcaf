"""Seams: places where another library's function is replaced, as data that can be checked, applied, undone
and reported.

A `Seam` names one symbol, the parameters it must have and how its replacement is made. A `Patchset` applies a
list of them, all or none, and puts back exactly the objects it found. Nothing here knows which library is
patched.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from flash_allreduce_plugin.errors import PatchError

_MARKER = "__flash_allreduce_seam__"
# On a function with a seam in its source (see in_source): there is nothing to replace.
_IN_SOURCE = "__flash_allreduce_in_source__"
_MISSING = object()

#: A function of another library, or its replacement.
Function = Callable[..., Any]
Parameters = tuple[str | types.EllipsisType, ...]


@dataclass(frozen=True, slots=True)
class Seam:
    """One symbol of another library and its replacement.

    id: stable name, used in reports and counters.
    module, attribute: where the symbol is; attribute may be dotted ("Class.method").
    signature: the parameter names it must have, in order, or a tuple of such tuples where versions differ; `...`
    at the end stands for any others. Anything else means a version this seam was not written for.
    replacement: is given the original function, returns the new one.
    covers: one sentence for reports and documentation.
    optional: releases without the symbol or its module are supported too; nothing is replaced there.
    """

    id: str
    module: str
    attribute: str
    signature: Parameters | tuple[Parameters, ...]
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
    covers: str
    optional: bool = False

    @property
    def target(self) -> str:
        return f"{self.module}.{self.attribute}"

    def wrong_parameters(self, found: tuple[str, ...]) -> str | None:
        """Return why a function with parameters named `found` does not fit, or None."""
        several = self.signature and isinstance(self.signature[0], tuple)
        accepted: tuple[Any, ...] = self.signature if several else (self.signature,)
        for names in accepted:
            open_ended = names[-1:] == (...,)
            if found == names or (open_ended and found[: len(names) - 1] == names[:-1]):
                return None
        expected = " or ".join(f"({', '.join('...' if n is ... else n for n in names)})" for names in accepted)
        return f"expected the parameters {expected}, found ({', '.join(found)})"


@dataclass(slots=True)
class _Patch:
    """A resolved seam: `raw` is the owner's own `__dict__` entry (a staticmethod stays one)."""

    seam: Seam
    owner: Any
    name: str
    raw: Any
    new: Any

    def is_in_place(self) -> bool:
        return vars(self.owner).get(self.name) is self.new

    def is_undone(self) -> bool:
        return vars(self.owner).get(self.name, _MISSING) is self.raw

    def undo(self) -> None:
        if self.is_undone():
            return
        if self.raw is _MISSING:  # it was inherited: the owner had no entry of its own
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.raw)


class Patchset:
    """A list of seams that is applied and undone as one.

    supported: the versions the seams were written for, quoted in errors ("megatron-core 0.13 to 0.19").
    """

    def __init__(self, name: str, seams: Sequence[Seam], supported: str = "the version it was written for") -> None:
        self.name = name
        self.seams = tuple(seams)
        self.supported = supported
        self._applied: list[_Patch] = []

    @property
    def applied(self) -> bool:
        return bool(self._applied)

    def verify(self) -> None:
        """Check that every symbol exists, has the expected parameters and can be replaced; PatchError
        otherwise.

        There is nothing left to check once it is applied.
        """
        if not self._applied:
            self._prepare()

    def apply(self) -> None:
        """Replace every symbol, or none: a failure restores the replaced ones. Does nothing if applied."""
        if self._applied:
            return
        patches = self._prepare()
        done: list[_Patch] = []
        try:
            for patch in patches:
                done.append(patch)
                setattr(patch.owner, patch.name, patch.new)
        except BaseException as error:
            for replaced in reversed(done):
                replaced.undo()
            if not isinstance(error, Exception):
                raise
            raise PatchError(
                f"{self.name}: {patch.seam.target} could not be replaced ({error}); nothing was changed"
            ) from error
        self._applied = patches

    def restore(self) -> None:
        """Restore exactly the objects that `apply` found. Does nothing if not applied.

        Raises PatchError, and changes nothing, if one of the symbols was replaced after us: the original would silently
        drop that patch.
        """
        self.refuse_replaced()
        for patch in reversed(self._applied):
            patch.undo()
        self._applied = []

    def refuse_replaced(self) -> None:
        """Raise PatchError if one of the symbols was replaced after us."""
        for patch in self._applied:
            if not patch.is_in_place() and not patch.is_undone():
                raise PatchError(
                    f"{self.name}: {patch.seam.target} (seam {patch.seam.id}) was replaced again after us by "
                    f"{_describe(vars(patch.owner).get(patch.name))}; undo that first, nothing was restored"
                )

    def report(self) -> dict[str, dict[str, Any]]:
        """Per seam id: `target`, `covers`, and whether our replacement stands there now (`in_place`)."""
        in_place = {patch.seam.id: patch.is_in_place() for patch in self._applied}
        return {
            seam.id: {"target": seam.target, "covers": seam.covers, "in_place": in_place.get(seam.id, False)}
            for seam in self.seams
        }

    def _prepare(self) -> list[_Patch]:
        resolved = [self._resolve(seam) for seam in self.seams]
        return [patch for patch in resolved if patch is not None]

    def _resolve(self, seam: Seam) -> _Patch | None:
        path = seam.attribute.split(".")
        try:
            owner: Any = importlib.import_module(seam.module)
        except ImportError as error:
            if seam.optional:
                return None
            raise self._unsupported(seam, f"importing {seam.module} failed: {error}") from error
        try:
            for part in path[:-1]:
                owner = getattr(owner, part)
            found = getattr(owner, path[-1])
        except AttributeError as error:
            if seam.optional:
                return None
            raise self._unsupported(seam, f"it does not exist ({error})") from error
        if getattr(found, _MARKER, None) is not None:
            marker = getattr(found, _MARKER)
            raise PatchError(f"{self.name}: {seam.target} already carries the seam {marker}; restore that")
        raw = vars(owner).get(path[-1], _MISSING)
        if not isinstance(found, types.FunctionType):
            raise self._unsupported(seam, f"expected a Python function, found {_describe(found)}")
        in_source = is_in_source(found, seam.id)
        if in_source:
            found = below_mark(found)
        parameters = tuple(inspect.signature(found).parameters)
        wrong = seam.wrong_parameters(parameters)
        if wrong is not None:
            raise self._unsupported(seam, wrong)
        try:
            replacement: Any = seam.replacement(found)
        except PatchError as error:
            raise self._unsupported(seam, str(error)) from error
        if in_source:
            return _Patch(seam, owner, path[-1], raw, raw)
        replacement.__wrapped__ = found
        setattr(replacement, _MARKER, seam.id)
        static = isinstance(inspect.getattr_static(owner, path[-1]), staticmethod)
        return _Patch(seam, owner, path[-1], raw, staticmethod(replacement) if static else replacement)

    def _unsupported(self, seam: Seam, found: str) -> PatchError:
        return PatchError(
            f"{self.name}: cannot patch {seam.target}: {found}; nothing was changed. Supported: {self.supported}"
        )


def in_source(seam_id: str, replacement: Callable[..., Callable[..., Any] | None]) -> Any:
    """A decorator for sources that carry a seam themselves, so that nothing has to be replaced while they run.

    replacement: asked at every call, with the decorated function and the positional arguments of the call; its answer
    is called, the function itself if None.
    """

    def decorate(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*arguments: Any, **keywords: Any) -> Any:
            return (replacement(original, *arguments) or original)(*arguments, **keywords)

        setattr(function, _IN_SOURCE, seam_id)
        return function

    return decorate


def is_in_source(function: Callable[..., Any], seam_id: str) -> bool:
    """Return True if the function has a seam in its source, by `in_source`."""
    return getattr(function, _IN_SOURCE, None) == seam_id


def below_mark(function: Any) -> Callable[..., Any]:
    """The function that `in_source` decorated."""
    return cast(types.FunctionType, function.__wrapped__)


def rebound(function: Callable[..., Any], path: str, new: Any) -> Callable[..., Any]:
    """Return a copy of `function` with `new` in place of `path` in its body. Other code still uses the original.

    path is a global name ("_reduce") or a dotted access that starts with one
    ("torch.distributed.all_reduce"). The copy shares the code object, so the rest of the function is the
    library's own; every other global is looked up live in its module. Decorators that used functools.wraps
    and hold the function in their closure are rebuilt around the copy.

    Raises PatchError if neither the function's code nor that of a function inside it uses every name of `path` (the
    replacement would silently never run), or if a decorator hides the function.
    """
    if not isinstance(function, types.FunctionType):
        raise PatchError(f"{_describe(function)} is not a Python function, its globals cannot be rebound")
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:
        cells = function.__closure__ or ()
        if not any(_contents(cell) is inner for cell in cells):
            raise PatchError(f"a decorator hides the body of {_describe(function)}")
        copy = rebound(inner, path, new)
        closure = tuple(types.CellType(copy) if _contents(cell) is inner else cell for cell in cells)
        outer: Any = _copy_function(function, function.__globals__, closure)
        outer.__wrapped__ = copy  # so that it can be rebound once more
        return cast(types.FunctionType, outer)
    head, *rest = path.split(".")
    used = names_used(function.__code__)
    if any(name not in used for name in (head, *rest)):
        raise PatchError(f"{_describe(function)} does not use {path}")
    if rest:
        new = _overlay(function.__globals__[head], rest, new)
    return _copy_function(function, _Globals(function.__globals__, {head: new}), function.__closure__)


def names_used(code: types.CodeType) -> set[str]:
    """The globals and attributes that a function names, and those of the functions inside it, which see its globals."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(names_used, inner))


class _Globals(dict[str, Any]):
    """Globals of a rebound function: a few names of its own, every other one looked up live in the module.

    CPython's LOAD_GLOBAL takes the generic item access, and with it `__missing__`, for anything but an exact
    dict.
    """

    def __init__(self, module_globals: dict[str, Any], names: dict[str, Any]) -> None:
        super().__init__(names)
        self["__builtins__"] = module_globals["__builtins__"]  # read at function creation, without __missing__
        self._module_globals = module_globals

    def __missing__(self, name: str) -> Any:
        return self._module_globals[name]


class _Namespace:
    """`base` with one attribute replaced."""

    def __init__(self, base: Any, name: str, value: Any) -> None:
        self._base = base
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def _overlay(base: Any, path: list[str], new: Any) -> Any:
    name, *rest = path
    return _Namespace(base, name, _overlay(getattr(base, name), rest, new) if rest else new)


def _copy_function(
    function: types.FunctionType, namespace: dict[str, Any], closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__doc__, copy.__module__, copy.__qualname__ = (
        function.__doc__,
        function.__module__,
        function.__qualname__,
    )
    return copy


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return _MISSING


def _describe(thing: Any) -> str:
    name = getattr(thing, "__qualname__", None)
    return f"{getattr(thing, '__module__', '?')}.{name}" if name else repr(thing)


# torch hands its hooks less than they need: no model, no parameters, no sign that a rank has run out of data. So a hook
# reads the local variables of torch's function that calls it.


def locals_of(*names: str) -> Mapping[str, Any] | None:
    """Return those of the nearest caller of one of these names, direct or not, as they are now; None if there is none.

    A copy: from Python 3.13 on (PEP 667) a frame has no dict of them.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code.co_name in names:
            return dict(frame.f_locals)
        frame = frame.f_back
    return None
