"""The codec's options against the plain codec: every option that the groups allow has a row."""

from __future__ import annotations

from argparse import Namespace

import pytest

from lab.benchmarks.codec_options import FEEDBACK, OPTIONS, measure


@pytest.mark.parametrize("group_size", [32, 128])
def test_every_option_has_a_row_that_its_groups_allow(group_size: int) -> None:
    rows = measure(4, Namespace(numel=4096, group_size=group_size, rounds=1))
    expected = [name for name in (*OPTIONS, *FEEDBACK) if group_size >= 128 or "codebook" not in name]
    assert [row["option"] for row in rows] == expected
    assert all(row["call"] > 0 for row in rows)
