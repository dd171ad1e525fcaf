"""The trial of the codebook with spikes on the values of sites with few bits.

After the first steps notices.py prints the gain to a user who chose few bits by hand. Until then rank 0 tries a few
calls of each site and attachment, without communication: at most 8 calls, 8,192 elements of each. A trial rounds the
elements once by the format of the call and once by the codebook with spikes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_allreduce_plugin.codec.format import MIN_CODEBOOK_GROUP_SIZE, Format
from flash_allreduce_plugin.collectives import sample
from flash_allreduce_plugin.collectives.meter import decoded_from, taken
from flash_allreduce_plugin.collectives.sample import Sample
from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.telemetry import counters, run_log

MOST_BITS = 4
_RUNS = 32


def try_codebook(site: Site, wire: Format, parts: Tensor | Sequence[Tensor]) -> None:
    """Try a call of the site that sends parts in the format `wire`: [numel], [rows, numel] or 1-D tensors."""
    if wire.bits > MOST_BITS or (wire.codebook and wire.spikes) or wire.stochastic:
        return
    if site.role is Role.PARAMETER_DIFFERENCE:  # has no codebook (policy/plan.py)
        return
    number = counters.trial(site)
    if number is None or not _is_first_rank():
        return
    matrix = parts if isinstance(parts, Tensor) else max(parts, key=len, default=None)
    if matrix is None or (matrix.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    group_size = max(wire.group_size, MIN_CODEBOOK_GROUP_SIZE)
    exact = _some(matrix.view(1, -1) if matrix.dim() == 1 else matrix, group_size, number)
    if exact is None:
        return
    better = Format(wire.bits, group_size, codebook=True, spikes=True)
    measured = [sample.fold(sample.compare(exact, decoded_from(exact.view(1, -1), one)[0])) for one in (wire, better)]
    counters.record_trial(site, wire.bits, *measured)


def _some(matrix: Tensor, group_size: int, number: int) -> Tensor | None:
    """Return some whole groups of a matrix [rows, numel], in float32 and 1-D on the CPU, or None."""
    height, numel = matrix.shape
    groups = numel // group_size
    if not groups:
        return None
    chosen = Sample(height * groups, group_size, number, _RUNS).of(0, groups, height, groups, matrix.device)
    return None if chosen is None else taken(matrix[:, : groups * group_size], group_size, chosen).cpu().view(-1)


def _is_first_rank() -> bool:
    """Return True on the rank that prints."""
    ranks = run_log.rank_and_world()
    return ranks is None or ranks[0] == 0
