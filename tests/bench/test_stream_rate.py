"""How long an answer the evenness check asks for: enough for a verdict, whatever the server's speed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence

import pytest

from bench.stream_rate import (
    ENOUGH_SECONDS,
    FIRST_TOKENS,
    MAX_ANSWER_SECONDS,
    MAX_TRIES,
    MIN_SECONDS,
    Answer,
    Arrival,
    NothingToJudge,
    Refused,
    Server,
    Together,
    judge,
    long_answer,
    main,
    overlap,
)
from tests.bench.servers import Answer as HttpAnswer
from tests.bench.servers import Respond, chat_stream, serving

PROMPT_TOKENS = 10


class EvenServer:
    """Answers at a steady rate, up to its context. rates: tokens per second of each answer, the last repeats.

    wait_s: before the first text. strict: refuses what its context cannot hold, in place of a shorter answer.
    """

    def __init__(
        self,
        *rates: float,
        context_tokens: int = 1_000_000,
        wait_s: float = 0.1,
        strict: bool = False,
        counts: bool = True,
    ) -> None:
        self._rates: Iterator[float] = itertools.chain(rates, itertools.repeat(rates[-1]))
        self._room = context_tokens - PROMPT_TOKENS
        self._wait_s = wait_s
        self._strict = strict
        self._counts = counts
        self.asked: list[int] = []
        self.said: list[str] = []

    def __call__(self, num_tokens: int) -> Answer:
        self.asked.append(num_tokens)
        if self._strict and num_tokens > self._room:
            raise Refused("400: too long")
        rate, got = next(self._rates), min(num_tokens, self._room)
        arrivals = tuple(Arrival(self._wait_s + at / rate, 4) for at in range(got))
        return Answer(arrivals, PROMPT_TOKENS, got) if self._counts else Answer(arrivals)

    def run(self, context_tokens: int | None = None) -> tuple[Answer, str]:
        """Ask it for an answer that is long enough."""
        return long_answer(self, context_tokens, self.said.append)


@pytest.mark.parametrize("rate", [5, 40])
def test_a_slow_server_is_asked_once(rate: float) -> None:
    server = EvenServer(rate)

    answer, _ = server.run(8192)

    assert server.asked == [FIRST_TOKENS]
    assert server.said == []
    assert judge(answer.arrivals).is_even


@pytest.mark.parametrize("rate", [49, 130, 550, 2000, 5000])
def test_a_fast_server_is_asked_again_for_an_answer_that_lasts(rate: float) -> None:
    server = EvenServer(rate)

    answer, _ = server.run()

    assert len(server.asked) == len(server.said) + 1 == 2
    assert f"asking for {server.asked[1]}" in server.said[0]
    assert answer.duration_s == pytest.approx(15.0, abs=0.1)
    assert judge(answer.arrivals).is_even


def test_a_server_that_speeds_up_is_asked_once_more() -> None:
    server = EvenServer(200, 500)
    answer, _ = server.run()
    assert len(server.asked) == 3
    assert answer.duration_s >= ENOUGH_SECONDS


def test_a_length_that_would_pass_or_fail_by_chance_is_not_taken() -> None:
    server = EvenServer(FIRST_TOKENS / (MIN_SECONDS + 0.1))  # an even stream's last second: 9.9 %
    answer, _ = server.run()
    assert len(server.asked) == 2
    assert judge(answer.arrivals).last_second_share < 0.08


def test_where_the_context_ends_what_came_is_judged_if_it_is_long_enough() -> None:
    server = EvenServer(700, context_tokens=8192)
    answer, _ = server.run(8192)
    assert server.asked == [FIRST_TOKENS, 8192 - PROMPT_TOKENS]
    assert MIN_SECONDS < answer.duration_s < ENOUGH_SECONDS
    assert judge(answer.arrivals).is_even


@pytest.mark.parametrize(
    ("server", "told", "reason"),
    [
        (EvenServer(550, context_tokens=4096), 4096, "context of 4096 tokens holds no longer answer"),
        (EvenServer(550, context_tokens=4096), None, "ends an answer at 4086 tokens"),
        (EvenServer(550, context_tokens=4096, strict=True), None, "refused (400: too long)"),
        (EvenServer(550, context_tokens=4096, strict=True, counts=False), 4096, "refused (400: too long)"),
    ],
    ids=["told", "untold", "refused", "uncounted"],
)
def test_where_the_context_ends_too_soon_nothing_is_judged(
    server: EvenServer, told: int | None, reason: str
) -> None:
    answer, why = server.run(told)

    assert reason in why
    with pytest.raises(NothingToJudge, match="all text came within") as caught:
        judge(answer.arrivals, why)
    assert why in str(caught.value)


def test_a_server_that_outruns_every_answer_is_asked_no_more_than_so_often() -> None:
    server = EvenServer(1e3, 1e4, 1e5, 1e6)
    answer, why = server.run()
    assert len(server.asked) == MAX_TRIES
    assert str(MAX_TRIES) in why
    with pytest.raises(NothingToJudge):
        judge(answer.arrivals, why)


def test_text_that_is_held_back_is_not_waited_for_without_end() -> None:
    rate = 500

    def proxy(num_tokens: int) -> Answer:
        wait_s = num_tokens / rate
        asked.append(num_tokens)
        return Answer(
            (Arrival(wait_s, 4), Arrival(wait_s + 0.001, 4 * num_tokens)), PROMPT_TOKENS, num_tokens
        )

    asked: list[int] = []
    answer, why = long_answer(proxy, None, lambda line: None)

    assert len(asked) == 2
    assert asked[-1] / rate <= MAX_ANSWER_SECONDS + 0.1
    assert "held back" in why
    with pytest.raises(NothingToJudge):
        judge(answer.arrivals, why)


def test_a_first_request_that_is_refused_ends_the_check() -> None:
    with pytest.raises(Refused):
        EvenServer(550, context_tokens=100, strict=True).run()


def ticking(seconds: float) -> Callable[[], float]:
    """Make a clock that moves on by so much each time it is read, which a client does once an event."""
    return itertools.count(0.0, seconds).__next__


def chats(asked: list[int], context_tokens: int) -> Respond:
    """Play a server that answers with as many words as it is asked for, and tells its context."""
    models = json.dumps({"data": [{"id": "m", "max_model_len": context_tokens}]}).encode()

    def respond(method: str, path: str, body: bytes) -> HttpAnswer:
        if path == "/v1/models":
            return 200, models
        wanted = json.loads(body)["max_tokens"]
        asked.append(wanted)
        num_words = min(wanted, context_tokens - PROMPT_TOKENS)
        return 200, chat_stream("word " * (num_words - 1), prompt_tokens=PROMPT_TOKENS)

    return respond


def run_main(words: Sequence[str], context_tokens: int, asked: list[int]) -> int:
    with serving(chats(asked, context_tokens)) as url:
        return main(["--url", url, *words], ticking(1 / 128))


def test_the_command_finds_the_length_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []

    code = run_main(["--json"], 8192, asked)

    found = capsys.readouterr()
    assert code == 0
    assert asked[0] == FIRST_TOKENS
    assert len(asked) == 2
    assert f"asking for {asked[1]}" in found.err
    assert json.loads(found.out)["duration_s"] == pytest.approx(15.0, abs=0.1)


def test_a_length_that_was_given_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []
    assert run_main(["--max-tokens", "600"], 8192, asked) == 2
    assert asked == [600]
    assert "all text came within 4.7 s: raise --max-tokens" in capsys.readouterr().err


def test_the_command_says_that_the_context_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []
    assert run_main([], 1024, asked) == 2
    assert asked == [FIRST_TOKENS, 1024 - PROMPT_TOKENS]
    assert "context of 1024 tokens holds no longer answer" in capsys.readouterr().err


def test_a_server_that_does_not_tell_its_context_is_asked_all_the_same() -> None:
    asked: list[int] = []
    answer_chats = chats(asked, 8192)

    def respond(method: str, path: str, body: bytes) -> HttpAnswer:
        return (404, b"{}") if path == "/v1/models" else answer_chats(method, path, body)

    with serving(respond) as url:
        assert main(["--url", url], ticking(1 / 128)) == 0
    assert len(asked) == 2


def test_a_server_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 2
    assert "nothing to judge: http://127.0.0.1:9" in capsys.readouterr().err


def even_stream(begin_s: float, rate: float, count: int) -> Answer:
    return Answer(tuple(Arrival(begin_s + at / rate, 4) for at in range(count)), PROMPT_TOKENS, count)


def test_streams_are_judged_while_all_of_them_run() -> None:
    """The last to begin has the server for itself in the end, four times as fast: seen on an H200."""
    shared = [even_stream(at, 10, 200) for at in (1.0, 2.0, 3.0)]
    alone = tuple(Arrival(21.0 + at / 40, 4) for at in range(40))
    last = Answer((*even_stream(5.0, 10, 160).arrivals, *alone), PROMPT_TOKENS, 200)

    assert not judge(last.arrivals).is_even
    cut = overlap([*shared, last])

    assert [round(answer.arrivals[0].time_s, 1) for answer in cut] == [5.0] * 4
    assert all(answer.arrivals[-1].time_s <= 20.9 + 1e-6 for answer in cut)
    assert all(judge(answer.arrivals).is_even for answer in cut)


def test_a_stream_that_is_held_back_beside_others_fails() -> None:
    held = Answer((Arrival(1.0, 4), Arrival(18.0, 400), Arrival(18.1, 4)), PROMPT_TOKENS, 102)
    cut = overlap([even_stream(1.0, 10, 200), held])
    assert [judge(answer.arrivals).is_even for answer in cut] == [True, False]


def test_streams_one_behind_the_other_are_not_judged() -> None:
    with pytest.raises(NothingToJudge, match="did not run at the same time"):
        overlap([even_stream(1.0, 10, 100), even_stream(12.0, 10, 100)])
    with pytest.raises(NothingToJudge, match="without text"):
        overlap([even_stream(1.0, 10, 100), Answer(())])


def test_each_try_of_several_streams_counts_from_its_own_begin() -> None:
    asked: list[tuple[int, int, float]] = []
    moments = itertools.count(100.0, 50.0)

    def ask(num_tokens: int, number: int, begin_s: float) -> Answer:
        asked.append((num_tokens, number, begin_s))
        return even_stream(0.5 + number / 10, 100.0, num_tokens)

    together = Together(ask, 3, lambda: next(moments))
    answer, _ = long_answer(together, None, lambda line: None)

    assert sorted({(num, begin_s) for num, _, begin_s in asked}) == [(512, 100.0), (asked[-1][0], 150.0)]
    assert sorted(number for num, number, _ in asked if num == 512) == [0, 1, 2]
    assert answer in together.answers
    assert answer.duration_s == pytest.approx(15.0, abs=0.5)


def test_the_command_asks_for_several_streams(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def read_stream(self: Server, body: bytes, begin_s: float) -> Answer:
        fields = json.loads(body)
        seeds.append(fields["seed"])
        rate = 100.0 if fields["seed"] < 9 else 1e6
        return even_stream(fields["seed"] / 10, rate, fields["max_tokens"])

    monkeypatch.setattr(Server, "read_stream", read_stream)
    words = ["--streams", "4", "--max-tokens", "2000"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(seeds) == [1, 2, 3, 4]
    assert found["passed"] is True
    assert [stream["first_text_s"] for stream in found["streams"]] == [0.4] * 4
    assert main(words) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [len(line) for line in lines if line[0] in ("half_share", "gap_max_ms", "passed")] == [5, 5, 5]
    assert lines[-1][0] == "PASS:"
    assert main([*words, "--seed", "6"]) == 2, "the fourth is over before the others begin to count"
    with pytest.raises(SystemExit):
        main(["--streams", "0"])
