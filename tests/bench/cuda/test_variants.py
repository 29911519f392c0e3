"""Settings of bench.cuda.variants are read whole, or refused by name."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="bench.cuda.variants needs torch")

from bench.cuda.variants import main, parse_variant
from bench.errors import BadInput
from glm53srv.kernels import Isa
from glm53srv.offload.device.gpu.copy_kernel import CopyShape


def test_a_name_alone_is_the_usual_setting() -> None:
    found = parse_variant("base:")
    assert (found.name, found.numbers, found.costs, found.isa, found.streams) == ("base", {}, {}, None, None)
    assert found.split is None


def test_settings_are_read() -> None:
    found = parse_variant(
        "slow: isa=AVX2, threads=4,landing=4, ahead=2, b=0.5,tzc=0.25,streams=1+4,split=whole"
    )
    assert found.isa is Isa.AVX2
    assert found.numbers == {"threads": 4, "landing": 4, "ahead": 2}
    assert found.costs == {"cpu_expert_ms": 0.5, "zero_copy_ms": 0.25}
    assert found.streams == (1, 4)
    assert found.split == "whole"


def test_shapes_of_the_copying_kernels_are_programs_warps_and_items() -> None:
    found = parse_variant("x: copies=16x4x2048, byrow=4,across=0,launches=1")
    assert found.copies == CopyShape(16, 4, 2048)
    assert found.numbers == {"byrow": 4, "across": 0, "launches": 1}


def test_prompts_take_the_place_of_steps() -> None:
    found = parse_variant("short: prompts=24+96,cpuprompt=0")
    assert found.prompts == (24, 96)
    assert found.numbers == {"cpuprompt": 0}


@pytest.mark.parametrize(
    "text",
    [
        "x: isa=MMX",
        "x: threads=many",
        "x: landing=0",
        "x: tint=red",
        ": threads=2",
        "x: streams=1,2",
        "x: split=half",
        "x: copies=16x4",
        "x: copies=8x8x4000",
        "x: copies=0x8x4096",
        "x: threads=0",
    ],
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--vary"):
        parse_variant(text)


def test_a_command_without_variants_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mode", "fast"]) == 2
    assert "--vary" in capsys.readouterr().err
