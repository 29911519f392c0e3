"""Command lines of the peers."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from bench.errors import BadInput
from bench.peers import ours, stock
from bench.peers.options import PeerOptions, add_options, read_options
from bench.peers.ours import cache_slots, check_source
from glm53srv.machine import GIB, read_machine

MACHINE = replace(read_machine(), core_cpus=tuple(range(16)))


def read(*words: str) -> PeerOptions:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir", type=Path)
    add_options(parser)
    return read_options(parser.parse_args(["model", *words]), MACHINE)


def test_by_default_both_get_what_a_24_gib_card_holds_of_the_whole_model() -> None:
    options = read()
    assert (options.vram_bytes, options.cache_tokens) == (24 * GIB, 131072)
    assert (options.gpu_experts, options.threads) == (31, 14)
    assert (options.rounds.warm_steps, options.rounds.steps, options.rounds.prefill_tokens) == (48, 48, 8192)
    assert 31 < options.our_experts < 40  # while the KV cache is nearly empty
    assert cache_slots(options.our_experts) == options.our_experts * 42


def test_what_is_given_is_taken() -> None:
    options = read("--vram", "12.5", "--experts", "300", "--threads", "3", "--steps", "5", "--warm", "6")
    assert options.vram_bytes == int(12.5 * GIB)
    assert (options.gpu_experts, options.our_experts, options.threads) == (288, 288, 3)
    assert (options.rounds.warm_steps, options.rounds.steps) == (6, 5)


def test_a_card_that_is_too_small_is_refused_unless_the_number_is_given() -> None:
    with pytest.raises(BadInput):
        read("--vram", "8")
    assert read("--vram", "8", "--experts", "2").gpu_experts == 2


@pytest.mark.parametrize("words", [("--vram", "0"), ("--steps", "0"), ("--experts", "x"), ("--what", "1")])
def test_impossible_numbers_and_unknown_options_are_errors(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        read(*words)
    assert caught.value.code == 2


def test_our_engine_wants_one_source_of_weights(capsys: pytest.CaptureFixture[str]) -> None:
    check_source(Path("model"), False, None)
    check_source(None, True, 15)
    for model_dir, synthetic, layers in (
        (None, False, None),
        (Path("m"), True, None),
        (Path("m"), False, 15),
    ):
        with pytest.raises(BadInput):
            check_source(model_dir, synthetic, layers)
    assert ours.main([]) == 2
    assert "name a checkpoint or --synthetic" in capsys.readouterr().err


def test_a_peer_without_its_checkpoint_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stock.main([str(tmp_path / "none"), "--threads", "2"]) == 2
    assert "config.json" in capsys.readouterr().out
