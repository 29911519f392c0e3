"""One generation as its client sees it: when each part came, and how many tokens it was.

Three wires: SGLang's /generate, /v1/completions for servers without it, and /v1/chat/completions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from bench.client import Client, Event
from bench.errors import BenchError, ServerRefused, StreamBroken

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Timed:
    """One generation. Times on the client's clock: request begun, first token, last event.

    arrivals: (time, output tokens so far) of each event that brought tokens; on wires that do not count
    tokens per event, events in place of tokens. output_ids: where the wire tells them. server_decode_tok_s:
    what the server itself measured for this generation, or None.
    """

    begun_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish: str
    text: str
    arrivals: tuple[tuple[float, int], ...]
    output_ids: tuple[int, ...] = ()
    server_decode_tok_s: float | None = None

    @property
    def first_token_s(self) -> float:
        """Seconds from the request to its first token."""
        return self.first_s - self.begun_s

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens after the first, per second; None for fewer than two."""
        span = self.last_token_s - self.first_s
        return (self.completion_tokens - 1) / span if self.completion_tokens > 1 and span > 0 else None

    @property
    def last_token_s(self) -> float:
        """When the last event with tokens came."""
        return self.arrivals[-1][0]


Watch = Callable[[int], bool]
"""Called with the tokens (or events) so far at each event; True closes the stream there."""


class Prompter(Protocol):
    """Sends a prompt of token ids and reads at most so many greedy tokens, past the end of a turn."""

    def __call__(
        self, client: Client, ids: Sequence[int], max_tokens: int, watch: Watch | None = None
    ) -> Timed: ...


def choose_prompter(client: Client, probe_ids: Sequence[int]) -> tuple[str, Prompter]:
    """Find the wire by which this server takes token ids. Raises BenchError if there is none."""
    problems = []
    prompters: tuple[tuple[str, Prompter], ...] = (("generate", generate), ("completions", complete))
    for name, prompter in prompters:
        try:
            prompter(client, probe_ids, 1)
        except ServerRefused as error:
            problems.append(str(error))
        else:
            return name, prompter
    raise BenchError(f"the server takes no prompt of token ids: {'; '.join(problems)}")


def generate(client: Client, ids: Sequence[int], max_tokens: int, watch: Watch | None = None) -> Timed:
    """Prompt with token ids through SGLang's /generate."""
    return _read_generate(
        client,
        {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
            "stream": True,
        },
        watch,
    )


def generate_text(client: Client, text: str, max_tokens: int | None) -> Timed:
    """Prompt with raw text, control tokens spelled out, through /generate, to the natural end."""
    sampling: dict[str, Any] = {"temperature": 0}
    if max_tokens is not None:
        sampling["max_new_tokens"] = max_tokens
    return _read_generate(client, {"text": text, "sampling_params": sampling, "stream": True})


def _read_generate(client: Client, body: dict[str, Any], watch: Watch | None = None) -> Timed:
    meta: dict[str, Any] = {}
    last: dict[str, Any] = {}
    arrivals: list[tuple[float, int]] = []
    with client.stream("/generate", body) as stream:
        ended_s = stream.begun_s
        for event in stream:
            last = _checked(event)
            meta, ended_s = last.get("meta_info") or {}, event.arrived_s
            count = int(meta.get("completion_tokens") or 0)
            if count > (arrivals[-1][1] if arrivals else 0):
                arrivals.append((event.arrived_s, count))
            if watch is not None and watch(count):
                break
        begun_s = stream.begun_s
    if not arrivals:
        raise StreamBroken("the stream of /generate brought no token")
    reason = meta.get("finish_reason") or {}
    return Timed(
        begun_s=begun_s,
        first_s=arrivals[0][0],
        last_s=ended_s,
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        completion_tokens=arrivals[-1][1],
        cached_tokens=int(meta.get("cached_tokens") or 0),
        finish=str(reason.get("type", "none")),
        text=str(last.get("text") or ""),
        arrivals=tuple(arrivals),
        output_ids=tuple(last.get("output_ids") or ()),
    )


def complete(client: Client, ids: Sequence[int], max_tokens: int, watch: Watch | None = None) -> Timed:
    """Prompt with token ids through /v1/completions."""
    body = {"prompt": list(ids), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return _read_openai(client, "/v1/completions", body, watch)


def chat(client: Client, fields: dict[str, Any], max_tokens: int | None) -> Timed:
    """Send a chat request. fields: messages and whatever else the request has."""
    body = {**fields, **({} if max_tokens is None else {"max_tokens": max_tokens})}
    return _read_openai(client, "/v1/chat/completions", body)


def _read_openai(client: Client, path: str, body: dict[str, Any], watch: Watch | None = None) -> Timed:
    finish, texts = "none", []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    arrivals: list[tuple[float, int]] = []
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream(path, asked) as stream:
        ended_s = stream.begun_s
        for event in stream:
            chunk = _checked(event)
            ended_s = event.arrived_s
            usage = chunk.get("usage") or usage
            timings = chunk.get("timings") or timings
            for choice in chunk.get("choices") or ():
                text = _chunk_text(choice)
                finish = choice.get("finish_reason") or finish
                if text or choice.get("finish_reason"):
                    texts.append(text)
                    arrivals.append((event.arrived_s, len(arrivals) + 1))
            if watch is not None and watch(len(arrivals)):
                usage = {"completion_tokens": len(arrivals)}  # a cut stream tells no more than its events
                break
        begun_s = stream.begun_s
    if "completion_tokens" not in usage or not arrivals:
        raise BenchError(f"the stream of {path} gave no usage or no text: it cannot be counted")
    return Timed(
        begun_s=begun_s,
        first_s=arrivals[0][0],
        last_s=ended_s,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage["completion_tokens"]),
        cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        finish=finish,
        text="".join(texts),
        arrivals=tuple(arrivals),
        server_decode_tok_s=timings.get("predicted_per_second"),
    )


def _chunk_text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    calls = "".join(
        str((call.get("function") or {}).get("arguments") or "") for call in delta.get("tool_calls") or ()
    )
    parts = (choice.get("text"), delta.get("reasoning_content"), delta.get("content"), calls)
    return "".join(part for part in parts if part)


def _checked(event: Event) -> dict[str, Any]:
    value = event.json()
    if not isinstance(value, dict) or "error" in value:
        raise StreamBroken(f"an error in the stream: {event.data[:300]}")
    return value


def at_once(jobs: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """Run jobs in threads that start together; gives their answers in order, raises the first error."""
    answers: list[Answer | None] = [None] * len(jobs)
    errors: list[Exception] = []
    barrier = threading.Barrier(len(jobs))

    def work(at: int) -> None:
        barrier.wait()
        try:
            answers[at] = jobs[at]()
        except Exception as error:  # told to the caller below, whatever it is
            errors.append(error)

    threads = [threading.Thread(target=work, args=(at,), daemon=True) for at in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [answer for answer in answers if answer is not None]
