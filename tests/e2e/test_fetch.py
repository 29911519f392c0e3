"""`serve` on an empty directory, and `download`, as processes against a hub on a loopback port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx

from tests.download.hub_stand_in import REPO, Fault, HubStandIn
from tests.e2e.server_process import ServerProcess

PERCENT = re.compile(r"downloading +(\d+)% [\d.]+ of")


def repository(model_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in model_dir.iterdir() if path.is_file()}


def environment(hub: HubStandIn, **more: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "GLM53_MODEL_REPO": REPO, **more}


def test_serve_fetches_a_missing_model_and_serves_it(random_model_dir: Path, tmp_path: Path) -> None:
    with (
        HubStandIn(repository(random_model_dir)) as hub,
        ServerProcess(tmp_path / "model", environ=environment(hub)) as server,
    ):
        url = server.url_when_ready()
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert any("downloading 100% whole" in line for line in server.output)
    assert repository(tmp_path / "model") == repository(random_model_dir)


def test_serve_does_not_ask_the_hub_when_the_model_is_there(random_model_dir: Path) -> None:
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "GLM53_MODEL_REPO": REPO}
    with ServerProcess(random_model_dir, environ=unreachable) as server:
        server.url_when_ready()


def test_serve_without_leave_to_download_says_what_is_missing(tmp_path: Path) -> None:
    with (
        HubStandIn({}) as hub,
        ServerProcess(tmp_path / "model", environ=environment(hub, GLM53_MODEL_DOWNLOAD="0")) as server,
    ):
        assert server.wait() == 3
        assert hub.num_answers == 0
    assert "config.json" in "".join(server.output)


def test_serve_with_an_unreachable_hub_ends_in_one_line(tmp_path: Path) -> None:
    environ = {"HF_ENDPOINT": "http://127.0.0.1:9", "GLM53_MODEL_REPO": REPO}
    with ServerProcess(tmp_path / "model", environ=environ) as server:
        assert server.wait() == 6
    assert server.output[-1].startswith("glm53srv: cannot reach http://127.0.0.1:9 (")


def test_a_killed_download_goes_on_where_it_was(random_model_dir: Path, tmp_path: Path) -> None:
    files = repository(random_model_dir)
    shard = max(files, key=lambda name: len(files[name]))
    total, cut_at = sum(map(len, files.values())), len(files[shard]) // 2
    command = [sys.executable, "-m", "glm53srv", "download", "--verify", "--model", str(tmp_path / "model")]
    with HubStandIn(files) as hub:
        environ = {**os.environ, **environment(hub)}
        released = threading.Event()
        hub.faults[shard] = [Fault(cut_at=cut_at, hold=released)]
        first = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
        assert first.stderr is not None
        for line in first.stderr:  # until more has come than all the other files could be
            if (found := PERCENT.match(line)) and int(found[1]) * total / 100 > total - len(files[shard]):
                break
        first.send_signal(signal.SIGTERM)
        assert first.communicate(timeout=60)[1].endswith("glm53srv: ended by SIGTERM\n")
        assert first.returncode == 128 + signal.SIGTERM
        released.set()
        second = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        assert f"of {REPO} at cccccccccccc" in second.stdout
        ranges = [wanted for name, wanted in hub.requests if name == shard]
    assert ranges[0] is None
    assert ranges[1] is not None
    assert 0 < int(ranges[1].removeprefix("bytes=").removesuffix("-")) <= cut_at
    assert repository(tmp_path / "model") == files
