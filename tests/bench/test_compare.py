"""Ratios of two servers or two files, and when a ratio is a difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.compare import (
    CHAT_SECONDS,
    Ratio,
    lasting_tokens,
    main,
    ratio_of_blocks,
    ratio_of_metrics,
)
from bench.report import FAILED, FORMAT, NOT_MEASURED, PASSED, run_command, spread


def block(a: list[float], b: list[float]) -> dict[str, list[float]]:
    return {"A": a, "B": b}


def test_a_steady_drift_cancels_in_every_block() -> None:
    drifting = [100.0 - 3.0 * at for at in range(12)]
    blocks = [block([x[0], x[3]], [x[1], x[2]]) for x in (drifting[0:4], drifting[4:8], drifting[8:12])]

    ratio = ratio_of_blocks("x", blocks)

    assert (ratio.low, ratio.ratio, ratio.high) == pytest.approx((1.0, 1.0, 1.0))
    assert ratio.verdict(0.0) == "same"


def test_a_difference_in_every_block_is_one() -> None:
    ratio = ratio_of_blocks("x", [block([100, 101], [110, 111]), block([90, 91], [100, 101])])

    assert ratio.verdict(0.02) == "better"
    assert ratio_of_blocks("x", [block([110, 111], [100, 99])]).verdict(0.02) == "worse"


def test_a_ratio_within_the_noise_of_one_server_is_none() -> None:
    ratio = ratio_of_blocks("x", [block([50, 100], [80, 110]), block([60, 90], [85, 120])])

    assert ratio.low > 1.0
    assert ratio.own_noise > ratio.ratio - 1.0
    assert ratio.verdict(0.02) == "same"


def test_times_are_turned_so_that_above_one_is_better() -> None:
    assert ratio_of_blocks("x", [block([10], [5])], higher_is_better=False).ratio == 2.0
    slow = spread([10.0, 12.0]) | {"better": "lower"}
    fast = spread([5.0, 6.0]) | {"better": "lower"}
    ratio = ratio_of_metrics("x", slow, fast)
    assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((2.0, 10 / 6, 12 / 5))


def test_overlapping_files_are_the_same() -> None:
    ratio = ratio_of_metrics("x", spread([10.0, 12.0]), spread([11.0, 13.0]))

    assert ratio.verdict(0.02) == "same"


def sweep_file(path: Path, values: list[float], machine: str = "cpu") -> Path:
    metrics = {"prefill 8192": spread(values) | {"unit": "tok/s", "better": "higher"}}
    document: dict[str, Any] = {
        "format": FORMAT,
        "tool": "sweep",
        "machine": {"cpu": machine},
        "result": {"metrics": metrics},
    }
    path.write_text(json.dumps(document))
    return path


def compare(a: Path | str, b: Path | str, out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run_command(main, ["--a", str(a), "--b", str(b), "--out", str(out), "--quiet", *arguments])
    return code, json.loads(out.read_text()) if out.is_file() else {}


def test_a_loss_between_two_files_fails_and_a_gain_does_not(tmp_path: Path) -> None:
    slow = sweep_file(tmp_path / "slow.json", [80.0, 81.0], machine="other")
    fast = sweep_file(tmp_path / "fast.json", [100.0, 101.0])

    assert compare(fast, slow, tmp_path / "loss")[0] == FAILED
    code, document = compare(slow, fast, tmp_path / "gain")

    assert code == PASSED
    assert document["result"]["ratios"][0]["verdict"] == "better"
    assert any("cpu differs: other and cpu" in note for note in document["notes"])


def test_a_file_and_a_server_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sweep_file(tmp_path / "a.json", [1.0])

    assert compare(path, "http://127.0.0.1:1", tmp_path / "o")[0] == NOT_MEASURED
    assert "both be files or both" in capsys.readouterr().err


def test_a_server_is_measured_against_itself_in_turn(server: str, tmp_path: Path) -> None:
    short = ["--blocks", "2", "--prefill", "32", "--conc", "1", "--max-tokens", "4", "--max-loss", "1"]

    code, document = compare(server, server, tmp_path / "o", *short)

    assert code == PASSED  # --max-loss 1: what times come out is not this test's business
    blocks = document["result"]["blocks"]
    assert document["result"]["max_tokens"] == 4
    assert list(blocks) == ["prefill 32", "decode C1"]
    assert all(len(block[side]) == 2 for each in blocks.values() for block in each for side in "AB")
    ratios = [Ratio(**{k: v for k, v in r.items() if k != "verdict"}) for r in document["result"]["ratios"]]
    assert all(ratio.low <= ratio.ratio <= ratio.high for ratio in ratios)


class SteadyServer:
    """Takes so long for a chat: seconds of each, at rates of which the last repeats."""

    def __init__(self, *rates: float) -> None:
        self._rates = list(rates)
        self.asked: list[int] = []

    def __call__(self, num_tokens: int) -> float:
        self.asked.append(num_tokens)
        rate = self._rates.pop(0) if len(self._rates) > 1 else self._rates[0]
        return num_tokens / rate


@pytest.mark.parametrize("rate", [2, 30, 250])
def test_on_a_slow_server_a_chat_is_short(rate: float) -> None:
    server = SteadyServer(rate)
    assert lasting_tokens(server, 128, 8192) == 128
    assert server.asked == [128]


@pytest.mark.parametrize("rates", [[60], [270], [800], [3000], [400, 900], [300, 200]])
def test_on_a_fast_server_a_chat_lasts_long_enough_to_be_timed(rates: list[float]) -> None:
    server = SteadyServer(*rates)
    num_tokens = lasting_tokens(server, 24, 8192)
    assert server.asked[-1] == num_tokens
    assert CHAT_SECONDS <= num_tokens / rates[-1] < 2 * CHAT_SECONDS
    assert len(server.asked) <= 3


def test_a_chat_is_no_longer_than_the_context_allows() -> None:
    assert lasting_tokens(SteadyServer(1e4), 128, 2048) == 1024
    assert lasting_tokens(SteadyServer(1e4), 128, 200) == 100


def test_a_server_that_is_faster_each_time_is_not_asked_for_ever() -> None:
    server = SteadyServer(1e3, 1e4, 1e5, 1e6, 1e7)
    lasting_tokens(server, 128, 10**9)
    assert len(server.asked) == 4


def test_two_servers_get_chats_of_one_length_that_is_found(server: str, tmp_path: Path) -> None:
    code, document = compare(
        server,
        server,
        tmp_path / "o",
        "--blocks",
        "1",
        "--prefill",
        "--max-loss",
        "1",
        "--least-tokens",
        "24",
    )

    assert code == PASSED
    assert document["result"]["max_tokens"] >= 24
    assert list(document["result"]["blocks"]) == ["decode C1"]
