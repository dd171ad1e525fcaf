"""The demo's text: the source files of Python's standard library, or a file of the user, as bytes."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

import torch

CORPUS_BYTES = 4 << 20
VALIDATION_SHARE = 0.05
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}  # encodings: tables


def corpus(path: Path | None, limit: int = CORPUS_BYTES) -> bytes:
    """Return the text of `path`, or by default the first `limit` bytes of the standard library's sources.

    The files are sorted by the SHA-256 of their names, equal on every machine with the same Python. Sorted by name, the
    held-out end would be a few similar files.
    """
    if path is not None:
        return path.read_bytes()
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - _LEFT_OUT  # site-packages may have a hundred thousand files
        names += [Path(folder, file).relative_to(root) for file in files if file.endswith(".py")]
    text = bytearray()
    for name in sorted(names, key=lambda name: hashlib.sha256(name.as_posix().encode()).digest()):
        text += (root / name).read_bytes()
        if len(text) >= limit:
            break
    return bytes(text[:limit])


def split(text: bytes, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return training and validation bytes as int64. The last VALIDATION_SHARE of the text is held out.

    Raises ValueError if either part is shorter than one sequence and the byte after it.
    """
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() if text else torch.empty(0).long()
    held_out = int(len(data) * VALIDATION_SHARE)
    if held_out < sequence + 1:
        needed = int((sequence + 1) / VALIDATION_SHARE) + 1
        raise ValueError(
            f"the text has {len(data)} bytes; at least {needed} are needed to hold {VALIDATION_SHARE:.0%} out"
        )
    return data[:-held_out], data[-held_out:]
