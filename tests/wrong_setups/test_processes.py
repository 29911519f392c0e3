"""Wrong set-ups as a user meets them: a process that ends at once, with one line that says what to do."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm53srv.__main__ import main
from tests.wrong_setups.setups import CHECKPOINT, DOWNLOAD, SETUPS, Setup
from tests.wrong_setups.workbench import Workbench, heed_permissions, make_workbench, run_glm53srv


@pytest.fixture
def bench(random_model_dir: Path, tmp_path: Path) -> Iterator[Workbench]:
    made = make_workbench(random_model_dir, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_serve_ends_before_loading_with_one_line(setup: Setup, bench: Workbench) -> None:
    setup.break_it(bench)
    model = [] if bench.model_dir == bench.folder else ["--model", str(bench.model_dir)]
    done = run_glm53srv(["serve", "--port", "0", *model, *bench.arguments], bench.environ, bench.folder)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("glm53srv: ")
    assert setup.problem in lines[0]
    assert setup.remedy in lines[0]
    assert done.returncode == setup.exit_code
    assert done.stdout == ""


@pytest.mark.parametrize(
    "setup", [setup for setup in SETUPS if setup.exit_code == CHECKPOINT], ids=lambda setup: setup.name
)
def test_doctor_names_a_broken_checkpoint_as_serve_does(
    setup: Setup, bench: Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    setup.break_it(bench)
    assert main(["doctor", "--json", "--port", "0", "--model", str(bench.model_dir)]) == CHECKPOINT
    answer = json.loads(capsys.readouterr().out)
    (fatal,) = [finding for finding in answer["findings"] if finding["severity"] == "fatal"]
    assert fatal["name"] == "checkpoint"
    assert setup.problem in fatal["text"]
    assert setup.remedy in fatal["remedy"]


def test_an_unreadable_file_is_named(bench: Workbench) -> None:
    bench.path("model.safetensors").chmod(0)
    words = ["serve", "--port", "0", "--model", str(bench.model_dir)]
    done = run_glm53srv(words, {}, bench.folder, before=heed_permissions)
    assert done.returncode == CHECKPOINT
    assert len(done.stderr.splitlines()) == 1
    assert "model.safetensors: cannot be read (Permission denied); " in done.stderr


def test_read_only_models_are_served(bench: Workbench) -> None:
    """Nothing is written beside the weights: a model may lie on a read-only mount."""
    for path in bench.model_dir.iterdir():
        path.chmod(0o444)
    bench.model_dir.chmod(0o555)
    bench.closers.append(lambda: bench.model_dir.chmod(0o755))
    model = ["--model", str(bench.model_dir)]
    doctor = run_glm53srv(["doctor", "--port", "0", *model], {}, bench.folder, before=heed_permissions)
    assert doctor.returncode == 0, doctor.stdout
    words = ["generate", "Hi", "--max-tokens", "2", "--cache-tokens", "1024", *model]
    answer = run_glm53srv(words, {}, bench.folder, before=heed_permissions)
    assert answer.returncode == 0, answer.stderr


def test_an_unreachable_hub_is_named(tmp_path: Path) -> None:
    """Port 1 of this machine, where nobody listens."""
    environ = {"GLM53_MODEL_REPO": "nobody/nothing", "HF_ENDPOINT": "http://127.0.0.1:1"}
    done = run_glm53srv(["serve", "--model", str(tmp_path / "empty")], environ, tmp_path)
    assert done.returncode == DOWNLOAD
    last = done.stderr.splitlines()[-1]  # the line before it is progress
    assert "cannot reach http://127.0.0.1:1" in last
    assert "check network and proxy" in last


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """A limit on the size of files stands for a disk without room: writing fails in the middle."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))

    done = run_glm53srv(["pack", "random", "--out", str(tmp_path / "model")], {}, tmp_path, before=limit)
    assert done.returncode == CHECKPOINT
    last = done.stderr.splitlines()[-1]  # the lines before it are progress
    assert "cannot be written: File too large; name another directory with --out" in last
    assert "Traceback" not in done.stderr


def test_an_unknown_command_names_the_nearest(tmp_path: Path) -> None:
    done = run_glm53srv(["serv"], {}, tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("glm53srv: unknown command 'serv', did you mean serve?")
    assert len(done.stderr.splitlines()) == 1


def test_a_longer_file_is_a_warning(bench: Workbench) -> None:
    with bench.path("model.safetensors").open("ab") as file:
        file.write(b"rest of another file")
    done = run_glm53srv(
        ["doctor", "--json", "--port", "0", "--model", str(bench.model_dir)], {}, bench.folder
    )
    findings = {item["name"]: item for item in json.loads(done.stdout)["findings"]}
    assert findings["files"]["severity"] == "warn"
    assert "has 20 bytes behind its last tensor" in findings["files"]["text"]
    assert "fetch the checkpoint again" in findings["files"]["remedy"]
    assert done.returncode == 0


@pytest.mark.parametrize("place", ["download", "hub library", "snapshot"])
def test_another_revision_than_asked_for_is_a_warning(place: str, bench: Workbench) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    if place == "download":
        bench.path(".download").mkdir()
        bench.path(".download/state.json").write_text(json.dumps({"repo": "a/b", "commit": commit}))
    elif place == "hub library":
        bench.path(".cache/huggingface/download").mkdir(parents=True)
        bench.path(".cache/huggingface/download/config.json.metadata").write_text(f"{commit}\netag\n1.0\n")
    else:
        (bench.folder / "snapshots").mkdir()
        bench.model_dir = bench.model_dir.rename(bench.folder / "snapshots" / commit)
    environ = {"GLM53_MODEL_REVISION": "f" * 40}
    words = ["doctor", "--json", "--port", "0", "--model", str(bench.model_dir)]
    done = run_glm53srv(words, environ, bench.folder)
    findings = {item["name"]: item for item in json.loads(done.stdout)["findings"]}
    assert findings["revision"]["severity"] == "warn"
    assert (
        "holds commit 0123456789ab, GLM53_MODEL_REVISION asks for ffffffffffff"
        in findings["revision"]["text"]
    )
    same = run_glm53srv(words, {"GLM53_MODEL_REVISION": commit}, bench.folder)
    findings = {item["name"]: item for item in json.loads(same.stdout)["findings"]}
    assert findings["revision"]["severity"] == "ok"
