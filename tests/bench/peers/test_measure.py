"""What is measured, in which order, and that two peers are given the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.peers.measure import Rounds, measure
from bench.peers.options import PeerOptions
from bench.peers.peer_command import Results, run_peer
from tests.bench.peers.fake_peer import FakePeer

ROUNDS = Rounds(
    warm_steps=3,
    steps=5,
    prefill_tokens=250,
    prompt_tokens=20,
    widths=(1, 3),
    short_repeats=2,
    long_repeats=1,
)


def options(out: Path) -> PeerOptions:
    return PeerOptions(Path("model"), 2**30, 4096, 7, 8, 2, "own", ROUNDS, out)


def test_experts_are_held_behind_the_prompts_of_each_width() -> None:
    peer, figures = FakePeer(), dict[str, Any]()

    measure(peer, ROUNDS, figures.__setitem__)

    steps = 3 + 5
    assert peer.engine.calls == [
        *["prompt"] * 2,
        *["prompt"] * 3,  # 250 tokens in chunks of 100
        *["prompt", "hold", *["decode 1"] * steps, "let go"],
        *["prompt"] * 3,
        *["hold", *["decode 3"] * steps, "let go"],
    ]
    assert peer.sent == [[0]] * steps + [[0, 1, 2]] * steps
    assert list(figures) == ["first_token_s", "prefill_s", "decode_1", "decode_3"]
    assert (len(figures["first_token_s"]), len(figures["prefill_s"])) == (2, 1)
    assert not peer.engine.book.slots  # nothing is left behind


def test_rates_come_from_the_timed_steps_alone() -> None:
    figures = dict[str, Any]()
    measure(FakePeer(), ROUNDS, figures.__setitem__)
    decode = figures["decode_3"]
    assert decode["num_vram"] == 3.0
    assert decode["tok_s"] == pytest.approx(3 / (decode["mean_step_ms"] / 1e3))
    assert 0 < decode["step_ms"] <= decode["longest_step_ms"]


def test_two_peers_are_given_the_same_tokens() -> None:
    peers = [FakePeer(), FakePeer()]
    for peer in peers:
        measure(peer, ROUNDS, lambda name, value: None)
    assert peers[0].engine.prompts == peers[1].engine.prompts
    assert peers[0].engine.decoded == peers[1].engine.decoded
    assert len(set(peers[0].engine.decoded)) > 10


def test_a_peer_leaves_its_figures_in_the_file(tmp_path: Path) -> None:
    peer, out = FakePeer(), tmp_path / "peer.json"

    code = run_peer("fake", options(out), lambda given, say: peer)

    found = json.loads(out.read_bytes())
    assert (code, peer.closed) == (0, 1)
    assert found["peer"] == "fake"
    assert found["options"]["rounds"]["prefill_tokens"] == 250
    assert found["decode_3"]["num_vram"] == 3.0
    assert found["facts"] == {"peak_ram_gib": 1.0}
    assert "error" not in found


def test_a_peer_that_fails_keeps_what_it_measured_and_says_why(tmp_path: Path) -> None:
    peer, out = FakePeer(fails_at=14), tmp_path / "peer.json"

    code = run_peer("fake", options(out), lambda given, say: peer)

    found = json.loads(out.read_bytes())
    assert (code, peer.closed) == (2, 1)
    assert found["error"] == "EngineError: the device is gone"
    assert "prefill_s" in found
    assert "decode_3" not in found


def test_a_peer_that_is_killed_at_any_time_leaves_a_whole_file(tmp_path: Path) -> None:
    out = tmp_path / "peer.json"
    results = Results("fake", options(out))
    results.note("open_s", 1.0)

    with out.open() as before:
        results.note("prefill_s", [2.0])
        kept = json.loads(before.read())  # a file that is written over has lost these while it is written

    assert kept["open_s"] == 1.0
    assert "prefill_s" not in kept
    assert json.loads(out.read_text())["prefill_s"] == [2.0]


def test_a_peer_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    def refuse(given: PeerOptions, say: Any) -> FakePeer:
        raise RuntimeError("no such device")

    assert run_peer("fake", options(tmp_path / "peer.json"), refuse) == 2
    assert json.loads((tmp_path / "peer.json").read_bytes())["error"] == "RuntimeError: no such device"
