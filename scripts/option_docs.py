#!/usr/bin/env python3
"""Write the tables of options into README.md and docs/tuning.md, from the options themselves.

    python scripts/option_docs.py            write them
    python scripts/option_docs.py --check    only say whether they are up to date (exit code 1: they are not)

A test runs the check. What stands between two markers is replaced, the rest of a page is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from glm53srv.option import Option  # noqa: E402  # run as a script, the package is found by the line above
from glm53srv.options import grouped  # noqa: E402
from glm53srv.original_interface import (  # noqa: E402
    ORIGINAL_NAMES,
    REFUSED_PREFIXES,
    WITHOUT_EFFECT,
)
from glm53srv.sources import BY_NAME  # noqa: E402

PAGES: Mapping[str, tuple[str, ...]] = {"README.md": ("original",), "docs/tuning.md": ("options", "idle")}
"""Tables by page."""


def option_tables() -> str:
    """Give one table per group."""
    lines: list[str] = []
    for group, options in grouped().items():
        lines += [f"### {group[0].upper()}{group[1:]}", "", "| flag | variable | key | default | meaning |"]
        lines.append("|---|---|---|---|---|")
        lines += [_row(option) for option in options]
        lines.append("")
    return "\n".join(lines).rstrip()


def original_table() -> str:
    """Give the table of the names that users of the original server know."""
    lines = ["| original name | here | effect |", "|---|---|---|"]
    for entry in ORIGINAL_NAMES:
        here = f"`{BY_NAME[entry.option].flags[0]}`" if entry.option else "start scripts"
        lines.append(f"| `{entry.name}` | {here} | {entry.effect} |")
    lines += [f"| `{prefix}*` | - | refused: {reason} |" for prefix, reason in REFUSED_PREFIXES.items()]
    lines += ["", f"Accepted without effect: {', '.join(f'`{name}`' for name in WITHOUT_EFFECT)}."]
    return "\n".join(lines)


def idle_table() -> str:
    """Give the names that are accepted without effect, and why."""
    rows = [f"| `{name}` | {reason} |" for name, reason in WITHOUT_EFFECT.items()]
    return "\n".join(["| name | why it changes nothing |", "|---|---|", *rows])


TABLES = {"options": option_tables, "original": original_table, "idle": idle_table}


def rewritten(text: str, names: Sequence[str]) -> str:
    """Give a page with its tables replaced. Raises ValueError for a page without the markers."""
    for name in names:
        begin, end = f"<!-- {name}: written by scripts/option_docs.py -->\n", f"<!-- end of {name} -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the markers of {name} are missing")
        text = f"{head}{begin}{TABLES[name]()}\n{end}{tail}"
    return text


def main(argv: Sequence[str]) -> int:
    stale = []
    for page, names in PAGES.items():
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        new = rewritten(text, names)
        if new != text:
            stale.append(page)
            if "--check" not in argv:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'out of date' if '--check' in argv else 'written'}: {', '.join(stale)}")
    return 1 if stale and "--check" in argv else 0


def _row(option: Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    default = "-" if option.default is None else f"`{option.default}`"
    return f"| {flags} | `{option.env}` | `{option.name}` | {default} | {_meaning(option)} |"


def _meaning(option: Option) -> str:
    parts = [option.help.replace("|", "\\|")]
    if option.choices:
        parts.append("one of " + ", ".join(f"`{choice}`" for choice in option.choices))
    bounds = []
    if option.minimum is not None:
        bounds.append(f"at least {option.minimum:g}")
    if option.maximum is not None:
        bounds.append(f"at most {option.maximum:g}")
    if option.unit or bounds:
        parts.append(", ".join([*([option.unit] if option.unit else []), *bounds]))
    return "; ".join(parts)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
