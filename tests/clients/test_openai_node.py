"""openai for Node: npm installs it into a folder of the test run; skipped where that cannot be."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from glm53srv.engine.base import StepPlan
from glm53srv.engine.fake import StepGate
from tests.api.http_server import HttpServer, LogWatch
from tests.clients.weather import ANSWER, MAX_CONTEXT_TOKENS, QUESTION, TOOL, script_turns

PACKAGE = "openai@6.30.1"  # the last major version that runs on Node 20
SCRIPT = Path(__file__).with_name("openai_node.mjs")
INSTALL_TIMEOUT_S = 120
RUN_TIMEOUT_S = 60
ENDLESS = "endless"
STEPS_BEFORE_LEAVING = 20


class EndlessAnswer:
    """Gives one request text for a few steps, then holds the engine: its answer cannot end before the client
    leaves, however slow node is. before_step of an engine; opened by the test."""

    def __init__(self) -> None:
        self.gate = StepGate(RUN_TIMEOUT_S)

    def __call__(self, plan: StepPlan) -> None:
        start = None if plan.prefill is None else plan.prefill.start
        if start is not None and start.request_id == ENDLESS:
            self.gate.hold(plan.step_id + STEPS_BEFORE_LEAVING)
        self.gate.pass_through(plan)


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
    endless = EndlessAnswer()
    with (
        HttpServer(max_context_tokens=MAX_CONTEXT_TOKENS, before_step=endless) as http,
        LogWatch() as log,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(endless.gate.open)  # a held engine would not let the server stop
        script_turns(http)
        http.server.script(ENDLESS, "on and " * 1000)
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
        log.wait_for(f"id={ENDLESS}", "finish=disconnect")
        endless.gate.open()
        http.call(http.server.check_idle)
