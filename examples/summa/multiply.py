"""A matrix product over 2 x 2 ranks (SUMMA), and its gradient, by broadcasts and reduces along rows and columns.

torchrun --nproc-per-node 4 examples/summa/multiply.py              full precision
torchrun --nproc-per-node 4 examples/summa/multiply.py --bits 8     blocks are sent at 8 bits

Rank (i, j) has the blocks A[i, j], B[i, j] and C[i, j]. 2-D and 3-D tensor parallelism multiply in this way.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap

SIDE = 2


def product(a: Tensor, b: Tensor, row: dist.ProcessGroup, column: dist.ProcessGroup, config: fap.FlashConfig) -> Tensor:
    """Return this rank's block of A B. Every block of A is broadcast along its row, of B along its column."""
    total = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for k in range(SIDE):
        left = a.clone() if row.rank() == k else torch.empty_like(a)
        right = b.clone() if column.rank() == k else torch.empty_like(b)
        fap.broadcast(left, group=row, group_src=k, config=config)
        fap.broadcast(right, group=column, group_src=k, config=config)
        total += left @ right
    return total


def times_transposed(
    c: Tensor, b: Tensor, row: dist.ProcessGroup, column: dist.ProcessGroup, config: fap.FlashConfig
) -> Tensor:
    """Return this rank's block of C B^T, the gradient of A if C is that of A B. The sum over a row ends at one rank."""
    result = torch.empty(0)
    for k in range(SIDE):
        right = b.clone() if column.rank() == k else torch.empty_like(b)
        fap.broadcast(right, group=column, group_src=k, config=config)
        part = c @ right.t()
        fap.reduce(part, group=row, group_dst=k, config=config)
        if row.rank() == k:
            result = part
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, help="width of what travels; without it, full precision")
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of the matrices")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    if dist.get_world_size() != SIDE * SIDE or arguments.size % SIDE:
        raise SystemExit(f"run it with {SIDE * SIDE} ranks (torchrun --nproc-per-node 4), and an even --size")
    i, j = divmod(dist.get_rank(), SIDE)
    rows = [dist.new_group([r * SIDE + c for c in range(SIDE)]) for r in range(SIDE)]
    columns = [dist.new_group([r * SIDE + c for r in range(SIDE)]) for c in range(SIDE)]
    row, column = rows[i], columns[j]
    # A demonstration: quantize blocks of any size. FLASH_ALLREDUCE_* has priority.
    bits = arguments.bits or 8
    config = fap.FlashConfig.from_env(fap.FlashConfig(enabled=arguments.bits is not None, bits=bits, min_bytes=0))

    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(arguments.size, arguments.size, generator=generator).to(device) for _ in range(2))
    half = arguments.size // SIDE

    def block(whole: Tensor) -> Tensor:
        return whole[i * half : (i + 1) * half, j * half : (j + 1) * half].contiguous()

    c = product(block(a), block(b), row, column, config)
    gradient = times_transposed(c, block(b), row, column, config)
    report("A B", c, block(a @ b))
    report("A B B^T", gradient, block(a @ b @ b.t()))
    megabytes = torch.tensor([fap.stats()[key] / 1e6 for key in ("bytes_sent", "bytes_full_precision")], device=device)
    dist.reduce(megabytes, 0)
    if dist.get_rank() == 0:
        print(f"sent {megabytes[0]:.2f} of {megabytes[1]:.2f} MB")
    dist.barrier()  # gloo's thread must release the last tensor before the interpreter ends, or the process aborts
    dist.destroy_process_group()


def report(name: str, mine: Tensor, exact: Tensor) -> None:
    """Print the relative error of the whole product, from every rank's block."""
    squares = torch.stack([(mine - exact).double().square().sum(), exact.double().square().sum()])
    dist.reduce(squares, 0)
    if dist.get_rank() == 0:
        print(f"{name}: relative error {float((squares[0] / squares[1]).sqrt()):.2%}")


if __name__ == "__main__":
    main()
