"""docs/deployment.md names only files, variables, commands and flags that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from glm53srv.config import load_config
from glm53srv.options import OPTIONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deployment.md").read_text()


def test_links_lead_to_files() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert "../deploy/compose.yaml" in targets
    missing = [target for target in targets if not (ROOT / "docs" / target).exists()]
    assert missing == []


def test_variables_are_known() -> None:
    names = set(re.findall(r"\bGLM53_[A-Z_]+\b", PAGE))
    assert "GLM53_MODEL_REPO" in names
    load_config(["--model", "m"], dict.fromkeys(names, ""))  # an unknown one is an error


def test_commands_exist() -> None:
    command = [sys.executable, "-m", "glm53srv", "--help"]
    help_text = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    for name in set(re.findall(r"(?:glm53srv|entrypoint\.sh) (download|doctor|serve)\b", PAGE)):
        assert f"glm53srv {name}" in help_text


def test_flags_are_those_of_a_program_that_is_named() -> None:
    installer = (ROOT / "scripts" / "install.sh").read_text()
    known = {flag for option in OPTIONS for flag in option.flags} | {"--help", "--verify"}
    foreign = {
        "--target",
        "--build-arg",
        "--rm",
        "--gpus",
        "--ulimit",
        "--stop-timeout",
        "--strict",
        "--no-deps",
    }
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert {flag for flag in used - known - foreign if f"{flag})" not in installer} == set()
