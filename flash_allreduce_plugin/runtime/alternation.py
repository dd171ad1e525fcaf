"""Alternation of two ways to run a training step, until one is clearly faster. No clock and no communication.

Blocks of steps alternate, so that a machine that slows down does not favour either way. A pair is two blocks:

    step   0   1 2   3   4 5   6 7   8 9   10 11   12 13   14 15 ...
    way    base ...  other     other base  base    other   other
    pair   |       0         | |    1   |  |      2     |  |    3 ...

The steps 0 and 3 are not measured: a way compiles and allocates at its first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import median

BLOCK = 2  # measured steps
FIRST = 1 + BLOCK
MOST_PAIRS = 12
MARGIN = 0.01
"""A way has to be faster by this share of a step to take the place of the other one."""

# The difference, in standard errors, that decides after one pair of blocks, after two, and so on. The two steps of one
# block show little of the variation of steps.
_CLEAR = (10.0, 5.0, 4.0, 3.0)
_LEAST_SPREAD = 0.01  # share of a step: a few steps may agree by chance
# In the same way: the factor between the slowest step of one way and the fastest of the other that decides too.
_APART = (2.0, 1.25)


def is_other(step: int) -> bool:
    """Return True if step number `step` runs the other way."""
    if step < 2 * FIRST:
        return step >= FIRST
    pair, within = divmod(step - 2 * FIRST, 2 * BLOCK)
    return (within < BLOCK) == (pair % 2 == 0)


def is_measured(step: int) -> bool:
    return step not in (0, FIRST)


def end_of(pair: int) -> int:
    """Return the first step after pair number `pair`."""
    return 2 * FIRST + pair * 2 * BLOCK


def faster(base: Sequence[float], other: Sequence[float], pairs: int) -> bool | None:
    """Return True if the other way is faster, by MARGIN or more. None: the steps so far do not decide.

    base, other: seconds of the measured steps. Medians are compared, so that a step with a checkpoint in it counts as
    one step. The standard error is that of a median, from the median absolute deviation.
    """
    if not base or not other:
        return None if pairs < MOST_PAIRS else False
    gain = log(median(other) / median(base)) - log(1 - MARGIN)  # below 0: the other way is faster by the margin
    error = 1.25 * (_spread(base) ** 2 / len(base) + _spread(other) ** 2 / len(other)) ** 0.5
    apart = _APART[min(pairs, len(_APART)) - 1]
    clear = abs(gain) > _CLEAR[min(pairs, len(_CLEAR)) - 1] * error
    if clear or pairs >= MOST_PAIRS or min(other) > apart * max(base) or min(base) > apart * max(other):
        return gain < 0
    return None


def _spread(seconds: Sequence[float]) -> float:
    """Return the standard deviation, from the median absolute deviation of normal values, as a share of the median."""
    middle = median(seconds)
    return max(_LEAST_SPREAD, 1.4826 * median(abs(one - middle) for one in seconds) / middle)
