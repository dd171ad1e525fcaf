"""Model the main kernels' speed on a GPU from their machine code. docs/trust/cuda.md compares it with an H100.

    SASS -> control flow -> the path of a full block -> instructions, waits -> share of a copy's speed

The path of a full block moves exactly the bytes that it has to, between registers, shared and global memory, and
shuffles exactly as often. Of all paths that do, loops any number of times around, the model takes the one of the fewest
instructions: what is rare (a NaN, a ragged end, the range of a group with an exact 0) moves other bytes, single ones or
takes longer, and the slow path of a division is a call. Every instruction on it counts, also those that a predicate
switches off. Work that only some warps of a block do counts in proportion.

A load is waited for where its register is first read. Loads that are issued before that wait together.

The share. A warp issues its instructions, one a cycle for each quarter of a multiprocessor, integers, logic and minima
every second one; its bytes pass through the multiprocessor's part of the memory's bandwidth; and it waits for the
memory's latency. Warps queue for the first two, not for the third. Mean value analysis (M. Reiser, S. Lavenberg, JACM
1980) says how fast as many warps are as registers leave room for; a copy is as fast as the bandwidth.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

THREADS = 256  # of a block
WARPS = THREADS // 32
LANE = 32  # elements
GROUP = 128
RANKS = 8


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    architecture: str
    multiprocessors: int
    ghz: float  # under load
    bandwidth: float  # GB/s of a copy, read and written bytes together
    latency: float  # ns of a load, with others under way
    floats: int  # every how many cycles a quarter begins a float instruction


# Multiprocessors, clocks and bandwidth: NVIDIA's data sheets and white papers (A100 80 GB SXM: 2039 GB/s; H100 SXM:
# 3350; H200: 4800; B200: 8000), of which a copy has 0.9. Latencies: W. Luo et al., arXiv 2402.13499 (A100: 466 cycles,
# H100: 479), and half as much again under load; of B200 an assumption. Pipes: CUDA C++ programming guide, throughput of
# arithmetic instructions (A100 has 64 float lanes, the others 128; all have 64 for integers, logic and minima).
GPUS = (
    Gpu("A100", "sm_80", 108, 1.41, 0.9 * 2039, 500, 2),
    Gpu("H100", "sm_90", 132, 1.755, 0.9 * 3350, 410, 1),
    Gpu("H200", "sm_90", 132, 1.755, 0.9 * 4800, 410, 1),
    Gpu("B200", "sm_100", 148, 1.85, 0.9 * 8000, 500, 1),
)
_FLOATS = re.compile(r"(FADD|FMUL|FFMA|IMAD|HADD2|HMUL2|HFMA2)\d*\b")
_ELSEWHERE = re.compile(
    r"U[A-Z]|S2|LD|ST|SHFL|MUFU|BAR|BRA|EXIT|BSSY|BSYNC|NOP|CALL|RET|WARPSYNC|CS2R|R2UR|ERRBAR|DEPBAR"
)


class Unknown(ValueError):
    """Code that the model cannot read, or no path of a full block."""


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str
    operands: str
    guarded: bool

    @property
    def kind(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def bytes(self) -> int:
        """The bytes of a lane's access."""
        parts = self.opcode.split(".")
        sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
        return next((sizes[part] for part in parts if part in sizes), 4)


#: Bytes that a lane loads from global memory, stores there, stages in shared memory; how often it shuffles.
Moved = tuple[int, int, int, int]
_PLACE = {"LDG": 0, "LD": 0, "STG": 1, "ST": 1, "STS": 2, "SHFL": 3}


@dataclass(slots=True)
class Block:
    """Instructions that are only run one after the other."""

    instructions: list[Instruction] = field(default_factory=list)
    next: list[int] = field(default_factory=list)

    @property
    def rare(self) -> bool:
        """True if it has an access of single bytes or a call (a division's slow path), which full blocks have not."""
        narrow = any(i.kind in _PLACE and i.kind != "SHFL" and i.bytes < 2 for i in self.instructions)
        return narrow or any(i.kind == "CALL" and _target(i) is None for i in self.instructions)

    @property
    def moved(self) -> Moved:
        sums = [0, 0, 0, 0]
        for i in self.instructions:
            if i.kind in _PLACE:
                sums[_PLACE[i.kind]] += 1 if i.kind == "SHFL" else i.bytes
        return sums[0], sums[1], sums[2], sums[3]


def kernels(sass: str) -> dict[str, str]:
    """Return the text of each kernel in the output of `nvdisasm -c`."""
    parts = re.split(r"^\.text\.(\S+):$", sass, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _target(i: Instruction) -> str | None:
    """The label of the kernel that a jump names."""
    found = re.search(r"`\((\.L_\w+)\)", i.operands)
    return found[1] if found else None


_LINE = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")


def blocks_of(text: str) -> list[Block]:
    """The first is where the kernel begins."""
    blocks, starts, jumps = [Block()], dict[str, int](), list[tuple[int, str]]()
    falls = [True]  # True if a block continues with the next one
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            if blocks[-1].instructions:
                blocks.append(Block())
                falls.append(True)
            starts[label[1]] = len(blocks) - 1
        if (found := _LINE.search(line)) is None:
            continue
        i = Instruction(found[2], found[3], found[1] is not None)
        blocks[-1].instructions.append(i)
        target = _target(i)
        # A call of a label within the kernel is a jump, as A100's loops end.
        jump = i.kind in ("BRA", "JMP") or (i.kind == "CALL" and target is not None)
        if i.kind in ("BRX", "JMX") or (jump and target is None):
            raise Unknown(f"{i.opcode} {i.operands}: a jump to an address that is computed")
        if not jump and i.kind not in ("EXIT", "RET"):
            continue
        if jump and target is not None:
            jumps.append((len(blocks) - 1, target))
        # A condition is a guard, or a predicate or a mask before the label.
        falls[-1] = i.guarded or re.search(r"\bU?[PR]\w+", i.operands.split("`")[0]) is not None
        blocks.append(Block())
        falls.append(True)
    for number in range(len(blocks) - 1):
        if falls[number]:
            blocks[number].next.append(number + 1)
    for number, name in jumps:
        blocks[number].next.append(starts[name])
    return blocks


def path(blocks: Sequence[Block], moved: Moved) -> list[Instruction]:
    """Return the shortest path to the end that moves so much: Dijkstra's; a node: a block and bytes moved before."""
    costs = [block.moved for block in blocks]
    rare = {number for number, block in enumerate(blocks) if block.rare}
    begin = (0, (0, 0, 0, 0))
    best, came = {begin: 0}, dict[tuple[int, Moved], tuple[int, Moved]]()
    queue = [(0, begin)]
    while queue:
        cost, at = heapq.heappop(queue)
        if cost > best[at]:
            continue
        block, before = blocks[at[0]], at[1]
        of_block = costs[at[0]]
        done = before[0] + of_block[0], before[1] + of_block[1], before[2] + of_block[2], before[3] + of_block[3]
        if any(a > b for a, b in zip(done, moved, strict=True)):
            continue
        ends = bool(block.instructions) and block.instructions[-1].kind in ("EXIT", "RET")
        if ends and done == moved:
            way = [at]
            while way[-1] != begin:
                way.append(came[way[-1]])
            return [i for number, _ in reversed(way) for i in blocks[number].instructions]
        for number in block.next:
            if number in rare:
                continue
            then = (number, done)
            if cost + len(block.instructions) < best.get(then, 1 << 30):
                best[then], came[then] = cost + len(block.instructions), at
                heapq.heappush(queue, (best[then], then))
    raise Unknown(f"no path moves {moved}")


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a lane, in a full block."""

    instructions: float
    floats: float  # of them, those of the pipe of floats
    integers: float  # and of the other one
    waits: float  # for global memory

    def mixed(self, other: Work, part: float) -> Work:
        values = ((getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return Work(*(a * (1 - part) + b * part for a, b in values))


def work_of(instructions: Sequence[Instruction]) -> Work:
    pending: set[str] = set()
    floats = integers = waits = 0
    for i in instructions:
        floats += _FLOATS.match(i.kind) is not None
        integers += _FLOATS.match(i.kind) is None and _ELSEWHERE.match(i.kind) is None
        registers = re.findall(r"\bR(\d+)\b", i.operands)
        loads = i.kind in ("LDG", "LD")
        if pending.intersection(registers[1 if loads else 0 :]):
            waits += 1
            pending.clear()
        if loads and registers:
            pending |= {str(int(registers[0]) + k) for k in range(max(1, i.bytes // 4))}
    return Work(len(instructions), floats, integers, waits)


def blocks_at_once(registers: int, shared: int) -> int:
    """On a multiprocessor. Registers are given out by 8 a thread; A100 has the least shared memory, 164 KiB."""
    of_registers = 65536 // (-(-registers // 8) * 8 * THREADS)
    return min(2048 // THREADS, of_registers, 164 * 1024 // (shared + 1024))


def share(work: Work, bytes_an_element: float, blocks: int, gpu: Gpu) -> float:
    """The shares of a copy's speed."""
    issue = max(work.instructions, 2 * work.integers, gpu.floats * work.floats) / 4 / gpu.ghz
    moving = 32 * LANE * bytes_an_element / (gpu.bandwidth / gpu.multiprocessors)
    queues, rate = [0.0, 0.0], 0.0
    for warps in range(1, blocks * WARPS + 1):
        times = [demand * (1 + queue) for demand, queue in zip((issue, moving), queues, strict=True)]
        rate = warps / (work.waits * gpu.latency + sum(times))
        queues = [rate * time for time in times]
    return rate * moving


# ---- the kernels of the table: bf16, groups of 128, asymmetric ----


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    kernel: str  # a part of its mangled name
    bits: int
    ranks: int  # number of ranks whose records are read; 0: elements are read
    limit: float  # instructions an element on sm_90, a little above what nvcc 13.0 makes

    @property
    def encodes(self) -> bool:
        return "encode" in self.name

    @property
    def part(self) -> int:
        """Bytes of a lane's part of a record, and its metadata, which each lane reads."""
        return 4 + LANE * self.bits // 8

    @property
    def waits(self) -> int:
        """For global memory, at most: a lane's elements come together, of two ranks' records as many as have room."""
        return 12 if self.ranks > 1 else 1

    @property
    def bytes_an_element(self) -> float:
        record = self.bits / 8 + 4 / GROUP
        return (self.ranks * record or 2) + (record if self.encodes else 2)

    def work(self, blocks: Sequence[Block]) -> Work:
        loaded = self.ranks * self.part or 2 * LANE
        if not self.encodes:
            return work_of(path(blocks, (loaded, 2 * LANE, 0, 0)))
        # The block's payload is copied out 16 bytes a thread; some of its warps do so once more than the others. Of a
        # group the least, the greatest and what is nearest to 0 are each shuffled twice.
        words = THREADS * LANE // GROUP * (4 + GROUP * self.bits // 8) // 16
        often, rest = divmod(words, THREADS)
        once, more = (work_of(path(blocks, (loaded, 16 * (often + k), self.part, 6))) for k in (0, 1))
        return once.mixed(more, -(-rest // 32) / WARPS)


def _cases() -> Iterator[Case]:
    for bits, (encode, decode, decode_sum, sum_encode) in ((8, (11, 6.5, 41.25, 50.75)), (4, (11, 7, 43.25, 52))):
        form, bf16 = f"Li{bits}ELNS_6LayoutE0E", "ILNS_5DTypeE1E"
        yield Case(f"encode, {bits} bits", f"plain_encode_kernel{bf16}{form}E", bits, 0, encode)
        yield Case(f"decode, {bits} bits", f"plain_decode_kernel{bf16}{form}Lb0E", bits, 1, decode)
        yield Case(f"sum of 8, {bits} bits", f"plain_decode_kernel{bf16}{form}Lb1E", bits, RANKS, decode_sum)
        name = f"sum of 8, encoded, {bits} bits"
        yield Case(name, f"plain_decode_sum_encode_kernelILi{bits}E{form}E", bits, RANKS, sum_encode)


CASES = tuple(_cases())


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel, for one architecture."""

    registers: int
    shared: int  # bytes
    sass: str


def table(cases: Sequence[Case], compiled: Mapping[tuple[str, str], Compiled]) -> tuple[list[str], list[str]]:
    """Return lines of Markdown, and the numbers above their limits. compiled: by (name of the case, architecture)."""
    heads = ("kernel", "instructions an element", *(gpu.name for gpu in GPUS))
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    found = list[str]()
    for case in cases:
        shares, columns = [], list[str]()
        for gpu in GPUS:
            kernel = compiled[case.name, gpu.architecture]
            try:
                work = case.work(blocks_of(kernel.sass))
            except Unknown as error:
                return lines, [*found, f"{case.name} on {gpu.architecture}: {error}"]
            blocks = blocks_at_once(kernel.registers, kernel.shared)
            shares.append(f"{share(work, case.bytes_an_element, blocks, gpu):.2f}")
            if columns or gpu.architecture != "sm_90":
                continue
            an_element = work.instructions / LANE
            columns = [f"{an_element:.1f}"]
            for value, limit, what in (
                (an_element, case.limit, "instructions an element"),
                (work.waits, case.waits, "waits for memory"),
            ):
                if value > limit:
                    found.append(f"{case.name}: {value:.1f} {what} on sm_90; expected {limit} at most")
        lines.append("| " + " | ".join((case.name, *columns, *shares)) + " |")
    return lines, found
