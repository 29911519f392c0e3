"""What the checks find, and how it is shown."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from glm53srv.errors import Glm53Error

SCHEMA = 1
"""Version of the JSON: a field may be added under the same number, none is taken away or changed."""


class Severity(enum.Enum):
    """How bad a finding is: FATAL keeps the server from starting, WARNING costs speed or may surprise."""

    OK = "ok"
    WARNING = "warn"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked thing. remedy: what to do, "" for what is well. error: what `serve` raises if FATAL."""

    name: str
    severity: Severity
    text: str
    remedy: str = ""
    error: Glm53Error | None = None


def ok(name: str, text: str) -> Finding:
    """Give a finding that needs nothing."""
    return Finding(name, Severity.OK, text)


def warn(name: str, text: str, remedy: str) -> Finding:
    """Give a finding that does not stop the server."""
    return Finding(name, Severity.WARNING, text, remedy)


def fatal(name: str, error: Glm53Error, remedy: str) -> Finding:
    """Give a finding that stops the server; the error it raises says the remedy too."""
    return Finding(name, Severity.FATAL, str(error), remedy, type(error)(f"{error}; {remedy}"))


def wrap(name: str, error: Glm53Error, otherwise: str = "") -> Finding:
    """Make a fatal finding of an error that says what to do after its last semicolon.

    otherwise: the remedy for one that does not.
    """
    text, semicolon, remedy = str(error).rpartition("; ")
    if not semicolon:
        return (
            fatal(name, error, otherwise) if otherwise else Finding(name, Severity.FATAL, remedy, "", error)
        )
    return Finding(name, Severity.FATAL, text, remedy, error)


def first_error(findings: Sequence[Finding]) -> Glm53Error | None:
    """Give what `serve` would raise, None if it would start."""
    return next((finding.error for finding in findings if finding.error is not None), None)


def exit_code(findings: Sequence[Finding]) -> int:
    """Give the code that `doctor` ends with: 0, or that of the error `serve` would raise."""
    error = first_error(findings)
    return 0 if error is None else error.exit_code


def report(findings: Sequence[Finding]) -> str:
    """Lay the findings out for a terminal, with a verdict at the end."""
    lines = []
    for item in findings:
        remedy = f"; {item.remedy}" if item.remedy else ""
        lines.append(f"{item.severity.value:>5}  {item.name}: {item.text}{remedy}")
    num_fatal = sum(item.severity is Severity.FATAL for item in findings)
    num_warnings = sum(item.severity is Severity.WARNING for item in findings)
    verdict = f"{num_fatal} of these must be mended" if num_fatal else "this machine can serve the model"
    if num_warnings:
        verdict += f", {num_warnings} {'warning' if num_warnings == 1 else 'warnings'}"
    return "\n".join([*lines, "", verdict])


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Give {"schema", "ok", "exit_code", "findings": [{"name", "severity", "text", "remedy"}]}."""
    items = [
        {"name": item.name, "severity": item.severity.value, "text": item.text, "remedy": item.remedy}
        for item in findings
    ]
    code = exit_code(findings)
    return {"schema": SCHEMA, "ok": code == 0, "exit_code": code, "findings": items}
