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
    judge,
    long_answer,
    main,
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
