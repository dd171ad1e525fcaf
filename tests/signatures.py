"""Signatures, which separate the messages of a call from those of other calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flash_allreduce_plugin.collectives.transport import Label


@contextmanager
def signatures(site: str) -> Iterator[list[int]]:
    """Yield the signatures of the quantized calls at a site, in order. Messages of two different ones never meet."""
    sign, found = Label.sign, list[int]()

    def signed(self: Label, *alike: object) -> None:
        sign(self, *alike)
        if self.site == site:
            found.append(self.signature)

    Label.sign = signed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Label.sign = sign  # type: ignore[method-assign]
