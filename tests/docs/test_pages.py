"""README and docs do what they say: commands run, tables are fresh, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import option_docs
from tests.docs.code_blocks import PYTHON, CodeBlock, code_blocks
from tests.e2e.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = list(code_blocks(ROOT, PAGES))
PORT = ":30000"
TIMEOUT_S = 120.0

LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout after `make serve`, with the commands that one has on PATH."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("bench", "cffi_build", "deploy", "docs", "glm53srv", "native", "reference", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    commands = folder / ".venv/bin"
    commands.mkdir(parents=True)
    for name, words in (("glm53srv", "-m glm53srv"), ("python", ""), ("python3", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (commands / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def server(demo_model_dir: Path) -> Iterator[str]:
    with ServerProcess(demo_model_dir, "--cache-tokens", "8192") as process:
        yield process.url_when_ready()


def test_every_block_is_run_or_says_why_not() -> None:
    unmarked = [block.name for block in BLOCKS if not block.is_run and not block.is_skipped]
    assert unmarked == [], "write ```sh run, or ```sh skip: and the reason"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.is_run], ids=lambda block: block.name)
def test_a_block_runs(block: CodeBlock, sandbox: Path, server: str) -> None:
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("GLM53_")}
    command = [sys.executable, "-c"] if block.language == PYTHON else ["bash", "-euo", "pipefail", "-c"]
    path = f"{sandbox / '.venv/bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [*command, block.text.replace(PORT, f":{server.rpartition(':')[2]}")],
        cwd=sandbox,
        env={**inherited, "PATH": path, "PYTHONPATH": str(sandbox), "PORT": "0"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout


@pytest.mark.parametrize("page", option_docs.PAGES)
def test_the_tables_of_options_are_up_to_date(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert option_docs.rewritten(text, option_docs.PAGES[page]) == text, "run: python scripts/option_docs.py"


def test_every_option_stands_in_the_tuning_guide() -> None:
    from glm53srv.options import OPTIONS

    text = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
    for option in OPTIONS:
        for name in (*option.flags, option.env, option.name):
            assert f"`{name}`" in text


def test_a_stale_or_unmarked_page_is_noticed() -> None:
    begin, end = "<!-- options: written by scripts/option_docs.py -->\n", "<!-- end of options -->"
    page = f"before\n{begin}old\n{end}\nafter\n"
    new = option_docs.rewritten(page, ("options",))
    assert new != page
    assert new.startswith("before\n")
    assert new.endswith("\nafter\n")
    assert option_docs.rewritten(new, ("options",)) == new
    with pytest.raises(ValueError, match="markers of options"):
        option_docs.rewritten("no markers", ("options",))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_blocks_are_found_by_their_fences(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh run\na\nb\n```\ntext\n```json\nc\n```\n```\n  drawing\n```\n```\nd\n```\n"
        "```python skip: x\ne\n```\n"
    )
    blocks = list(code_blocks(tmp_path, [page]))
    assert [(block.line, block.text) for block in blocks] == [(1, "a\nb"), (12, "d"), (15, "e")]
    assert [block.is_run for block in blocks] == [True, False, False]
    assert [block.is_skipped for block in blocks] == [False, False, True]
