"""Machine code written by hand, with and without writes to what a tensor core still reads."""

from __future__ import annotations

import pytest

from tools.tune.wgmma_hazards import find_hazards

PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR12].tnspB, R24"
CLOSING = f"{PRODUCT}, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def sass(*code: str) -> str:
    """As `cuobjdump -sass` prints it; `{n}` is the offset of line n."""
    offsets = [f"0x{16 * line:x}" for line in range(len(code))]
    lines = ["\t\tFunction : kernel", '\t.headerflags\t@"EF_CUDA_SM90"']
    for line, text in enumerate(code):
        lines.append(
            f"        /*{16 * line:04x}*/                   {text.format(*offsets)} ;   /* 0x00c5 */"
        )
        lines.append(" " * 90 + "/* 0x020fe20000000f00 */")
    return "\n".join(lines)


def hazards(*code: str) -> list[tuple[int, int]]:
    """Numbers of the lines of product and write."""
    return [(h.product.offset // 16, h.write.offset // 16) for h in find_hazards(sass(*code, "EXIT"))]


@pytest.mark.parametrize(
    "write",
    [
        "MOV R121, R7",
        "@!P0 MOV R123, R7",
        "LDS.128 R120, [R4+0x10]",
        "LDSM.16.M88.4 R120, [R4]",
        "LDS.64 R119, [R4]",
        "IMAD.WIDE R122, R3, 0x4, R8",
        "CS2R R122, SRZ",
        "SHFL.BFLY PT, R120, R9, 0x1, 0x1f",
        "LOP3.LUT P0, R121, R9, R8, RZ, 0xc0, !PT",
        "HMMA.16816.F32.BF16 R117, R4, R8, R20",
        "SOMETHING.NEW R122, R4",
    ],
)
def test_a_write_before_the_wait_is_found(write: str) -> None:
    assert hazards(CLOSING, write, WAIT) == [(0, 1)]


@pytest.mark.parametrize(
    "harmless",
    [
        "MOV R124, R120",
        "LDS.128 R116, [R120]",
        "LDS.64 R124, [R120]",
        "STS.128 [R4], R120",
        "ISETP.GE.AND P0, PT, R120, R7, PT",
        "R2UR UR4, R120",
        "LDGSTS.E.BYPASS.128 [R120+0x800], desc[UR4][R122.64]",
        "HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR16], R24, gsb0",
    ],
)
def test_reads_and_other_registers_are_no_hazard(harmless: str) -> None:
    assert hazards(CLOSING, harmless, WAIT, "MOV R121, R7") == []


def test_the_left_operand_in_shared_memory_is_in_no_register() -> None:
    code = "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR12], RZ, !UPT, gsb0"
    assert hazards(code, "MOV R12, R7", "MOV R89, R7", WAIT) == []


def test_a_wait_for_all_but_one_group_leaves_the_last_on_its_way() -> None:
    older, newer = (f"HGMMA.64x64x16.F32.BF16 R24, R{left}, gdesc[UR4], R24, gsb0" for left in (100, 104))
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
    assert hazards(older, newer, wait, "MOV R100, R7", "MOV R104, R7", WAIT) == [(1, 4)]


def test_a_group_of_several_products_is_waited_for_together() -> None:
    first = "HGMMA.64x64x16.F32.BF16 R24, R100, gdesc[UR4], R24"
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
    assert hazards(first, CLOSING, wait, "MOV R100, R7", WAIT, "MOV R100, R7") == [(0, 3)]


def test_a_write_at_the_beginning_of_the_next_round_is_found() -> None:
    loop = ("MOV R122, R7", WAIT, "MOV R121, R7", CLOSING, "@!P3 BRA {0}")
    assert hazards(*loop, WAIT, "MOV R120, R7") == [(3, 0)]


def test_a_write_on_one_of_two_paths_is_found() -> None:
    code = (CLOSING, "@P0 BRA {4}", WAIT, "BRA {5}", "MOV R120, R7", WAIT, "MOV R120, R7")
    assert hazards(*code) == [(0, 4)]


def test_a_write_that_no_path_leads_to_is_none() -> None:
    assert hazards(CLOSING, "BRA {3}", "MOV R120, R7", WAIT) == []


def test_each_function_is_read_by_itself() -> None:
    text = (
        sass(CLOSING, "EXIT")
        + "\n"
        + sass("MOV R120, R7", "EXIT")
        + "\n"
        + sass(CLOSING, "MOV R120, R7", "EXIT")
    )
    assert len(find_hazards(text)) == 1


def test_a_jump_to_an_address_in_a_register_is_refused() -> None:
    with pytest.raises(ValueError, match="0x10 BRX R4 -0x30: its target is not known"):
        hazards(CLOSING, "BRX R4 -0x30")
