"""Facts that belong to every result: this machine, this code, and what the server says of itself."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.client import Client
from bench.errors import BenchError, ServerDown

REPOSITORY = Path(__file__).resolve().parents[1]
SERVER_PAGES = ("/health", "/v1/models", "/server_info", "/stats")


def machine_facts() -> dict[str, Any]:
    """Describe the machine this command runs on; for a server elsewhere, that is only the client's side."""
    return {
        "cpu": cpu_model(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "gpus": _command(
            "nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
        ),
        "commit": " ".join(
            _command("git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12") or ["?"]
        ),
    }


def cpu_model() -> str:
    """Name the processor as the kernel does, with family and model, since virtual machines hide its name."""
    known: dict[str, str] = {}
    for line in _read_text("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        known.setdefault(key.strip(), value.strip())
    name = known.get("model name") or platform.processor() or "unknown"
    if "cpu family" not in known:
        return name
    return f"{name} (family {known['cpu family']}, model {known.get('model', '?')})"


def server_facts(client: Client) -> dict[str, Any]:
    """Give what the server says of itself, page by page.

    A page it does not have, or cannot give, holds the reason. Raises ServerDown if nothing answers at all.
    """
    pages: dict[str, Any] = {"url": client.url, "read_at": utc_now()}
    for path in SERVER_PAGES:
        try:
            pages[path.strip("/").replace("v1/", "")] = client.get(path)
        except BenchError as error:
            if isinstance(error, ServerDown):
                raise
            pages[path.strip("/").replace("v1/", "")] = {"unavailable": str(error)}
    return pages


def utc_now() -> str:
    """Give the date and time in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def process_memory(process_id: int) -> dict[str, int]:
    """Give resident bytes now and at the peak of a process of this machine; empty when it cannot be read."""
    found = {}
    for line in _read_text(f"/proc/{process_id}/status").splitlines():
        key, _, value = line.partition(":")
        if key in ("VmRSS", "VmHWM", "RssAnon"):
            found[key] = int(value.split()[0]) * 1024
    names = {"VmRSS": "resident_bytes", "VmHWM": "peak_bytes", "RssAnon": "anonymous_bytes"}
    return {names[key]: value for key, value in found.items()}


def _memory_gib() -> float | None:
    for line in _read_text("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return round(int(line.split()[1]) / 2**20, 1)
    return None


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _command(*words: str) -> list[str] | None:
    """Give the lines that a command prints; None where it does not exist or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[:-1]
