"""scripts/cuda_model.py on code as nvdisasm prints it; `nox -s check-cuda` runs it on the kernels' own code."""

from __future__ import annotations

import pytest

from scripts.cuda_model import CASES, GPUS, Unknown, Work, blocks_at_once, blocks_of, kernels, path, share, work_of

SASS = """\
.section	.text._Z4fourv,"ax",@progbits
.text._Z4fourv:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   ISETP.GE.AND P0, PT, R0, R4, PT ;
        /*0020*/               @P0 EXIT ;
        /*0030*/                   MOV R9, 0x4 ;
.L_x_1:
        /*0040*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0050*/                   LDG.E.128 R12, desc[UR4][R2.64+0x10] ;
        /*0060*/                   FADD R4, R4, R12 ;
        /*0070*/                   IADD3 R9, R9, -0x1, RZ ;
        /*0080*/                   ISETP.NE.AND P1, PT, R9, RZ, PT ;
        /*0090*/               @P1 BRA `(.L_x_1) ;
        /*00a0*/                   BRA.DIV UR6, `(.L_x_3) ;
        /*00b0*/               @P2 BRA `(.L_x_2) ;
        /*00c0*/                   FMUL R4, R4, 3 ;
        /*00d0*/                   FMUL R4, R4, 5 ;
        /*00e0*/              @!P3 STG.E.U16 desc[UR4][R2.64], R4 ;
        /*00f0*/                   EXIT ;
.L_x_2:
        /*0100*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0110*/                   EXIT ;
.L_x_3:
        /*0120*/                   WARPSYNC.COLLECTIVE R5, `(.L_x_2) ;
        /*0130*/                   BRA `(.L_x_3) ;
.text._Z5otherv:
        /*0000*/                   BRX R2 -0x10 ;
"""


def test_the_path_of_a_full_block_moves_its_bytes_and_no_more() -> None:
    texts = kernels(SASS)
    assert list(texts) == ["_Z4fourv", "_Z5otherv"]
    blocks = blocks_of(texts["_Z4fourv"])
    of_two = path(blocks, (64, 16, 0, 0))
    assert [i.opcode for i in of_two][-4:] == ["BRA.DIV", "BRA", "STG.E.128", "EXIT"]
    assert sum(i.kind == "LDG" for i in of_two) == 4
    assert len(of_two) == 4 + 2 * 6 + 2 + 2
    ragged = path(blocks, (32, 2, 0, 0))
    assert [i.opcode for i in ragged][-2:] == ["STG.E.U16", "EXIT"]
    with pytest.raises(Unknown, match=r"no path moves \(48, 16, 0, 0\)"):
        path(blocks, (48, 16, 0, 0))
    with pytest.raises(Unknown, match="an address that is computed"):
        blocks_of(texts["_Z5otherv"])


def test_loads_are_waited_for_where_they_are_read() -> None:
    work = work_of(path(blocks_of(kernels(SASS)["_Z4fourv"]), (64, 16, 0, 0)))
    assert work == Work(instructions=20, floats=2, integers=6, waits=2)
    assert work.mixed(Work(28, 2, 6, 2), 0.25).instructions == 22


def test_registers_and_shared_memory_leave_room_for_blocks() -> None:
    assert [blocks_at_once(registers, 0) for registers in (32, 40, 64, 65, 128, 168, 255)] == [8, 6, 4, 3, 2, 1, 1]
    assert blocks_at_once(32, 40_000) == 4


def test_a_share_is_bounded_by_the_bandwidth_the_issue_and_the_waits() -> None:
    h100 = GPUS[1]
    assert 0.95 < share(Work(10, 0, 0, 0), 3.0, 4, h100) <= 1.0
    slow = share(Work(32 * 100, 0, 0, 0), 3.0, 4, h100)
    # 4 of 100 instructions an element, of 32 lanes, at every clock; an element is 3 bytes.
    assert slow == pytest.approx(132 * 4 * 1.755 * 32 / 100 * 3 / h100.bandwidth, abs=0.01)
    assert share(Work(32 * 50, 0, 32 * 50, 0), 3.0, 4, h100) == pytest.approx(slow, abs=0.01)
    assert share(Work(10, 0, 0, 100), 3.0, 1, h100) < 0.2
    assert share(Work(400, 0, 0, 9), 3.0, 1, h100) < share(Work(400, 0, 0, 9), 3.0, 4, h100)


def test_bytes_that_a_full_block_moves() -> None:
    by_name = {case.name: case for case in CASES}
    assert len(by_name) == 8
    assert by_name["encode, 8 bits"].bytes_an_element == 2 + 1 + 4 / 128
    assert by_name["sum of 8, encoded, 4 bits"].bytes_an_element == 9 * (0.5 + 4 / 128)
    assert by_name["decode, 4 bits"].part == 4 + 16
