"""Code blocks of Markdown pages, and whether they are to be run: `sh run`, or `sh skip: reason`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHELLS = frozenset({"", "sh", "bash", "shell", "console"})
"""A block without a language counts as shell, unless it is a drawing: see is_drawing."""

PYTHON = "python"

SKIP = "skip: "


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """One block. line: of its fence, from 1. info: what follows the language on that line."""

    page: str
    line: int
    language: str
    info: str
    text: str

    @property
    def name(self) -> str:
        """Where it stands."""
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether the test runs it."""
        return self.info == "run"

    @property
    def is_skipped(self) -> bool:
        """Whether it says why not."""
        return self.info.startswith(SKIP) and len(self.info) > len(SKIP)


def code_blocks(root: Path, pages: list[Path]) -> Iterator[CodeBlock]:
    """Give the blocks of shell and Python of the pages, in order."""
    for page in pages:
        name = str(page.relative_to(root))
        language = info = ""
        begin = 0
        lines: list[str] | None = None
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if not line.startswith("```"):
                if lines is not None:
                    lines.append(line)
            elif lines is None:
                language, _, info = line.removeprefix("```").partition(" ")
                begin, lines = number, []
            else:
                if language in (*SHELLS, PYTHON) and not (language == "" and is_drawing(lines)):
                    yield CodeBlock(name, begin, language, info.strip(), "\n".join(lines))
                lines = None


def is_drawing(lines: list[str]) -> bool:
    """Tell a drawing from commands: its lines are indented."""
    return all(line.startswith(" ") for line in lines if line)
