"""Keys, TLS, the socket file and the limits, as a user sets them: by flags and variables of the process."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.server_process import ServerProcess

TLS = Path(__file__).parent / "tls"  # a self-signed certificate for localhost; it protects nothing
MODEL = "random-weights"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi."}]
WAIT_S = 20.0


def test_keys_come_from_the_environment_and_are_never_printed(random_model_dir: Path) -> None:
    environ = {"GLM53_API_KEY": "first-secret,second-secret"}
    with ServerProcess(random_model_dir, environ=environ) as process:
        url = process.url_when_ready()
        for key in ("first-secret", "second-secret"):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as api:
                assert api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2).choices
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong-secret", max_retries=0) as api,
            pytest.raises(openai.AuthenticationError),
        ):
            api.models.list()
        assert httpx.get(f"{url}/health").status_code == 200
    assert "(hidden)" in "".join(process.output)
    assert "-secret" not in "".join(process.output)


def test_https_with_a_certificate(random_model_dir: Path) -> None:
    flags = ("--tls-cert", str(TLS / "localhost.pem"), "--tls-key", str(TLS / "localhost.key"))
    with ServerProcess(random_model_dir, *flags) as process:
        url = process.url_when_ready()
        assert url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(TLS / "localhost.pem"))
        with (
            openai.DefaultHttpxClient(verify=trusted) as web,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=web) as api,
        ):
            stream = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, stream=True)
            assert list(stream)[-1].choices[0].finish_reason
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")  # not trusted by default, so the certificate is really checked


@pytest.mark.parametrize("cert", ["localhost.key", "missing.pem"])
def test_an_unusable_certificate_is_one_line_before_loading(random_model_dir: Path, cert: str) -> None:
    flags = ("--tls-cert", str(TLS / cert), "--tls-key", str(TLS / "localhost.key"))
    with ServerProcess(random_model_dir, *flags) as process:
        assert process.wait() == 2
    assert len(process.output) == 1
    assert cert in process.output[0]


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket file."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=WAIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(str(self._path))


def test_a_socket_file_in_place_of_a_port(random_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "glm.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))  # what a killed server leaves behind
    with ServerProcess(random_model_dir, "--unix-socket", str(path)) as process:
        process.wait_for_text("ready url=unix:")
        connection = UnixConnection(path)
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True})
        connection.request("POST", "/v1/chat/completions", body)
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        with ServerProcess(random_model_dir, "--unix-socket", str(path)) as second:
            assert second.wait() == 2
        assert "cannot listen on" in second.output[0]
        assert path.is_socket()  # the failed start took nothing away
        assert process.stop() == 0
    assert not path.exists()


def test_a_file_that_is_no_socket_is_left_alone(random_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "precious.txt"
    path.write_text("data")
    with ServerProcess(random_model_dir, "--unix-socket", str(path)) as process:
        assert process.wait() == 2
    assert path.read_text() == "data"


def post_bytes(fields: dict[str, object]) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


def test_limits_reach_the_running_server(random_model_dir: Path) -> None:
    flags = ("--request-timeout-s", "0.3", "--body-timeout-s", "0.3", "--max-streams", "1")
    with ServerProcess(random_model_dir, *flags) as process:
        url = process.url_when_ready()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            with pytest.raises(openai.InternalServerError) as caught:
                api.chat.completions.create(
                    model=MODEL, messages=MESSAGES, max_tokens=8000, extra_body={"ignore_eos": True}
                )
            assert (caught.value.status_code, caught.value.code) == (504, "request_timeout")
            stream = api.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=8000, extra_body={"ignore_eos": True}, stream=True
            )
            with pytest.raises(openai.APIError, match="longer than this server allows"):
                list(stream)
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=WAIT_S) as raw:
            raw.sendall(post_bytes({})[:-5])  # the rest never comes
            assert raw.makefile("rb").readline().split()[1] == b"408"


def eventually(holds: Callable[[], bool], wait_s: float) -> bool:
    """Wait for something in another process, which has no event to wait on."""
    pause = threading.Event()
    for _ in range(int(wait_s / 0.05)):
        if holds():
            return True
        pause.wait(0.05)
    return False


def tcp_state(server_port: int, client_port: int) -> str | None:
    """Give the kernel's state of the server's end of a connection; None when there is none any more."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, state = line.split()[1:4]
        if local.endswith(f":{server_port:04X}") and remote.endswith(f":{client_port:04X}"):
            return state
    return None


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="reads the kernel's table of connections")
@pytest.mark.parametrize("fields", [{"stream": True, "max_tokens": 8000}, {"max_tokens": 400}])
def test_the_socket_of_a_reader_that_never_reads_is_really_closed(
    random_model_dir: Path, fields: dict[str, object]
) -> None:
    with ServerProcess(random_model_dir, "--write-timeout-s", "1") as process:
        port = int(process.url_when_ready().rsplit(":", 1)[1])
        with socket.socket() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck.connect(("127.0.0.1", port))
            own_port = stuck.getsockname()[1]
            stuck.sendall(post_bytes({"ignore_eos": True, "logprobs": True, "top_logprobs": 20, **fields}))
            assert tcp_state(port, own_port) == "01"  # established
            assert eventually(lambda: tcp_state(port, own_port) is None, WAIT_S)
        process.wait_for_text("finish=")
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    assert not [line for line in process.output if " ERROR " in line or "Traceback" in line]
