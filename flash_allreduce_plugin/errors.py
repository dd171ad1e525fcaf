"""The exceptions of this package, besides TypeError and ValueError for wrong arguments, and a common remedy."""

from __future__ import annotations


class FlashAllReduceError(Exception):
    """Base of every error below; catching it catches all of them."""


class ConfigError(FlashAllReduceError, ValueError):
    """A configuration that cannot be used; one line per problem, each naming the key."""


class PatchError(FlashAllReduceError, RuntimeError):
    """A seam in a framework in an unknown form, or patched by other code since."""


class MismatchError(FlashAllReduceError, RuntimeError):
    """The ranks of a group disagree, for example about the configuration."""


class CollectiveError(FlashAllReduceError, RuntimeError):
    """A peer died or the group's timeout passed during a collective."""


def install_command(extras: str = "") -> str:
    """How to install the package, for a message: by its path, because no package index has it under any name."""
    what = f'".[{extras}]"' if extras else "."
    return f"`pip install --no-build-isolation {what}` in a checkout of the plugin"
