"""The start script, over a program that tells how it was started, and over the real server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
ENTRYPOINT = ROOT / "docker" / "entrypoint.sh"
HEALTHCHECK = ROOT / "docker" / "healthcheck.py"
READY = re.compile(r"ready url=(http://[^\s;]+)")

TELLER = f"""#!{sys.executable}
import json, os, sys
print(json.dumps({{"argv": sys.argv[1:], "pid": os.getpid()}}))
"""
SERVER = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(ROOT)!r})
from glm53srv.__main__ import run
run()
"""


def lay(root: Path, program: str) -> Path:
    """Make what scripts/install.sh leaves, with another program."""
    path = root / ".venv" / "bin" / "glm53srv"
    path.parent.mkdir(parents=True)
    path.write_text(program)
    path.chmod(0o755)
    return root


def clean_environment(**more: str) -> dict[str, str]:
    names = [name for name in os.environ if not name.startswith(("GLM53_", "PORT", "SERVED_NAME"))]
    return {**{name: os.environ[name] for name in names}, **more}


@pytest.fixture
def teller(tmp_path: Path) -> Path:
    return lay(tmp_path / "root", TELLER)


def started(root: Path, *arguments: str, **environ: str) -> list[str]:
    """Give the arguments that the program was started with."""
    environment = clean_environment(GLM53_ROOT=str(root), **environ)
    process = subprocess.Popen(
        [ENTRYPOINT, *arguments], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    told = json.loads(process.communicate(timeout=30)[0])
    assert process.returncode == 0
    assert told["pid"] == process.pid  # the program replaced the shell: signals reach it
    argv: list[str] = told["argv"]
    return argv


def test_without_arguments_it_serves(teller: Path) -> None:
    assert started(teller) == ["serve"]


def test_arguments_come_after_those_of_the_variable(teller: Path) -> None:
    argv = started(teller, "--port", "2", "-cs", "a b", GLM53_ARGS=" --port 1  -cs=512 ")
    assert argv == ["serve", "--port", "1", "-cs=512", "--port", "2", "-cs", "a b"]


def test_stars_in_the_variable_are_no_file_names(teller: Path) -> None:
    assert started(teller, GLM53_ARGS="--cors-origins *") == ["serve", "--cors-origins", "*"]


def test_another_command_is_passed_on_without_the_options_of_serve(teller: Path) -> None:
    assert started(teller, "doctor", "--json", GLM53_ARGS="--port 1") == ["doctor", "--json"]


def test_the_root_is_where_the_script_lies(tmp_path: Path) -> None:
    root = lay(tmp_path / "a folder", TELLER)
    script = root / "docker" / "entrypoint.sh"
    script.parent.mkdir()
    script.write_bytes(ENTRYPOINT.read_bytes())
    script.chmod(0o755)
    output = subprocess.run([script], check=True, capture_output=True, env=clean_environment()).stdout
    assert json.loads(output)["argv"] == ["serve"]


def test_a_missing_installation_is_one_line(tmp_path: Path) -> None:
    environment = clean_environment(GLM53_ROOT=str(tmp_path))
    result = subprocess.run([ENTRYPOINT], capture_output=True, text=True, env=environment)
    assert result.returncode == 2
    assert result.stderr == (
        f"entrypoint.sh: no {tmp_path}/.venv/bin/glm53srv: run scripts/install.sh, or set GLM53_ROOT to "
        "where it installed\n"
    )


class Served:
    """The real server behind the start script."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stderr is not None
        for line in process.stderr:
            if found := READY.search(line):
                self.url = found[1]
                break
        else:
            raise AssertionError(f"the server ended with {process.wait()}")
        # Nobody reads the log from here on, and a full pipe would stop the server.
        self._drain = threading.Thread(target=process.stderr.read, daemon=True)
        self._drain.start()

    def is_healthy(self) -> bool:
        """Run the container's health check against it."""
        command = [sys.executable, str(HEALTHCHECK), str(self.process.pid)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode == 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._drain.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def served(tmp_path: Path, random_model_dir: Path) -> Iterator[Served]:
    environment = clean_environment(
        GLM53_ROOT=str(lay(tmp_path / "root", SERVER)),
        GLM53_MODEL_DIR=str(random_model_dir),
        GLM53_ARGS="--served-name first --port 1",
        SERVED_NAME="variable",
    )
    command = [str(ENTRYPOINT), "--port", str(free_port()), "--served-name", "last"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    server = Served(process)
    try:
        yield server
    finally:
        server.close()


def test_the_real_server_takes_the_last_option_and_is_healthy(served: Served) -> None:
    assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"] == "last"
    assert served.is_healthy()
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_sigterm_lets_a_running_stream_end_and_the_exit_code_is_zero(served: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 200,
        "stream": True,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        served.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert served.process.wait(30) == 0
    assert not served.is_healthy()


def test_the_health_check_knows_a_server_that_loads_or_is_gone(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(HEALTHCHECK), str(gone.pid)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 1
        assert result.stdout.startswith("no answer: ")
    finally:
        gone.communicate(b"\n")
