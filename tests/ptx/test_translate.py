"""PTX as text, its kernels, and their programs; no compiler is needed. tests/ptx/test_codec.py runs them."""

from __future__ import annotations

import pytest

from tests.ptx.parse import UnknownText, parse, parse_kernel
from tests.ptx.translate import Program, UnknownInstruction, translate

WIDTHS = {
    "add.s32": "444", "add.s64": "888", "mov.u32": "44", "setp.lt.s32": "044", "selp.b32": "4440", "bra": "", "ret": "",
    "ld.global.u16": "", "ld.param.u64": "", "ld.param.s32.wide": "", "tid.x": "4", "bar.sync": "", "pack.b32": "422",
    "cvt.u32.u64": "48", "cvt.u16.u32": "24", "cvt.s64.s32.wide": "88",
}  # fmt: skip
REGISTERS = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>; .reg .b16 %rs<9>;"


def program(body: str, parameters: str = "") -> Program:
    return translate(parse_kernel("k", parameters, f"{REGISTERS}\n{body}"), WIDTHS.get)


def test_a_module_has_its_kernels_and_tables() -> None:
    text = """
.global .align 2 .b8 table[4] = {57, 255, 199, 0};
.visible .entry one(
	.param .u64 one_param_0,
	.param .align 4 .b8 one_param_1[20],
	.param .u8 one_param_2,
	.param .f32 one_param_3
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<2>;
	.shared .align 16 .b8 a[10];
	.shared .align 16 .b8 b[32];
	@!%p1 bra 	$L__BB0_2; // away
	{ .reg .b16 %tmp; mov.b32 {%tmp, %rs1}, %r1; }

$L__BB0_2:
	ret;

}
"""
    module = parse(text)
    kernel = module.kernel("one")
    assert module.tables == {"table": bytes([57, 255, 199, 0])}
    assert [at for at, _ in kernel.parameters.values()] == [0, 8, 28, 32]
    assert kernel.shared == {"a": 0, "b": 16} and kernel.shared_bytes == 48
    assert [(i.opcode, i.operands) for i in kernel.instructions] == [
        ("bra", ("$L__BB0_2",)), ("mov.b32", ("{%tmp_b16, %rs1}", "%r1")), ("ret", ())
    ]  # fmt: skip
    branch = kernel.instructions[0]
    assert (branch.guard, branch.negated, branch.line) == ("%p1", True, 14)
    assert kernel.labels == {"$L__BB0_2": 2}


def test_a_name_declared_in_braces_means_what_it_meant_before_behind_them() -> None:
    kernel = parse_kernel("k", "", "{ .reg .pred %p1; mov.pred %p1, %p2; { mov.pred %p1, %p3; } }\nmov.pred %p1, %p2;")
    assert [i.operands[0] for i in kernel.instructions] == ["%p1_pred", "%p1_pred", "%p1"]


def test_a_line_of_another_language_is_refused() -> None:
    with pytest.raises(UnknownText, match="line 1 of k: HLT"):
        parse_kernel("k", "", "HLT;")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("fma.rn.f32 %r1, %r2, %r3, %r4;", "no opcode fma.rn.f32"),
        ("add.s32 %r1, %rd2, %r3;", "%rd2 of 64 bits where 4 bytes are meant"),
        ("add.s32 %r1, %r2;", "add.s32 of 2 operands"),
        ("bar.sync 1;", "a barrier of some threads"),
        ("bar.sync 0, 64;", "a barrier of some threads"),
        ("ld.global.u32 %rs1, [%rd1];", "32 bits and registers of {16}"),
        ("ld.global.u16 %rs1, [%rd1+%r1];", "an address"),
        ("mov.u32 %r1, %laneid;", "%laneid is not declared in k"),
        ("mov.u32 %r1, unknown;", "mov.u32 %r1, unknown, line 2 of k"),
    ],
)
def test_missing_abilities_of_the_machine_are_named(line: str, named: str) -> None:
    with pytest.raises((UnknownInstruction, UnknownText)) as refused:
        program(line)
    assert named in str(refused.value)


def test_operands_are_slots_and_constants() -> None:
    made = program(
        "mov.u32 %r1, %tid.x;\nadd.s32 %r2, %r1, -1;\nadd.s64 %rd1, %rd2, -1;\n@!%p1 bra $L;\n$L:\nret;",
    )
    assert made.opcodes == ["tid.x", "add.s32", "add.s64", "bra", "ret"]
    assert made.constants == [(0xFFFFFFFF, False), (0xFFFFFFFFFFFFFFFF, True)]
    tid, add, wide, branch, _ = made.rows
    assert add[5] == tid[4] and add[6] == ~0 and wide[6] == ~1
    assert branch[2] == 1 and branch[4] == 4  # negated; to the fifth row


def test_orders_of_memory_do_not_matter_and_wide_registers_do() -> None:
    made = program(
        "ld.volatile.global.nc.L1::no_allocate.u16 %rs1, [%rd1+2];\nld.param.s32 %rd2, [p+4];", ".param .u64 p"
    )
    assert made.opcodes == ["ld.global.u16", "ld.param.s32.wide"]
    assert made.rows[0][4:7] == (made.rows[0][4], 1, 2)


def test_registers_of_one_run_share_slots_and_a_loop_keeps_its_own() -> None:
    made = program(
        "add.s32 %r1, 1, 2;\nadd.s32 %r2, %r1, 1;\nadd.s32 %r3, %r2, 1;\nadd.s64 %rd1, 1, 2;\n"
        "$L:\nadd.s32 %r5, 3, 4;\nselp.b32 %r4, %r5, %r4, %p1;\nadd.s32 %r6, %r5, 5;\n@%p1 bra $L;"
    )
    # %r3 may be where %r1 was.
    to = [row[4] for row in made.rows]
    assert to[2] == to[0] and to[1] != to[0]
    assert to[3] not in to[:3]  # 64 bits lie where two lanes have 32 each
    assert to[5] not in (to[0], to[1], to[4], to[6])  # %r4 was set one time round before
