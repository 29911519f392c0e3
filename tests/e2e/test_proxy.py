"""nginx and Caddy in front, with the configurations that deploy/ ships."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import openai
import pytest

from bench import soak
from tests.e2e.server_process import ServerProcess

DEPLOY = Path(__file__).parents[2] / "deploy"
PATH = f"/usr/sbin:/usr/local/sbin:{os.environ['PATH']}"
PACKAGES = {"nginx": "nginx-light", "caddy": "caddy"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def nginx_command(folder: Path, port: int, upstream: str) -> list[str]:
    """Wrap the shipped file into a whole configuration that needs no rights."""
    site = shipped("nginx.conf", {"127.0.0.1:30000": upstream, "listen 80;": f"listen 127.0.0.1:{port};"})
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log warn;\n"
        f"events {{}}\nhttp {{ access_log off; {paths}\n{site}\n}}\n"
    )
    return ["nginx", "-p", str(folder), "-c", str(config), "-e", f"{folder}/error.log"]


def caddy_command(folder: Path, port: int, upstream: str) -> list[str]:
    """Give the shipped file a loopback address in place of the name that needs a certificate."""
    site = shipped("Caddyfile", {"127.0.0.1:30000": upstream, "glm.example.com": f"http://127.0.0.1:{port}"})
    config = folder / "Caddyfile"
    config.write_text(f"{{\n\tadmin off\n\tstorage file_system {folder}\n}}\n{site}")
    return ["caddy", "run", "--config", str(config), "--adapter", "caddyfile"]


def shipped(name: str, replacements: Mapping[str, str]) -> str:
    """Give a file of deploy/ with addresses replaced; each must be in it."""
    text = (DEPLOY / name).read_text()
    for old, new in replacements.items():
        assert old in text
        text = text.replace(old, new, 1)
    return text


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def proxy_url(
    request: pytest.FixtureRequest, random_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    name: str = request.param
    program = shutil.which(name, path=PATH)
    if program is None:
        pytest.skip(f"{name} is not installed (apt-get install {PACKAGES[name]})")
    folder = tmp_path_factory.mktemp(name)
    make_command = {"nginx": nginx_command, "caddy": caddy_command}[name]
    with ServerProcess(random_model_dir, "--max-body-mib", "1", "--chunk-tokens", "128") as process:
        port = free_port()
        upstream = process.url_when_ready().removeprefix("http://")
        _, *arguments = make_command(folder, port, upstream)
        environ = {**os.environ, "HOME": str(folder)}
        with (folder / "log").open("w") as log:
            proxy = subprocess.Popen([program, *arguments], env=environ, stdout=log, stderr=log)
        try:
            wait_until_open(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            proxy.terminate()
            proxy.wait(20)


def wait_until_open(port: int) -> None:
    pause = threading.Event()
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            pause.wait(0.05)
    raise TimeoutError("the proxy did not start")


def test_text_passes_the_proxy_while_it_is_made(proxy_url: str) -> None:
    """The client leaves after some text; a proxy that kept it back would need 4,000 tokens first."""
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "max_tokens": 4000,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{proxy_url}/v1/chat/completions", json=body, timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line, _ in zip(answer.iter_lines(), range(20)) if line]  # noqa: B905
    assert len(events) == 10
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"


def test_a_client_that_leaves_the_proxy_frees_the_slot(proxy_url: str) -> None:
    with openai.OpenAI(base_url=f"{proxy_url}/v1", api_key="none", max_retries=0) as api:
        for _ in range(8):  # twice the slots
            stream = api.chat.completions.create(
                model="random-weights",
                messages=[{"role": "user", "content": "x"}],
                stream=True,
                max_tokens=8000,
                extra_body={"ignore_eos": True},
            )
            next(iter(stream))
            stream.close()
        answer = api.chat.completions.create(
            model="random-weights", messages=[{"role": "user", "content": "x"}], max_tokens=2, timeout=20
        )
    assert answer.usage is not None


def test_chaos_behind_the_proxy(proxy_url: str) -> None:
    flags = ["--url", proxy_url, "--requests", "40", "--max-body-mib", "32", "--health-ms", "2000"]
    assert soak.main([*flags, "--seed", "9"]) == 0
