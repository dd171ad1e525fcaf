"""Every kernel a few times on small tensors, compared with the CPU: the program that compute-sanitizer runs.

    compute-sanitizer --tool memcheck python -m tests.gpu.small_cases

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is a separate allocation, so that memcheck sees the first byte
beyond it.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Format
from tests.codecs import DTYPES, gaussian, same_bits
from tests.feedback import KINDS, composed, residual_like, sum_format
from tests.gpu import device
from tests.gpu.cases import DRAW, encoded

CODECS = (
    Format(8, 128),
    Format(4, 128),
    Format(7, 32, symmetric=True),
    Format(4, 64, compact=True),
    Format(2, 1024, spikes=True),
    Format(3, 32, spikes=True, hadamard=True, mse=True),
    Format(5, 256, hadamard=True),
    Format(6, 512, compact=True, spikes=True, stochastic=True),
    Format(3, 128, codebook=True, mse=True),
    Format(8, 1024, codebook=True, hadamard=True),
    Format(2, 256, codebook=True, spikes=True),
    Format(5, 128, codebook=True, spikes=True, hadamard=True, mse=True),
)


def run(c: Format, dtype: torch.dtype, numel: int) -> bool:
    """Run on outputs of exactly their size, with nothing around them."""
    inputs = gaussian(2, numel).to(dtype)
    payloads = encoded(inputs, c)
    x, there = inputs.to(device.DEVICE), payloads.to(device.DEVICE)
    key = c.bits, c.group_size, c.options

    def compare(name: str, ours: Tensor, theirs: Tensor) -> bool:
        same = same_bits(ours.cpu(), theirs)
        if not same:
            print(f"{name} differs: {c}, {dtype}, {numel} elements")
        return same

    ours = torch.empty_like(there)
    device.compiled.encode(x, ours, *key, DRAW.key, DRAW.first_group, DRAW.groups_a_row)
    results = [compare("encode", ours, payloads)]
    decoded, expected = torch.empty_like(x), torch.empty_like(inputs)
    device.compiled.decode(there, decoded, *key)
    rows.decode(payloads, expected, c)
    results.append(compare("decode", decoded, expected))
    total, sum_ = torch.empty_like(x[0]), torch.empty_like(inputs[0])
    device.compiled.decode_sum(there, total, 0.5, *key)
    rows.decode_sum(payloads, sum_, c, 0.5)
    results.append(compare("decode_sum", total, sum_))
    sent, again = torch.empty_like(there[0]), torch.empty_like(payloads[0])
    device.compiled.decode_sum_encode(there, sent, 0.5, c.bits, *key, DRAW.key, DRAW.first_group)
    rows.decode_sum_encode(payloads, again, c, c, 0.5, DRAW)
    results.append(compare("decode_sum_encode", sent, again))
    for kind in KINDS:
        residual = residual_like(0.1 * gaussian(numel, seed=1), c, kind)
        kept = residual.to(device.DEVICE, copy=True)
        device.compiled.encode_feedback(x[:1], ours[:1], kept, 0.8, *key, DRAW.key, DRAW.first_group)
        payload, after = composed(inputs[0], residual, 0.8, c, DRAW)
        results += [compare("encode_feedback", ours[0], payload), compare("its residual", kept, after)]
        left, kept = sum_format(c), residual.to(device.DEVICE, copy=True)
        device.compiled.decode_sum_encode_feedback(
            there, sent, kept, 0.5, 0.8, c.bits, *key, DRAW.key, DRAW.first_group
        )  # fmt: skip
        sums = torch.empty(len(residual) * c.group_size)
        rows.decode_sum(payloads, sums, left, 0.5)
        payload, after = composed(sums, residual, 0.8, left, DRAW)
        results += [compare("decode_sum_encode_feedback", sent, payload), compare("its residual", kept, after)]
    return all(results)


def main() -> int:
    reason = device.missing()
    if reason is not None:
        print(reason)
        return 2
    cases = [
        (c, dtype, numel)
        for i, c in enumerate(CODECS)
        for dtype, numel in ((DTYPES[i % 3], 9001), (DTYPES[(i + 1) % 3], 77))
    ]
    wrong = sum(not run(*case) for case in cases)
    print(f"{len(cases) - wrong} of {len(cases)} cases equal the CPU")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
