"""The exceptions of this package, beside TypeError and ValueError for wrong arguments, and a remedy that many name."""

from __future__ import annotations


class FlashAllReduceError(Exception):
    """Base of every error below; catching it catches all of them."""


class ConfigError(FlashAllReduceError, ValueError):
    """A configuration that cannot be used; one line per problem, each naming the key."""


class PatchError(FlashAllReduceError, RuntimeError):
    """A seam in a framework that is not as expected, or that somebody else has patched since."""


class MismatchError(FlashAllReduceError, RuntimeError):
    """The ranks of a group disagree, for example about the configuration."""


class CollectiveError(FlashAllReduceError, RuntimeError):
    """A peer died or the group's timeout passed during a collective."""


def install_command(extras: str = "") -> str:
    """How to install the package, for a message: by its path, because no package index has it under any name."""
    what = f'".[{extras}]"' if extras else "."
    return f"`pip install --no-build-isolation {what}` in a checkout of the plugin"
