"""The arithmetic of the measurements, on generations written down by hand."""

from __future__ import annotations

import threading

import pytest

from bench.client import Client
from bench.errors import BenchError
from bench.generation import Timed, at_once, chat, choose_prompter
from bench.measure import Bench, prefill_run, round_of
from tests.bench.servers import answers, chat_stream, serving


def timed(
    begun_s: float, first_s: float, last_s: float, tokens: int, *, prompt_tokens: int = 10, cached: int = 0
) -> Timed:
    return Timed(
        begun_s=begun_s,
        first_s=first_s,
        last_s=last_s,
        prompt_tokens=prompt_tokens,
        completion_tokens=tokens,
        cached_tokens=cached,
        finish="stop",
        text="",
        arrivals=((first_s, 1), (last_s, tokens)),
    )


def bench_that_answers(answer: Timed) -> Bench:
    return Bench(Client("http://none"), lambda *_: answer, "none", (100, 200), 4096)


def test_a_round_counts_all_tokens_by_the_wall_clock() -> None:
    both = round_of([timed(0.0, 1.0, 5.0, 41), timed(0.0, 2.0, 6.0, 21)])

    assert both.aggregate == pytest.approx(62 / 6.0)  # from the first request to the last token of all
    assert both.after_first == pytest.approx(62 / 5.0)  # from the first token of any
    assert both.per_stream == pytest.approx((10.0, 5.0))
    assert both.first_token_s == (1.0, 2.0)


def test_a_stream_of_one_token_has_no_rate() -> None:
    assert timed(0.0, 1.0, 1.0, 1).decode_tok_s is None
    assert round_of([timed(0.0, 1.0, 1.0, 1)]).per_stream == ()


def test_a_fresh_prompt_that_the_server_did_not_compute_is_no_measurement() -> None:
    bench = bench_that_answers(timed(0.0, 0.5, 0.5, 1, prompt_tokens=1000, cached=900))

    with pytest.raises(BenchError, match="computed 100 tokens of a fresh prompt of 1000"):
        prefill_run(bench, 1000)


def test_prefill_is_timed_to_the_first_token_and_counted() -> None:
    bench = bench_that_answers(timed(2.0, 2.5, 2.5, 1, prompt_tokens=1000))

    assert prefill_run(bench, 1000) == 0.5
    assert (bench.sent, bench.received, bench.cached) == (1000, 1, 0)


def test_prompts_are_fresh_and_within_the_ids() -> None:
    bench = bench_that_answers(timed(0.0, 1.0, 1.0, 1))

    first, second = bench.random_ids(500), bench.random_ids(500)

    assert first != second
    assert all(100 <= token < 200 for token in first + second)


def test_a_chat_is_read_from_its_stream() -> None:
    with serving(answers({"/v1/chat/completions": (200, chat_stream("one two three"))})) as url:
        answer = chat(Client(url), {"messages": []}, None)

    assert answer.text == "one two three "
    assert answer.finish == "stop"
    assert (answer.prompt_tokens, answer.completion_tokens) == (10, 4)


def test_completions_serve_where_generate_is_missing() -> None:
    events = (
        b'data: {"choices": [{"text": "x", "finish_reason": "length"}]}\n\n'
        b'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'
    )
    with serving(answers({"/v1/completions": (200, events)})) as url:
        name, prompter = choose_prompter(Client(url), [1, 2])
        assert name == "completions"
        assert prompter(Client(url), [1, 2], 1).prompt_tokens == 2


def test_a_server_that_takes_no_ids_is_named() -> None:
    with (
        serving(answers({})) as url,
        pytest.raises(BenchError, match="takes no prompt of token ids"),
    ):
        choose_prompter(Client(url), [1, 2])


def test_jobs_run_at_once_and_their_first_error_is_raised() -> None:
    together = threading.Barrier(3, timeout=10)
    assert at_once([lambda: together.wait() >= 0] * 3) == [True] * 3

    def fail() -> bool:
        raise BenchError("one of them")

    with pytest.raises(BenchError, match="one of them"):
        at_once([fail, lambda: True])
