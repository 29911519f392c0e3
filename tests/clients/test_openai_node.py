"""openai for Node: npm installs it into a folder of the test run; skipped where that cannot be."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.api.http_server import HttpServer, LogWatch
from tests.clients.weather import ANSWER, MAX_CONTEXT_TOKENS, QUESTION, TOOL, script_turns

PACKAGE = "openai@6.30.1"  # the last major version that runs on Node 20
SCRIPT = Path(__file__).with_name("openai_node.mjs")
INSTALL_TIMEOUT_S = 120
RUN_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which node finds the package."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm could not install {PACKAGE} within {INSTALL_TIMEOUT_S} s")
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    shutil.copy(SCRIPT, folder)
    return folder


def test_node_chats_streams_calls_tools_and_leaves(node_folder: Path) -> None:
    with HttpServer(max_context_tokens=MAX_CONTEXT_TOKENS) as http, LogWatch() as log:
        script_turns(http)
        arguments = [f"{http.base_url}/v1", json.dumps(TOOL), QUESTION, ANSWER]
        done = subprocess.run(
            ["node", SCRIPT.name, *arguments],
            cwd=node_folder,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr
        log.wait_for("id=endless", "finish=disconnect")
        http.call(http.server.check_idle)
