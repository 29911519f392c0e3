"""The run: parts one after the other, each for itself, with peers that are made up."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.peers.checkpoint import MARKER
from bench.peers.run import (
    PEERS,
    Part,
    RunOptions,
    main,
    parse,
    peer_command,
    peer_limit_s,
    run_all,
    run_part,
)
from tests.bench.peers.test_table import results

WRITE = """
import json, pathlib, sys
target = pathlib.Path(sys.argv[1])
target.mkdir(parents=True)
(target / "drawn.json").write_text(
    json.dumps({"layers": 15, "seed": 0, "device": "cpu", "num_bytes": 1})
)
"""
REPORT = """
import pathlib, sys
pathlib.Path(sys.argv[1]).write_text(sys.argv[2])
print("measured")
"""
FAIL = "import sys; print('loading'); sys.exit('no room on the card')"
HANG = "import signal; signal.pause()"


class Family:
    """Gives commands in place of the real ones. broken: name of a part -> what it does instead."""

    def __init__(self, broken: dict[str, str] | None = None) -> None:
        self.broken = broken or {}
        self.asked: list[str] = []

    def __call__(self, options: RunOptions, name: str) -> Sequence[str]:
        self.asked.append(name)
        python = (sys.executable, "-c")
        if name in self.broken:
            return (*python, self.broken[name])
        if name == "checkpoint":
            return (*python, WRITE, str(options.work_dir))
        factor = {"stock": 1.0, "ours-fast": 4.0}.get(name, 1.5)
        return (*python, REPORT, str(options.out_dir / f"{name}.json"), json.dumps(results(factor)))


def options(root: Path, *, keeps: bool = False, peer_limit_s: float = 60.0) -> RunOptions:
    return RunOptions(None, root / "work", root / "out", keeps, 60.0, peer_limit_s, ())


def test_all_parts_run_in_order_and_the_table_is_printed_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = Family()

    code = run_all(options(tmp_path), family)

    assert code == 0
    assert family.asked == ["checkpoint", "stock", "ours-fast", "ours-exact"]
    text = capsys.readouterr().out
    assert text.endswith((tmp_path / "out/peers.txt").read_text())
    assert "ours-fast / stock: tok/s x1 4.00" in text
    assert json.loads((tmp_path / "out/peers.json").read_bytes())["layers"] == 15
    assert (tmp_path / "out/stock.log").read_text() == "measured\n"
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("name", PEERS)
def test_the_others_run_when_one_peer_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    family = Family({name: FAIL})

    code = run_all(options(tmp_path), family)

    assert code == 1
    assert family.asked == ["checkpoint", *PEERS]
    text = capsys.readouterr().out
    assert "    no room on the card" in text
    assert set(json.loads((tmp_path / "out/peers.json").read_bytes())["peers"]) == set(PEERS) - {name}
    assert not (tmp_path / "work").exists()


def test_a_peer_that_hangs_is_ended_at_its_limit(tmp_path: Path) -> None:
    outcome = run_part(Part("stock", (sys.executable, "-c", HANG), 0.0), tmp_path / "log")
    assert (outcome.code, outcome.is_good) == (None, False)
    assert "limit of 0 s" in str(outcome)


def test_what_a_peer_had_measured_before_its_limit_stays_in_the_table(tmp_path: Path) -> None:
    class Hanging(Family):
        """Its peers have left their first figures, and hang."""

        def __call__(self, options: RunOptions, name: str) -> Sequence[str]:
            command = super().__call__(options, name)
            if name not in PEERS:
                return command
            so_far = results(decode_2=None, decode_4=None, facts=None)
            (options.out_dir / f"{name}.json").write_text(json.dumps(so_far))
            return (sys.executable, "-c", HANG)

    code = run_all(options(tmp_path, peer_limit_s=0.0), Hanging())

    text = (tmp_path / "out/peers.txt").read_text()
    assert code == 1
    assert text.count("ended after its limit of 0 s") == len(PEERS)
    row = next(line for line in text.split("layers:\n")[1].splitlines() if line.startswith("stock"))
    assert row.split() == ["stock", "40.0", "-", "-", "25.0", "-", "-", "4096", "0.50", "31.0", "-", "-"]
    assert "ours-fast / stock: tok/s x1 1.00, tok/s x2 -" in text
    assert json.loads((tmp_path / "out/peers.json").read_bytes())["peers"]["stock"]["open_s"] == 31.0


def test_stock_has_longer_to_open_unless_one_limit_is_given_for_all() -> None:
    words = ["--work", "w", "--out", "o"]
    limits = {name: peer_limit_s(parse(words), name) for name in PEERS}
    assert limits == {"stock": 300.0, "ours-fast": 140.0, "ours-exact": 140.0}
    given = parse([*words, "--peer-limit", "75"])
    assert {peer_limit_s(given, name) for name in PEERS} == {75.0}


def test_what_a_peer_started_ends_with_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    child = (
        f"import fcntl, signal; held = open({str(lock)!r}, 'w'); fcntl.flock(held, fcntl.LOCK_EX); "
        "print(1, flush=True); signal.pause()"
    )
    parent = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {child!r}], "
        "stdout=subprocess.PIPE); child.stdout.readline()"
    )

    outcome = run_part(Part("stock", (sys.executable, "-c", parent), 60.0), tmp_path / "log")

    assert outcome.is_good
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the child held it; waits for its end


def test_a_program_that_is_not_there_is_a_failed_part(tmp_path: Path) -> None:
    outcome = run_part(Part("stock", (str(tmp_path / "none"),), 60.0), tmp_path / "log")
    assert not outcome.is_good
    assert "cannot be started" in str(outcome)


def test_without_a_checkpoint_no_peer_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = Family({"checkpoint": FAIL})
    assert run_all(options(tmp_path), family) == 1
    assert family.asked == ["checkpoint"]
    assert capsys.readouterr().out.count("not run: there is no checkpoint") >= 3


def test_a_peer_that_measured_nothing_has_no_row(tmp_path: Path) -> None:
    report = 'import pathlib; pathlib.Path({!r}).write_text(\'{{"error": "lost"}}\'); raise SystemExit(2)'
    broken = {name: report.format(str(tmp_path / f"out/{name}.json")) for name in PEERS}
    assert run_all(options(tmp_path), Family({"stock": broken["stock"]})) == 1
    table = (tmp_path / "out/peers.txt").read_text().split("layers:\n")[1]
    assert "stock" not in table
    assert "ours-fast" in table
    assert run_all(options(tmp_path), Family(broken)) == 1
    assert "layers:" not in (tmp_path / "out/peers.txt").read_text()
    assert set(json.loads((tmp_path / "out/peers.json").read_bytes())["peers"]) == set(PEERS)


def test_the_checkpoint_is_kept_when_it_should_be(tmp_path: Path) -> None:
    assert run_all(options(tmp_path, keeps=True), Family()) == 0
    assert (tmp_path / "work" / MARKER).is_file()


def test_a_checkpoint_that_was_there_is_not_deleted(tmp_path: Path) -> None:
    run_all(options(tmp_path, keeps=True), Family())
    run_all(options(tmp_path), Family({"checkpoint": "print('as it is')"}))
    assert (tmp_path / "work" / MARKER).is_file()


def test_figures_of_an_earlier_run_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    run_all(options(tmp_path), Family())
    assert run_all(options(tmp_path), Family({"stock": FAIL})) == 1
    assert "stock" not in json.loads((tmp_path / "out/peers.json").read_bytes())["peers"]


def test_a_work_directory_with_something_else_in_it_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/thesis.txt").write_text("mine")
    assert main(["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]) == 2
    assert "name another directory" in capsys.readouterr().err
    assert (tmp_path / "work/thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("words", [("--layers", "3"), ("--vram", "5")])
def test_what_a_part_would_refuse_later_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main(["--work", str(tmp_path / "w"), "--out", str(tmp_path / "o"), *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "o").exists()


def test_an_unknown_option_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--work", "w", "--out", "o", "--wrm", "3"])
    assert caught.value.code == 2


def test_each_part_gets_its_command(tmp_path: Path) -> None:
    given = parse(
        ["--work", str(tmp_path / "w"), "--out", str(tmp_path / "o"), "--steps", "7", "--layers", "9"]
    )
    modules = {name: peer_command(given, name)[2] for name in ("checkpoint", *PEERS)}
    assert list(modules.values()) == [
        "bench.peers.checkpoint",
        "bench.peers.stock",
        *["bench.peers.ours"] * 2,
    ]
    assert peer_command(given, "checkpoint")[3:] == (str(tmp_path / "w"), "--layers", "9")
    for name in PEERS:
        command = peer_command(given, name)
        assert command[3] == str(tmp_path / "w")
        assert command[-4:] == ("--out", str(tmp_path / f"o/{name}.json"), "--steps", "7")
    assert "exact" in peer_command(given, "ours-exact")
    assert "fast" in peer_command(given, "ours-fast")
