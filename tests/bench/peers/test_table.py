"""The table: figures as they are, gaps where a peer came to nothing, ratios, a labelled extrapolation."""

from __future__ import annotations

from typing import Any

import pytest

from bench.peers.table import figures, render


def results(factor: float = 1.0, **changes: Any) -> dict[str, Any]:
    whole = {
        "options": {"rounds": {"prefill_tokens": 8192}},
        "first_token_s": [9.0, 0.4 / factor, 0.5 / factor],
        "prefill_s": [8.0, 2.0 / factor],
        **{f"decode_{n}": {"step_ms": 40.0 / factor, "tok_s": 25.0 * n * factor} for n in (1, 2, 4)},
        "open_s": 31.0,
        "facts": {"peak_ram_gib": 40.2, "peak_vram_gib": 9.1},
    }
    return {name: value for name, value in (whole | changes).items() if value is not None}


def test_the_best_long_prompt_and_the_median_of_short_ones_are_shown() -> None:
    found = figures(results())
    assert found["prefill tok/s"] == 4096
    assert found["first s"] == 0.5
    assert (found["ms x1"], found["tok/s x4"], found["VRAM GiB"]) == (40.0, 100.0, 9.1)


def test_a_run_of_three_peers() -> None:
    text = render({"ours-fast": results(4.0), "stock": results(), "ours-exact": results(1.5)}, 15)
    lines = text.splitlines()
    assert lines[0] == "as measured, 15 of 45 layers:"
    table = lines[1:5]
    assert len({len(line) for line in table}) == 1
    assert table[2].split()[:7] == ["stock", "40.0", "40.0", "40.0", "25.0", "50.0", "100.0"]
    assert "ours-fast / stock: tok/s x1 4.00, tok/s x2 4.00, tok/s x4 4.00, prefill tok/s 4.00" in lines
    assert "ours-exact / stock: tok/s x1 1.50, tok/s x2 1.50, tok/s x4 1.50, prefill tok/s 1.50" in lines
    assert "times 3.50 (42 sparse layers for 12), an extrapolation and no measurement:" in lines
    assert "  stock: tok/s x1 7.14, x2 14.3, x4 28.6, prefill 1170" in lines


def test_what_a_peer_did_not_come_to_is_a_gap() -> None:
    broken = results(decode_4=None, facts=None, error="EngineError: lost")
    text = render({"stock": broken, "ours-fast": results(2.0)}, 15)
    row = next(line for line in text.splitlines() if line.startswith("stock"))
    assert row.split()[3:7] == ["-", "25.0", "50.0", "-"]
    assert "ours-fast / stock: tok/s x1 2.00, tok/s x2 2.00, tok/s x4 -, prefill tok/s 2.00" in text


def test_without_stock_there_are_no_ratios() -> None:
    assert "/ stock" not in render({"ours-fast": results()}, 15)


@pytest.mark.parametrize(("layers", "is_scaled"), [(4, True), (45, False)])
def test_the_whole_model_needs_no_extrapolation(layers: int, is_scaled: bool) -> None:
    assert ("extrapolation" in render({"stock": results()}, layers)) == is_scaled
