"""What the Dockerfile promises, read from it, and the reading itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm53srv.download import PUBLISHED_REPO, PUBLISHED_REVISION
from glm53srv.model.config import load_model_config
from scripts.check_image_steps import Instruction, is_in_context, parse, stages_for

ROOT = Path(__file__).parents[2]
INSTRUCTIONS = parse((ROOT / "Dockerfile").read_text())
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def stage(name: str) -> list[Instruction]:
    return next(items for stage_name, _, items in stages_for(INSTRUCTIONS, name) if stage_name == name)


def environ(name: str) -> dict[str, str]:
    pairs = [pair for item in stage(name) if item.name == "ENV" for pair in item.text.split()]
    return dict(pair.split("=", 1) for pair in pairs)


def one(name: str, instruction: str) -> str:
    (found,) = [item for item in stage(name) if item.name == instruction]
    return found.text


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_as_a_numbered_user_and_lets_signals_through(target: str) -> None:
    assert one(target, "USER") == "10001:10001"
    assert json.loads(one(target, "ENTRYPOINT")) == ["/opt/glm53srv/docker/entrypoint.sh"]
    assert one(target, "STOPSIGNAL") == "SIGTERM"
    assert json.loads(one(target, "HEALTHCHECK").removeprefix("CMD"))[-1].endswith("docker/healthcheck.py")
    assert environ(target)["GLM53_HOST"] == "0.0.0.0"
    assert not [item for item in stage(target) if item.name == "CMD"]  # words after the image are options


def test_the_cuda_image_fetches_the_pinned_model_and_the_cpu_image_none() -> None:
    variables = environ("cuda")
    assert variables["GLM53_MODEL_REPO"] == PUBLISHED_REPO
    assert variables["GLM53_MODEL_REVISION"] == PUBLISHED_REVISION
    assert variables["GLM53_MODEL_DIR"] == "/models"
    assert "GLM53_MODEL_REPO" not in environ("cpu")


def test_kernels_are_built_for_a_3090_unless_told_otherwise_and_before_our_code() -> None:
    items = stage("cuda-build")
    assert "TORCH_CUDA_ARCH_LIST=8.6" in [item.text for item in items if item.name == "ARG"]
    shown = [item.shown for item in items]
    assert shown.index("RUN .venv/bin/python scripts/build_exllamav3.py") < shown.index("COPY . .")


def test_the_final_images_hold_no_toolkit() -> None:
    bases = {name: base for name, base, _ in stages_for(INSTRUCTIONS, "cuda")}
    assert "-devel-" in bases["cuda-build"]
    assert "-base-" in bases["cuda"]


def test_a_target_needs_only_its_own_stages() -> None:
    assert [name for name, _, _ in stages_for(INSTRUCTIONS, "cpu")] == ["cpu-build", "cpu"]
    assert [name for name, _, _ in stages_for(INSTRUCTIONS, "cuda")] == ["cuda-build", "cuda"]


def test_what_is_copied_exists_and_passes_dockerignore() -> None:
    for item in INSTRUCTIONS:
        if item.name == "COPY" and "from" not in item.flags:
            for source in item.text.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source == "." or is_in_context(source, IGNORED), source


@pytest.mark.parametrize(
    "path",
    [
        "glm53srv/api/app.py",
        "native/src/crew.c",
        "docker/entrypoint.sh",
        "reference/demo/checkpoint/model.safetensors",
        "requirements/cuda.txt",
        "LICENSE",
    ],
)
def test_the_context_holds_the_program(path: str) -> None:
    assert is_in_context(path, IGNORED)


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        ".models/random/config.json",
        "tests/conftest.py",
        "reference/demo/train.py",
        "glm53srv/__pycache__/x.pyc",
        "glm53srv/_kernels.cpython-311-x86_64-linux-gnu.so",
        "glm53srv/_kernels_build.json",
        "glm53srv.toml",
    ],
)
def test_the_context_holds_nothing_else(path: str) -> None:
    assert not is_in_context(path, IGNORED)


def test_the_cpu_image_serves_the_demo_model_that_is_copied_into_it() -> None:
    folder = one("cpu-build", "WORKDIR")
    model_dir = Path(environ("cpu")["GLM53_MODEL_DIR"]).relative_to(folder)
    assert load_model_config(ROOT / model_dir).is_demo
    assert is_in_context(f"{model_dir}/config.json", IGNORED)
    assert f"COPY --from=cpu-build {folder} {folder}" in [item.shown for item in stage("cpu")]


def test_an_install_copies_what_an_image_holds() -> None:
    installer = (ROOT / "scripts" / "install.sh").read_text()
    copied = {"glm53srv"} | set(installer.partition("for name in ")[2].partition(";")[0].split())
    assert copied == {line[1:] for line in IGNORED if line.startswith("!")}


@pytest.mark.parametrize("name", ["base", "cuda", "dev"])
def test_every_package_is_pinned_by_hash(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    packages = [line for line in text.splitlines() if line and line[0] not in "# "]
    assert packages
    for line in packages:
        assert "==" in line, line
        assert line.endswith("\\"), line
        assert f"{line}\n    --hash=sha256:" in text, line


def test_the_gpu_packages_are_those_of_the_base_install_and_more() -> None:
    pins = {}
    for name in ("base", "cuda"):
        lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
        pins[name] = {line.rstrip(" \\") for line in lines if line and line[0] not in "# "}
    assert pins["base"] <= pins["cuda"]
    assert "torch==2.11.0" in pins["cuda"]
    assert "exllamav3==1.5.1" in pins["cuda"]


def test_a_dockerfile_is_read_with_comments_continuations_and_flags() -> None:
    text = "ARG B=base\n# note\nFROM ${B} AS one\nRUN a \\\n    # inside\n    && b\n"
    text += "COPY --from=x --chown=1 c d\n"
    base, run, copy = parse(text)[1:]
    assert (base.name, base.text) == ("FROM", "${B} AS one")
    assert run.text.split() == ["a", "&&", "b"]
    assert (copy.flags, copy.text) == ({"from": "x", "chown": "1"}, "c d")
