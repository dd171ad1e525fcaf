"""What this package raises, besides the TypeError and ValueError of a plainly wrong argument."""

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
