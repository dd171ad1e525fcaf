"""Seams on modules made up here: applied or not at all, undone to the same objects, and never silently
without effect.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest

from flash_allreduce_plugin.errors import PatchError
from flash_allreduce_plugin.integrations import patching
from flash_allreduce_plugin.integrations.patching import Patchset, Seam, in_source, rebound

SOURCE = """
import functools
import math

def helper(x):
    return x + 1

def uses_helper(x):
    return helper(x)

def rounds(x, *, up=True):
    return math.ceil(x) if up else math.floor(x)

def plain(a, b):
    return a - b

def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

def hides(function):
    def wrapper(*args):
        return TABLE[function.__name__](*args)
    TABLE[function.__name__] = function
    wrapper.__wrapped__ = function
    return functools.wraps(function)(functools.partial(wrapper))

TABLE = {}

class Base:
    def inherited(self, x):
        return x

class Operator(Base):
    @staticmethod
    def backward(ctx, grad):
        return helper(grad), None

    @staticmethod
    @decorated
    def wrapped(ctx, grad):
        return helper(grad), None

    @classmethod
    def build(cls, x):
        return x

    def method(self, x):
        return x
"""


@pytest.fixture
def library(monkeypatch):
    module = types.ModuleType("made_up_library")
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, "made_up_library", module)
    return module


def seam(attribute, signature, replacement=None, name=None):
    def double(original):
        return lambda *args: ("new", original(*args))

    return Seam(
        name or attribute,
        "made_up_library",
        attribute,
        signature,
        replacement or double,
        f"covers {attribute}",
    )


PLAIN = seam("plain", ("a", "b"))
STATIC = seam("Operator.backward", ("ctx", "grad"))
METHOD = seam("Operator.method", ("self", "x"))


def test_apply_replaces_and_restore_puts_back_the_same_objects(library):
    raw = dict(vars(library.Operator)), library.plain
    patches = Patchset("test", [PLAIN, STATIC, METHOD])
    patches.apply()
    assert patches.applied
    assert library.plain(3, 1) == ("new", 2)
    assert library.Operator.backward(None, 1) == ("new", (2, None))
    assert library.Operator().backward(None, 1) == ("new", (2, None))
    assert library.Operator().method(7) == ("new", 7)
    assert library.plain.__wrapped__ is raw[1]
    patches.restore()
    assert not patches.applied
    assert library.plain is raw[1]
    assert isinstance(vars(library.Operator)["backward"], staticmethod)
    assert all(vars(library.Operator)[name] is entry for name, entry in raw[0].items())


def test_apply_and_restore_are_idempotent(library):
    original = library.plain
    patches = Patchset("test", [PLAIN])
    patches.restore()
    patches.apply()
    first = library.plain
    patches.apply()
    patches.verify()
    assert library.plain is first
    patches.restore()
    patches.restore()
    assert library.plain is original
    patches.apply()
    assert library.plain(3, 1) == ("new", 2)


def test_an_inherited_method_is_inherited_again_after_restore(library):
    patches = Patchset("test", [seam("Operator.inherited", ("self", "x"))])
    patches.apply()
    assert library.Operator().inherited(1) == ("new", 1)
    assert library.Base().inherited(1) == 1
    patches.restore()
    assert "inherited" not in vars(library.Operator)
    assert library.Operator().inherited(1) == 1


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (seam("gone", ("x",)), ["made_up_library.gone", "does not exist"]),
        (seam("Operator.gone", ("x",)), ["made_up_library.Operator.gone", "does not exist"]),
        (seam("Gone.backward", ("x",)), ["made_up_library.Gone.backward", "does not exist"]),
        (seam("helper", ("x", "group")), ["made_up_library.helper", "(x, group)", "(x)"]),
        (seam("TABLE", ()), ["made_up_library.TABLE", "Python function"]),
        (seam("Operator.build", ("x",)), ["made_up_library.Operator.build", "Python function"]),
        (Seam("m", "made_up_missing", "f", (), lambda f: f, ""), ["made_up_missing.f", "importing"]),
        (
            seam("helper", ("x",), lambda original: rebound(original, "collective", None)),
            ["made_up_library.helper", "does not use collective"],
        ),
    ],
)
def test_a_symbol_that_is_not_as_expected_is_named_and_nothing_changes(library, bad, says):
    before = library.plain
    patches = Patchset("test", [PLAIN, bad], supported="made-up 1 to 2")
    for call in (patches.verify, patches.apply):
        with pytest.raises(PatchError) as error:
            call()
        assert all(part in str(error.value) for part in [*says, "made-up 1 to 2"])
    assert library.plain is before
    assert not patches.applied


def test_a_failure_half_way_puts_back_what_was_already_replaced(library):
    class Sealed(type):
        def __setattr__(cls, name, value):
            raise TypeError("sealed")

    library.Sealed = Sealed("Sealed", (), {"method": lambda self, x: x})
    before = library.plain
    patches = Patchset("test", [PLAIN, seam("Sealed.method", ("self", "x"))])
    with pytest.raises(PatchError, match=r"made_up_library.Sealed.method could not be replaced \(sealed\)"):
        patches.apply()
    assert library.plain is before
    assert not patches.applied


def test_a_later_patch_of_another_library_is_kept(library):
    original = library.plain
    patches = Patchset("test", [METHOD, PLAIN])
    patches.apply()
    ours = library.plain

    def theirs(a, b):
        return ours(a, b)

    library.plain = theirs
    with pytest.raises(PatchError, match=r"made_up_library.plain \(seam plain\).*theirs"):
        patches.restore()
    assert library.plain is theirs
    assert library.Operator().method(7) == ("new", 7), "nothing was restored"
    assert patches.report()["plain"]["in_place"] is False
    library.plain = ours
    patches.restore()
    assert library.plain is original


def test_two_patchsets_cannot_stack_on_one_symbol(library):
    first, second = Patchset("first", [PLAIN]), Patchset("second", [PLAIN])
    first.apply()
    with pytest.raises(PatchError, match="already carries the seam plain"):
        second.apply()
    first.restore()
    second.apply()
    second.restore()


def test_report_lists_the_seams_in_place(library):
    patches = Patchset("test", [PLAIN, STATIC])
    assert [entry["in_place"] for entry in patches.report().values()] == [False, False]
    patches.apply()
    assert patches.report() == {
        "plain": {"target": "made_up_library.plain", "covers": "covers plain", "in_place": True},
        "Operator.backward": {
            "target": "made_up_library.Operator.backward",
            "covers": "covers Operator.backward",
            "in_place": True,
        },
    }


def test_rebound_changes_one_function_only(library):
    copy = rebound(library.uses_helper, "helper", lambda x: -x)
    assert (copy(5), library.uses_helper(5)) == (-5, 6)


def test_rebound_sees_later_changes_of_the_module(library):
    copy = rebound(library.rounds, "math.ceil", lambda x: "ceiling")
    assert (copy(1.5), copy(1.5, up=False), library.rounds(1.5)) == ("ceiling", 1, 2)
    library.TABLE = None
    copy = rebound(library.uses_helper, "helper", lambda x: library.plain(x, 1))
    library.plain = lambda a, b: "changed later"
    assert copy(5) == "changed later"


def test_rebound_keeps_name_defaults_and_closure(library):
    copy = rebound(library.rounds, "math.ceil", lambda x: 0)
    assert (copy.__name__, copy.__kwdefaults__, copy.__module__) == (
        "rounds",
        {"up": True},
        library.rounds.__module__,
    )


def test_rebound_reaches_through_a_decorator(library):
    wrapped = library.Operator.wrapped
    copy = rebound(wrapped, "helper", lambda x: "mine")
    assert copy(None, 1) == ("mine", None)
    assert wrapped(None, 1) == (2, None)


def test_rebound_refuses_names_without_effect(library):
    with pytest.raises(PatchError, match="does not use _reduce"):
        rebound(library.uses_helper, "_reduce", None)
    with pytest.raises(PatchError, match=r"does not use math\.sqrt"):
        rebound(library.rounds, "math.sqrt", None)
    with pytest.raises(PatchError, match="not a Python function"):
        rebound(len, "x", None)
    with pytest.raises(PatchError, match="not a Python function"):
        rebound(library.hides(library.plain), "x", None)


def test_rebound_refuses_a_decorator_that_keeps_the_function_elsewhere(library):
    @functools.wraps(library.uses_helper)
    def wrapper(x):
        return library.uses_helper(x)

    with pytest.raises(PatchError, match="a decorator hides the body"):
        rebound(wrapper, "helper", lambda x: "mine")


def test_several_signatures_serve_several_versions(library):
    Patchset("test", [seam("plain", (("a",), ("a", "b")))]).verify()
    with pytest.raises(PatchError, match=r"expected the parameters \(a\) or \(x\), found \(a, b\)"):
        Patchset("test", [seam("plain", (("a",), ("x",)))]).verify()


def test_an_optional_seam_may_be_missing_and_is_checked_where_it_exists(library):
    missing = Seam("missing", "made_up_library", "Operator.newer", (), lambda f: f, "", optional=True)
    other = Seam("other", "made_up_library", "plain", ("a", "b"), lambda f: lambda a, b: 7, "")
    patches = Patchset("made up", [missing, other])
    patches.apply()
    assert library.plain(1, 2) == 7 and not patches.report()["missing"]["in_place"]
    patches.restore()
    assert library.plain(1, 2) == -1
    wrong = Seam("wrong", "made_up_library", "plain", ("c",), lambda f: f, "", optional=True)
    with pytest.raises(PatchError, match="expected the parameters"):
        Patchset("made up", [wrong]).verify()


def test_a_seam_that_the_source_carries_is_checked_and_not_replaced(library):
    switched_on = False

    def chosen(original, *arguments):
        assert arguments == (1, 2)
        return PLAIN.replacement(original) if switched_on else None

    original = library.plain
    library.plain = marked = in_source("plain", chosen)(original)
    patches = Patchset("test", [PLAIN, METHOD])
    patches.apply()
    assert library.plain is marked
    assert patches.report()["plain"]["in_place"]
    assert library.plain(1, 2) == original(1, 2)
    switched_on = True
    assert library.plain(1, 2) == ("new", original(1, 2))
    patches.restore()
    assert library.plain is marked
    with pytest.raises(PatchError, match="expected the parameters"):
        Patchset("test", [seam("plain", ("a",))]).apply()


def test_variables_of_a_caller_are_a_dict_of_the_moment() -> None:
    """Check locals_of: on Python 3.13 a frame has a view with a list of keys, on older ones a changing dict."""

    def ours(wrappers: int = 20) -> Any:
        return ours(wrappers - 1) if wrappers else patching.locals_of("of_torch")

    def of_torch() -> list[Any]:
        value = 1
        found = [ours()]
        value = 2
        return [*found, ours(), value]

    first, second, _ = of_torch()
    assert (first["value"], second["value"]) == (1, 2)
    assert first.keys() >= {"value"} and patching.locals_of("no such function") is None
