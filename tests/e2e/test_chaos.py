"""bench/soak.py and bench/stream_rate.py in short form, the server in a process of its own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bench import soak, stream_rate
from bench.stream_rate import Arrival, NothingToJudge
from tests.e2e.server_process import ServerProcess

NUM_REQUESTS = "80"


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_chaos_breaks_nothing_and_leaks_no_connection(random_model_dir: Path) -> None:
    with ServerProcess(random_model_dir, "--max-body-mib", "1", "--chunk-tokens", "128") as process:
        url = process.url_when_ready()
        pid = process.process.pid
        before = open_files(pid)
        flags = ["--url", url, "--requests", NUM_REQUESTS, "--max-body-mib", "1", "--health-ms", "1000"]
        assert soak.main(flags) == 0  # the 100 ms are for a quiet machine: timings never fail this suite
        pause = threading.Event()
        for _ in range(100):
            if open_files(pid) <= before:
                break
            pause.wait(0.1)
        assert open_files(pid) <= before
        assert process.stop() == 0
    assert not [line for line in process.output if " ERROR " in line or "Traceback" in line]


def test_a_soak_sees_a_server_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--url", "http://127.0.0.1:9", "--requests", "8", "--clients", "2"]) == 1
    assert "PROBLEM" in capsys.readouterr().out


def even(seconds: float, count: int) -> list[Arrival]:
    return [Arrival(5.0 + seconds * at / (count - 1), 4) for at in range(count)]


def test_an_even_stream_passes() -> None:
    verdict = stream_rate.judge(even(20.0, 400))
    assert verdict.is_even
    assert verdict.half_share == pytest.approx(0.5, abs=0.01)
    assert verdict.last_second_share == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize(
    "arrivals",
    [
        [*even(20.0, 400), Arrival(25.0, 2000)],  # held back to the end
        [
            *even(10.0, 20),
            *[Arrival(16.0 + at / 100, 4) for at in range(600)],
            Arrival(25.0, 1),
        ],  # and half way
    ],
)
def test_text_that_was_held_back_fails(arrivals: list[Arrival]) -> None:
    assert not stream_rate.judge(arrivals).is_even


@pytest.mark.parametrize("arrivals", [[], even(0.5, 500)])
def test_a_stream_that_came_at_once_is_not_judged(arrivals: list[Arrival]) -> None:
    with pytest.raises(NothingToJudge):
        stream_rate.judge(arrivals)
