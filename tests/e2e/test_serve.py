"""`glm53srv serve` as a user meets it: a port, a model behind it, the openai client, and signals."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.server_process import ServerProcess

MODEL = "random-weights"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def server(random_model_dir: Path) -> Iterator[str]:
    with ServerProcess(random_model_dir) as process:
        yield process.url_when_ready()


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def get(url: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_every_documented_page_answers(server: str) -> None:
    _, described = get(f"{server}/openapi.json")
    paths = described["paths"]
    assert isinstance(paths, dict)
    pages = [path for path, methods in paths.items() if "get" in methods and "{" not in path]
    assert len(pages) > 12
    for path in pages:
        with urllib.request.urlopen(f"{server}{path}", timeout=10) as answer:
            assert answer.status == 200, path
            answer.read()


def test_a_stream_gives_text_reasoning_usage_and_logprobs(server: str) -> None:
    with client(server) as api:
        stream = api.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            max_tokens=12,
            seed=1,
            logprobs=True,
            top_logprobs=3,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in choices)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    assert len(entries) == 12
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12


def test_the_same_seed_gives_the_same_text_streamed_or_not(server: str) -> None:
    with client(server) as api:
        whole = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, seed=7)
        parts = api.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=16, seed=7, stream=True
        )
        streamed = [chunk.choices[0].delta for chunk in parts]
    message = whole.choices[0].message
    for field in ("reasoning_content", "content"):
        joined = "".join(getattr(delta, field, None) or "" for delta in streamed)
        assert joined == (getattr(message, field, None) or "")


def test_other_seeds_give_other_text(server: str) -> None:
    with client(server) as api:
        texts = {
            api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, seed=seed)
            .choices[0]
            .message.model_dump_json()
            for seed in range(4)
        }
    assert len(texts) == 4


def test_greedy_text_does_not_depend_on_company(server: str) -> None:
    async def run() -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none") as api:

            async def ask(text: str) -> str:
                answer = await api.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": text}],
                    max_tokens=24,
                    temperature=0,
                )
                return answer.choices[0].message.model_dump_json()

            alone = await ask("One question.")
            together = await asyncio.gather(
                *(ask(t) for t in ("One question.", "Another one", "x" * 300, "4"))
            )
            return alone, list(together)

    alone, together = asyncio.run(run())
    assert together[0] == alone


def test_a_client_that_leaves_frees_its_slot(server: str) -> None:
    """Four streams fill every slot; when they are closed, a fifth request must run to its end."""
    with client(server) as api:
        streams = [
            api.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
            )
            for _ in range(4)
        ]
        for stream in streams:
            next(iter(stream))
        for stream in streams:
            stream.close()
        answer = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, timeout=20)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_a_wrong_field_is_a_400_that_names_it(server: str) -> None:
    with client(server) as api, pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"


def test_models_names_the_one_that_is_served(server: str) -> None:
    with client(server) as api:
        assert [model.id for model in api.models.list()] == [MODEL]


def test_the_port_answers_before_the_model_is_loaded(random_model_dir: Path) -> None:
    with ServerProcess(random_model_dir) as process:
        url = process.url_when_listening()
        status, body = get(f"{url}/health")
        # Loading takes a fraction of a second here, so it may be over; what /health says must fit its status.
        assert (status, body["status"]) in [(503, "loading"), (200, "ready")]
        if status == 503:
            assert 0 <= float(str(body["progress"])) <= 1
        process.url_when_ready()
        assert get(f"{url}/health") == (200, {"status": "ready", "model": MODEL})


def test_sigterm_ends_idle_server_with_0(random_model_dir: Path) -> None:
    with ServerProcess(random_model_dir) as process:
        process.url_when_ready()
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_sigterm_lets_a_short_stream_end_and_then_stops(random_model_dir: Path) -> None:
    with ServerProcess(random_model_dir) as process, client(process.url_when_ready()) as api:
        stream = api.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, max_tokens=40, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        process.signal(signal.SIGTERM)
        finishes = [chunk.choices[0].finish_reason for chunk in chunks]
        assert finishes[-1] == "length"
        assert process.wait() == 0


def test_a_stream_cut_by_the_drain_limit_ends_with_an_error_event(random_model_dir: Path) -> None:
    arguments = ("--drain-timeout-s", "0.2")
    with ServerProcess(random_model_dir, *arguments) as process, client(process.url_when_ready()) as api:
        stream = api.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, max_tokens=8000, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        process.signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(chunks)
        assert process.wait() == 0


def test_a_second_signal_ends_at_once(random_model_dir: Path) -> None:
    with ServerProcess(random_model_dir) as process, client(process.url_when_ready()) as api:
        stream = api.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, max_tokens=8000, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        process.signal(signal.SIGINT)
        process.wait_for_text("draining")
        process.signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
        stream.close()


@pytest.mark.parametrize(
    ("arguments", "code", "needle"),
    [
        (["serve", "--model", "/nonexistent"], 3, "/nonexistent"),
        (["serve", "--thread", "2"], 2, "did you mean --threads?"),
        (["doctor", "--model-repo", "a/b"], 2, "no model"),
        (["surf"], 2, "unknown command 'surf'"),
        (["pack", "random"], 2, "needs --out"),
        (["generate", "--model", "x"], 2, "needs a prompt first"),
        ([], 2, "glm53srv serve"),
    ],
)
def test_a_wrong_start_is_one_line_and_a_code(arguments: list[str], code: int, needle: str) -> None:
    command = [sys.executable, "-m", "glm53srv", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == code
    assert needle in done.stderr + done.stdout
    assert len(done.stderr.splitlines()) <= 1


def test_generate_prints_text_on_stdout_and_speed_on_stderr(random_model_dir: Path) -> None:
    command = [sys.executable, "-m", "glm53srv", "generate", "Hello", "--model", str(random_model_dir)]
    flags = ["--max-tokens", "8", "--seed", "1", "--no-thinking"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip()
    assert "8 tokens" in done.stderr
    assert "speaks nonsense" in done.stderr


def test_one_line_says_what_is_served_with_what(random_model_dir: Path) -> None:
    with ServerProcess(random_model_dir, "--threads", "1", "-cs", "1024", "--max-streams", "2") as process:
        found = process.wait_for(re.compile(r"loaded in (\d+\.\d) s: (.*)"))
    pairs = dict(pair.split("=") for pair in found[2].split())
    assert (pairs["engine"], pairs["threads"], pairs["streams"]) == ("cpu", "1", "2")
    assert (pairs["context_tokens"], pairs["cache_tokens"]) == ("1024", "1024")
    assert 0.02 < float(pairs["ram_gib"]) < 2
