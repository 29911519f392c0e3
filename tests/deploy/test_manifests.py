"""systemd unit, compose file, Kubernetes manifest: what each must say for pinned memory, probes, an end."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm53srv.config import load_config
from glm53srv.errors import CheckpointError, ConfigError, MachineError
from glm53srv.options import OPTIONS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DRAIN_S = next(float(str(option.default)) for option in OPTIONS if option.name == "drain_timeout_s")


class Unit(RawConfigParser):
    """A unit file: keys keep their case, and several of one name are joined by line breaks."""

    def __init__(self) -> None:
        super().__init__(strict=False, interpolation=None, comment_prefixes=("#",), delimiters=("=",))

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    unit = Unit()
    unit.read(DEPLOY / "glm53srv.service")
    return dict(unit["Service"])


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def pod() -> Any:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (deployment,) = [item for item in documents if item["kind"] == "Deployment"]
    return deployment["spec"]["template"]["spec"]


def require_known(names: Iterable[str]) -> None:
    """An unknown variable would end the server; an empty one is not set."""
    load_config(["--model", "m"], dict.fromkeys(names, ""))


def test_the_unit_allows_pinned_memory_and_a_slow_start(service: dict[str, str]) -> None:
    assert service["LimitMEMLOCK"] == "infinity"
    assert service["TimeoutStartSec"] == "infinity"
    assert not {"PrivateDevices", "MemoryDenyWriteExecute", "DevicePolicy"} & set(service)


def test_the_unit_does_not_restart_what_a_restart_does_not_mend(service: dict[str, str]) -> None:
    codes = {int(code) for code in service["RestartPreventExitStatus"].split()}
    assert codes == {error.exit_code for error in (ConfigError, CheckpointError, MachineError)}
    assert service["Restart"] == "on-failure"


def test_the_unit_waits_for_the_drain(service: dict[str, str]) -> None:
    assert float(service["TimeoutStopSec"]) >= DRAIN_S + 30
    assert service["KillSignal"] == "SIGTERM"


def test_the_unit_names_known_variables() -> None:
    lines = (DEPLOY / "glm53srv.service").read_text().splitlines()
    pairs = [line.removeprefix("Environment=") for line in lines if line.startswith("Environment=")]
    environ = dict(pair.split("=", 1) for pair in pairs)
    assert environ["GLM53_ROOT"] == "/opt/glm53srv"
    load_config([], environ)


def test_a_variable_that_no_option_has_would_be_noticed() -> None:
    with pytest.raises(ConfigError, match="GLM53_MODUS"):
        require_known(["GLM53_MODUS"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With a program that exists: systemd also says so when there is none."""
    unit = tmp_path / "glm53srv.service"
    text = (DEPLOY / "glm53srv.service").read_text()
    unit.write_text(
        text.replace("/opt/glm53srv/docker/entrypoint.sh", str(ROOT / "docker" / "entrypoint.sh"))
    )
    result = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "glm53srv.service" not in result.stderr  # also no warning about a key it does not know


def test_compose_gives_the_gpu_pinned_memory_and_time_to_end(compose: Any) -> None:
    server = compose["services"]["glm53srv"]
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert server["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    assert server["shm_size"] == "1gb"
    assert float(server["stop_grace_period"].removesuffix("s")) >= DRAIN_S + 30
    assert server["healthcheck"]["test"][-1] == "/opt/glm53srv/docker/healthcheck.py"
    assert "limits" not in server["deploy"]["resources"]
    assert server["build"]["target"] == "cuda"


def test_compose_listens_on_this_machine_only_and_names_known_variables(compose: Any) -> None:
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        require_known(service.get("environment", {}))


def test_probes_use_the_routes_of_the_api(pod: Any) -> None:
    (server,) = pod["containers"]
    assert server["startupProbe"]["httpGet"]["path"] == "/health"
    assert server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"] >= 1200
    assert server["readinessProbe"]["httpGet"]["path"] == "/health"
    assert server["livenessProbe"]["httpGet"]["path"] == "/livez"


def test_the_pod_has_time_for_pause_drain_and_freeing(pod: Any) -> None:
    (server,) = pod["containers"]
    pause = float(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= pause + DRAIN_S + 30


def test_the_pod_is_guaranteed_a_gpu_and_not_root(pod: Any) -> None:
    (server,) = pod["containers"]
    assert server["resources"]["requests"] == server["resources"]["limits"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["runAsNonRoot"]
    for container in (server, *pod["initContainers"]):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        require_known(item["name"] for item in container.get("env", []))


def test_the_model_is_fetched_before_the_server_starts(pod: Any) -> None:
    (fetcher,) = pod["initContainers"]
    assert fetcher["args"] == ["download"]
    (server,) = pod["containers"]
    assert {"name": "GLM53_MODEL_DOWNLOAD", "value": "0"} in server["env"]
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in server["volumeMounts"]
