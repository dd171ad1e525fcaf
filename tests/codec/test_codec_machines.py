"""The same bytes from every instruction set and every number of threads."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from flash_allreduce_plugin.codec import ops
from flash_allreduce_plugin.codec.format import Format
from tests.codecs import BITS, DTYPES, Both, gaussian, hard_values, residuals

pytestmark = pytest.mark.skipif(ops.unavailable is not None, reason=str(ops.unavailable))

ORDER = ["default", "avx2", "avx512"]


def digest_of_everything() -> str:
    """Compare with the reference (Both) and return one digest of all bytes made on the way."""
    digest = hashlib.sha256()
    hard = torch.stack(list(hard_values(1100).values()))
    for bits in BITS:
        for group_size in (32, 64, 512, 256):
            layout = {"codebook": group_size == 256, "symmetric": bits % 2 == 0 and group_size == 64}
            both = Both(Format(bits, group_size, **layout, mse=layout["codebook"] and bits % 2 == 0))
            for dtype in DTYPES:
                for rows in (hard.to(dtype), gaussian(2, 129).to(dtype)):
                    payload = both.encode(rows)
                    both.decode(payload, rows.shape[1], dtype)
                    both.decode_sum(payload[:3], rows.shape[1], dtype)
                    digest.update(bytes(payload.flatten().tolist()))
                    changed = rows[:1].float() * 1.01
                    # Rounded: torch's random numbers differ in their last bits, and the lost values would show them.
                    rounded = ((rows[:1].float() * 1024).round() / 1024).to(dtype)
                    for residual in residuals(rows.shape[1], group_size):
                        for made in both.encode_feedback(rounded, residual):
                            digest.update(made.view(torch.uint8).numpy().tobytes())
                    payload = both.encode_difference(changed, rows[:1])
                    both.decode_add(payload, rows[:1])
                    digest.update(bytes(payload.flatten().tolist()))
            digest.update(bytes(both.decode_sum_encode(payload[:2], replace(both.codec, bits=8)).tolist()))
    return digest.hexdigest()


@pytest.fixture(scope="module")
def here() -> str:
    return digest_of_everything()


@pytest.mark.parametrize("capability", ORDER)
def test_guarantee_4_every_instruction_set_writes_the_same_bytes(capability: str, here: str) -> None:
    """Choose every set up to the machine's own: torch would run instructions of a higher one."""
    if ORDER.index(capability) > ORDER.index(ops.cpu_capability()):
        pytest.skip(f"the highest instruction set here is {ops.cpu_capability()}")
    script = (
        "from flash_allreduce_plugin.codec import ops; "
        "from tests.codec.test_codec_machines import digest_of_everything; "
        "print(ops.cpu_capability(), digest_of_everything())"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    used, digest = run.stdout.split()
    assert (used, digest) == (capability, here)


def test_guarantee_4_any_number_of_threads_gives_the_same_bytes() -> None:
    before = torch.get_num_threads()
    x = gaussian(3, 300_001)
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            codec = Format(5, 64)
            payload = torch.empty(3, codec.payload_bytes(x.shape[1]), dtype=torch.uint8)
            torch.ops.flash_allreduce.encode(x, payload, 5, 64, False)
            total = torch.empty(x.shape[1])
            torch.ops.flash_allreduce.decode_sum(payload, total, 1.0, 5, 64, False)
            again = torch.empty_like(payload[0])
            torch.ops.flash_allreduce.decode_sum_encode(payload, again, 1.0, 5, 5, 64, False)
            results.append((payload, total, again))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


THREADS = """
import os, threading, torch
from flash_allreduce_plugin.codec.format import Format

x = torch.randn(1, 1 << 20)  # 32 pieces that a thread may take
payload = torch.empty(1, Format(8, 128).payload_bytes(1 << 20), dtype=torch.uint8)

def started_by_encode(threads):
    torch.set_num_threads(threads)  # starts a pool of its own
    before = len(os.listdir("/proc/self/task"))
    torch.ops.flash_allreduce.encode(x, payload, 8, 128, 0, 0, 0, 0)
    print(len(os.listdir("/proc/self/task")) - before)

started_by_encode(1)
started_by_encode(3)
helper = threading.Thread(target=started_by_encode, args=(1,))
helper.start()
helper.join()
"""


@pytest.mark.thorough
def test_the_codec_starts_no_more_threads_than_torch_may_have() -> None:
    """One of torch's threads is the caller, which may be the thread of a group."""
    run = subprocess.run(
        [sys.executable, "-c", THREADS],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["0", "2", "0"]
