"""The server on a socket: the openai client, raw connections, and hypercorn's own command."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import h2.connection
import h2.events
import openai
import pytest

from glm53srv.engine.base import StepPlan
from glm53srv.engine.fake import StepGate
from glm53srv.errors import CheckpointError
from tests.api.harness import MODEL
from tests.api.http_server import HttpServer, LogWatch

QUESTION: list[Any] = [{"role": "user", "content": "hello"}]
ENDLESS: dict[str, Any] = {"max_tokens": 100_000, "ignore_eos": True}


def client_of(http: HttpServer, request_id: str = "r") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=http.base_url + "/v1",
        api_key="none",
        max_retries=0,
        timeout=20.0,
        default_headers={"x-request-id": request_id},
    )


def request_bytes(request_id: str = "raw", **fields: Any) -> bytes:
    body = json.dumps({"messages": QUESTION, "stream": True, **fields}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {request_id}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def read_until(connection: socket.socket, needle: bytes) -> bytes:
    data = b""
    while needle not in data:
        chunk = connection.recv(65536)
        assert chunk, data
        data += chunk
    return data


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


def test_openai_client_streams_reasoning_content_usage_and_logprobs() -> None:
    with HttpServer() as http, client_of(http) as client:
        http.server.script("r", "I think.</think>Hello 🙂!")
        stream = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=1,
        )
        reasoning = content = ""
        entries = []
        finishes = []
        usage = None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                reasoning += getattr(choice.delta, "reasoning_content", "") or ""
                content += choice.delta.content or ""
                entries += (choice.logprobs.content or []) if choice.logprobs else []
                finishes.append(choice.finish_reason)
        assert (reasoning, content) == ("I think.", "Hello 🙂!")
        assert [f for f in finishes if f] == ["stop"]
        assert usage is not None
        assert usage.completion_tokens == len(entries) + 1
        assert b"".join(bytes(e.bytes or []) for e in entries).decode() == "I think.</think>Hello 🙂!"
        details = usage.completion_tokens_details
        assert details is not None
        assert details.reasoning_tokens == [entry.token for entry in entries].index("</think>") + 1
        whole = client.chat.completions.create(model=MODEL, messages=QUESTION)
        assert whole.choices[0].message.content == content
        assert whole.usage is not None
        assert whole.usage.completion_tokens == usage.completion_tokens
        assert client.models.list().data[0].id == MODEL
        assert client.models.retrieve(MODEL).id == MODEL


def test_openai_client_runs_a_tool_round() -> None:
    tools: list[Any] = [
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    ]
    with HttpServer() as http, client_of(http) as client:
        http.server.script("r", "r</think><tool_call>now</tool_call>", end="<|observation|>")
        with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=tools) as stream:
            message = stream.get_final_completion().choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("now", "{}")
        http.server.script("r", "r</think>Noon.")
        messages = [
            *QUESTION,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "12"},
        ]
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        assert answer.choices[0].message.content == "Noon."


def test_openai_client_maps_our_errors() -> None:
    with HttpServer() as http, client_of(http) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=200)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=QUESTION)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model=MODEL, input="x")


def test_closing_the_openai_client_mid_stream_frees_the_slot_with_the_next_step() -> None:
    plans: list[StepPlan] = []
    gate = StepGate()

    def before_step(plan: StepPlan) -> None:
        plans.append(plan)
        gate.pass_through(plan)

    with (
        HttpServer(before_step=before_step, max_streams=1, max_context_tokens=100_000) as http,
        LogWatch() as log,
    ):
        with client_of(http) as client:
            stream = client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                stream=True,
                max_tokens=100_000,
                extra_body={"ignore_eos": True},
            )
            for chunk, _ in zip(stream, range(3), strict=False):
                assert chunk.choices
            gate.hold()
            gate.wait_until_held()
            stream.close()
        log.wait_for("id=r ", "finish=disconnect")
        num_plans = len(plans)
        assert http.call(lambda: http.server.steps.stats().num_running) == 0
        gate.open()
        with client_of(http, "next") as client:
            client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1)
        after = plans[num_plans]
        assert after.release == (0,)
        assert after.decode == ()
        http.call(http.server.check_idle)


@pytest.mark.parametrize("how", ["close", "reset", "half close"])
def test_every_way_to_leave_is_a_disconnect(how: str) -> None:
    with HttpServer(max_streams=1, max_context_tokens=100_000) as http, LogWatch() as log:
        connection = http.connect()
        connection.sendall(request_bytes("leaver", **ENDLESS))
        read_until(connection, b"reasoning_content")
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "half close":
            connection.shutdown(socket.SHUT_WR)
        else:
            connection.close()
        log.wait_for("id=leaver ", "finish=disconnect")
        connection.close()
        with client_of(http) as client:
            assert client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1)
        http.call(http.server.check_idle)


def test_a_reader_that_does_not_read_costs_the_others_nothing() -> None:
    with HttpServer(max_context_tokens=100_000) as http, LogWatch() as log:
        stuck = http.connect()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.sendall(request_bytes("stuck", logprobs=True, top_logprobs=20, **ENDLESS))
        read_until(stuck, b"reasoning_content")
        with client_of(http) as client:
            for _ in range(5):
                assert client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=20)
        stuck.close()
        log.wait_for("id=stuck ", "finish=disconnect")
        http.call(http.server.check_idle)


def test_one_connection_serves_on_after_errors_and_streams() -> None:
    with HttpServer() as http:
        http.server.script("raw", "a</think>b")
        with http.connect() as connection:
            connection.sendall(b"GET /nope HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"404" in read_until(connection, b"not_found")
            bad = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n[]"
            connection.sendall(bad)
            read_until(connection, b"invalid_request_error")
            for _ in range(2):
                connection.sendall(request_bytes())
                stream = read_until(connection, b"0\r\n\r\n")
                assert b"data: [DONE]\n\n" in stream
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert b'"ready"' in read_all(connection)


def test_a_body_too_large_is_refused_and_the_connection_closed() -> None:
    with HttpServer(max_body_bytes=1000) as http, http.connect() as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n"
        )
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in answer.lower()


def test_a_long_body_in_small_pieces_is_read() -> None:
    with HttpServer(max_context_tokens=100_000) as http, http.connect() as connection:
        http.server.script("raw", "a</think>b")
        data = request_bytes(messages=[{"role": "user", "content": "hello " * 20_000}])
        for at in range(0, len(data), 7001):
            connection.sendall(data[at : at + 7001])
        assert b"[DONE]" in read_until(connection, b"0\r\n\r\n")


class Http2Client:
    """Two requests on one HTTP/2 connection without TLS (prior knowledge)."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._protocol = h2.connection.H2Connection()
        self._protocol.initiate_connection()
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self._flush()

    def post(self, request_id: str, **fields: Any) -> int:
        stream_id = self._protocol.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":path", "/v1/chat/completions"),
            (":scheme", "http"),
            (":authority", "x"),
            ("x-request-id", request_id),
        ]
        self._protocol.send_headers(stream_id, headers)
        body = json.dumps({"messages": QUESTION, "stream": True, **fields}).encode()
        self._protocol.send_data(stream_id, body, end_stream=True)
        self.bodies[stream_id] = b""
        self._flush()
        return stream_id

    def reset(self, stream_id: int) -> None:
        self._protocol.reset_stream(stream_id)
        self._flush()

    def read_until(self, stream_id: int, needle: bytes) -> None:
        while needle not in self.bodies[stream_id]:
            data = self._connection.recv(65536)
            assert data, self.bodies
            for event in self._protocol.receive_data(data):
                if isinstance(event, h2.events.DataReceived):
                    self.bodies[event.stream_id] += event.data
                    self._protocol.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            self._flush()

    def _flush(self) -> None:
        self._connection.sendall(self._protocol.data_to_send())


def test_resetting_one_http2_stream_ends_that_one_only() -> None:
    with (
        HttpServer(max_context_tokens=100_000) as http,
        LogWatch() as log,
        http.connect() as connection,
    ):
        http.server.script("long", "</think>" + "the " * 500)
        client = Http2Client(connection)
        leaver = client.post("leaver", **ENDLESS)
        stayer = client.post("long")
        client.read_until(leaver, b"reasoning_content")
        client.reset(leaver)
        log.wait_for("id=leaver ", "finish=disconnect")
        client.read_until(stayer, b"data: [DONE]")
        log.wait_for("id=long ", "finish=stop")
        http.call(http.server.check_idle)


@dataclass
class Hypercorn:
    """hypercorn's own command, serving one of our applications; a context manager that leaves nothing."""

    application: str
    environ: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ("-w", "0")
    lines: list[str] = field(default_factory=list)

    def __enter__(self) -> Hypercorn:
        root = Path(__file__).resolve().parents[2]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GLM53_")}
        words = ["-k", "uvloop", *self.options, "-b", "127.0.0.1:0", self.application]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hypercorn", *words],
            cwd=root,
            env={**inherited, "PYTHONPATH": str(root), **self.environ},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def wait_for(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no line matches {pattern}: {self.lines}")

    def port(self) -> int:
        return int(self.wait_for(r"Running on http://127\.0\.0\.1:(\d+)")[1])

    def end(self) -> tuple[int, str]:
        """Wait for the exit; gives its code and all lines."""
        assert self.process.stderr is not None
        self.lines.append(self.process.stderr.read())
        return self.process.wait(30), "".join(self.lines)


def test_sigterm_under_hypercorn_ends_streams_with_done_and_exits_0() -> None:
    with Hypercorn("tests.api.fake_app:app") as server:
        with socket.create_connection(("127.0.0.1", server.port()), timeout=20) as connection:
            connection.sendall(request_bytes(**ENDLESS))
            read_until(connection, b"reasoning_content")
            server.process.send_signal(signal.SIGTERM)
            rest = read_all(connection)
        assert b'"type":"unavailable_error"' in rest
        assert rest.rstrip(b"\r\n0").endswith(b"data: [DONE]")
        code, output = server.end()
        assert code == 0
        assert "Traceback" not in output


def test_a_worker_process_that_hears_no_signal_ends_its_streams_with_done_too() -> None:
    """With -w 1 the worker is told nothing; its streams are cut after the graceful timeout, and say so."""
    options = ("-w", "1", "--graceful-timeout", "1")
    with Hypercorn("tests.api.fake_app:app", options=options) as server:
        with socket.create_connection(("127.0.0.1", server.port()), timeout=20) as connection:
            connection.sendall(request_bytes(**ENDLESS))
            read_until(connection, b"reasoning_content")
            server.process.send_signal(signal.SIGTERM)
            rest = read_all(connection)
        assert rest.rstrip(b"\r\n0").endswith(b"data: [DONE]")
        assert server.end()[0] == 0


def test_the_application_of_the_environment_serves_a_checkpoint(random_model_dir: Path) -> None:
    with Hypercorn("glm53srv.api.app:app", {"GLM53_MODEL_DIR": str(random_model_dir)}) as server:
        port = server.port()
        server.wait_for("ready model=")
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(request_bytes(max_tokens=3, ignore_eos=True))
            assert b"data: [DONE]" in read_until(connection, b"0\r\n\r\n")
        server.process.send_signal(signal.SIGTERM)
        code, output = server.end()
        assert code == 0
        assert "are random" in output
        assert "finish=length prompt_tokens=" in output


def test_a_checkpoint_that_cannot_be_served_is_the_exit_code(tmp_path: Path) -> None:
    with Hypercorn("glm53srv.api.app:app", {"GLM53_MODEL_DIR": str(tmp_path)}) as server:
        code, output = server.end()
        assert code == CheckpointError.exit_code
        assert "loading failed: " in output
        assert "config.json" in output


def test_a_wrong_configuration_stops_the_start_with_its_line() -> None:
    with Hypercorn("glm53srv.api.app:app", {"GLM53_MODEL_DIRR": "x"}) as server:
        code, output = server.end()
        assert code != 0
        assert "did you mean GLM53_MODEL_DIR?" in output


def test_importing_the_application_loads_neither_numpy_nor_a_configuration() -> None:
    code = "import sys, glm53srv.api.app; print(sorted({'numpy', 'torch', 'cffi'} & set(sys.modules)))"
    environ = {**os.environ, "GLM53_NONSENSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environ,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.stdout.strip() == "[]"
