"""The model of a step's lanes: its arithmetic, and that the rule of look-ahead does well in it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench.errors import BadInput
from bench.lanes_model import BOTH_SHARE, GATHER_SHARE, H200, PCIE4, Machine, main, play, share_link
from glm53srv.offload.look_ahead import MORE_AHEAD, NUM_AHEAD, fits_gap

STEPS = 96


def test_fetches_and_own_copies_share_the_link() -> None:
    assert share_link([], 0.0, 0.5) == (0.0, 0.0)
    assert share_link([], 2.0, 0.5) == pytest.approx((2 * GATHER_SHARE * 0.5, 0.0))
    assert share_link([0.5, 1.0], 0.0, 0.5) == pytest.approx((0.0, 0.75))
    both_ms = 2 * BOTH_SHARE * 0.5
    assert share_link([0.4, 0.6], 3.0, 0.5) == pytest.approx((both_ms + 2 * GATHER_SHARE * 0.5, both_ms))
    assert share_link([1.0, 1.0], 1.0, 0.5) == pytest.approx((both_ms, both_ms + 0.5))


def test_without_fetches_nothing_is_late() -> None:
    found = play(H200, 1, (0, 0), STEPS)
    assert (found.tail_us, found.fetched, found.right) == (0, 0, 0)
    assert found.own > 0
    assert found.cpu > 0
    assert 0 < found.link < 1
    assert found.tok_s == pytest.approx(1e3 / found.step_ms)


def test_what_a_gap_does_not_hold_is_late() -> None:
    few, many = play(H200, 1, (1, 1), STEPS), play(H200, 1, (3, 3), STEPS)
    assert few.tail_us < 5
    assert many.tail_us > 150
    assert many.step_ms > few.step_ms
    assert few.right == pytest.approx(0.74 * few.fetched, rel=0.03)


@pytest.mark.parametrize(
    ("machine", "copy_ms", "least"),
    [(H200, 0.174, 0.97), (PCIE4, 0.378, 0.985), (PCIE4, 0.75, 0.985), (PCIE4, 1.5, 0.985)],
)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_the_rule_chooses_nearly_the_best(machine: Machine, copy_ms: float, least: float, rows: int) -> None:
    machine = replace(machine, copy_ms=copy_ms)
    gaps = machine.rows[rows]
    plain = min(NUM_AHEAD, fits_gap(gaps.gap, copy_ms))
    across = min(NUM_AHEAD + (MORE_AHEAD if rows > 1 else 0), fits_gap(gaps.across, copy_ms))
    chosen = play(machine, rows, (plain, across), STEPS).tok_s
    others = [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)]
    assert chosen >= least * max(play(machine, rows, each, STEPS).tok_s for each in others)


def test_the_command_prints_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rows", "1", "--ahead", "0", "1/2", "--steps", "16"]
    assert main(words) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["rows", "ahead", "tok_s", "step_ms"]
    assert [line.split()[:2] for line in lines] == [["1", "0/0"], ["1", "1/2"]]
    assert main([*words, "--json", "--machine", "pcie4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["1 1/2"]["fetched"] == pytest.approx(31 + 2 * 10)


@pytest.mark.parametrize(
    "words",
    [["--ahead", "1/x"], ["--ahead", "9"], ["--copy-ms", "0"], ["--copy-ms", "nan"], ["--steps", "3"]],
)
def test_what_cannot_be_is_refused(words: list[str]) -> None:
    with pytest.raises(BadInput, match=words[0]):
        main(words)
