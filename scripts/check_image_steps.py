#!/usr/bin/env python3
"""Run the steps of the Dockerfile's cpu target in a chroot, up to a right answer. As root, on Debian.

    sudo python3 scripts/check_image_steps.py --base /path/of/a/debootstrap/tree --work /var/tmp/image

No container engine is needed: each stage is a copy of the base tree, RUN is a chroot, COPY goes by
.dockerignore. At the end the entry point runs as the image's user with the image's environment; the image's
HEALTHCHECK must succeed, a question must be answered right, and SIGTERM must end it with exit code 0. What
this does not show: layers, isolation, an engine's own treatment of signals and users. The base tree:

    debootstrap --variant=minbase bookworm /path http://deb.debian.org/debian

--work must be empty or absent; it is left for a look. Prints one line per step with its seconds, and sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NETWORK_VARIABLES = re.compile(r"(?i)(https?|no)_proxy|PIP_(INDEX_URL|DEFAULT_TIMEOUT)")
"""What a builder would be configured with for this machine's network; for RUN only, not kept."""

CERTIFICATES = "run/builder-certificates.crt"
"""Place in a tree for the certificates that SSL_CERT_FILE names here: a network may have its own."""

START_TIMEOUT_S = 120.0
QUESTION = "What is the capital of Australia?"
ANSWER = "Canberra"


@dataclass
class Instruction:
    """One instruction. text: its operand, with line continuations joined. flags: `--from=...`."""

    name: str
    text: str
    flags: dict[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The instruction on one line, shortened."""
        flags = "".join(f"--{key}={value} " for key, value in self.flags.items())
        line = " ".join(f"{self.name} {flags}{self.text}".split())
        return line if len(line) <= 100 else f"{line[:97]}..."


@dataclass
class Stage:
    """One stage and what its instructions have set so far. root: its file system."""

    name: str
    root: Path
    environ: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    health: list[str] = field(default_factory=list)
    entry: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"


def parse(text: str) -> list[Instruction]:
    """Read a Dockerfile: comments and continuations go, flags are taken apart."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        name, _, rest = line.strip().partition(" ")
        flags = {}
        while match := re.match(r"--([a-z-]+)=(\S+)\s+", rest.lstrip()):
            flags[match[1]] = match[2]
            rest = rest.lstrip()[match.end() :]
        if name:
            found.append(Instruction(name.upper(), rest.strip(), flags))
    return found


def stages_for(instructions: list[Instruction], target: str) -> list[tuple[str, str, list[Instruction]]]:
    """Give (name, base, instructions) of a target and of the stages it copies from, in order of building."""
    arguments: dict[str, str] = {}
    stages: dict[str, tuple[str, list[Instruction]]] = {}
    name = ""
    for instruction in instructions:
        if instruction.name == "FROM":
            base, _, name = instruction.text.partition(" AS ")
            stages[name] = (re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], base), [])
        elif name:
            stages[name][1].append(instruction)
        elif instruction.name == "ARG":
            key, _, value = instruction.text.partition("=")
            arguments[key] = value
    wanted = [target]
    for stage in wanted:
        sources = [item.flags.get("from", "") for item in stages[stage][1]]
        wanted += [
            source for source in [*sources, stages[stage][0]] if source in stages and source not in wanted
        ]
    return [(stage, *stages[stage]) for stage in stages if stage in wanted]


def is_in_context(path: str, ignore_lines: list[str]) -> bool:
    """Tell whether .dockerignore lets a file of the repository through: the last line that fits decides."""
    is_kept = True
    for line in ignore_lines:
        pattern = line.strip().lstrip("!")
        if not pattern or pattern.startswith("#"):
            continue
        parts = path.split("/")
        if pattern.startswith("**/"):
            fits = any(fnmatch(part, pattern[3:]) for part in parts)
        else:
            fits = any(fnmatch("/".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))
        if fits:
            is_kept = line.strip().startswith("!")
    return is_kept


class Builder:
    """Runs the instructions of stages below a work folder."""

    def __init__(self, base: Path, work: Path) -> None:
        self._base = base
        self._work = work
        self._ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        self.stages: dict[str, Stage] = {}

    def build(self, name: str, base: str, instructions: list[Instruction]) -> Stage:
        """Run one stage; prints each step with its seconds."""
        print(f"stage {name} from {base} ({self._base})", flush=True)
        stage = Stage(name, self._work / name)
        _timed("copy of the base tree", lambda: _copy_tree(self._base, stage.root))
        self.stages[name] = stage
        with machine_files(stage.root):
            for instruction in instructions:
                _timed(instruction.shown, lambda item=instruction: self._run(stage, item))
        return stage

    def _run(self, stage: Stage, item: Instruction) -> None:
        if item.name == "RUN":
            network = {key: value for key, value in os.environ.items() if NETWORK_VARIABLES.fullmatch(key)}
            if "SSL_CERT_FILE" in os.environ:
                network |= {"SSL_CERT_FILE": f"/{CERTIFICATES}", "PIP_CERT": f"/{CERTIFICATES}"}
            command = in_chroot(stage, ["/bin/sh", "-c", item.text], network)
            if code := subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
                raise SystemExit(f"check_image_steps: exit code {code} of {item.shown}")
        elif item.name == "COPY":
            self._copy(stage, item)
        elif item.name == "WORKDIR":
            stage.folder = item.text
            (stage.root / item.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif item.name == "ENV":
            for pair in shlex.split(item.text):
                key, _, value = pair.partition("=")
                stage.environ[key] = value
        elif item.name == "USER":
            stage.user = item.text
        elif item.name == "HEALTHCHECK":
            stage.health = json.loads(item.text.removeprefix("CMD"))
        elif item.name == "ENTRYPOINT":
            stage.entry = json.loads(item.text)
        elif item.name == "STOPSIGNAL":
            stage.stop_signal = item.text
        elif item.name not in ("EXPOSE", "ARG"):
            raise SystemExit(f"check_image_steps: {item.name} is not known here: teach it, or leave it out")

    def _copy(self, stage: Stage, item: Instruction) -> None:
        *sources, target = item.text.split()
        target_path = stage.root / os.path.normpath(os.path.join(stage.folder, target)).lstrip("/")
        if "from" in item.flags:
            other = self.stages[item.flags["from"]].root
            for source in sources:
                _copy_tree(other / source.lstrip("/"), target_path)
            return
        for source in sources:
            for path in sorted((ROOT / source).rglob("*") if (ROOT / source).is_dir() else [ROOT / source]):
                name = str(path.relative_to(ROOT))
                if path.is_dir() or ".git/" in name or not is_in_context(name, self._ignore):
                    continue
                place = target_path / (name if source == "." else path.name)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place)


def in_chroot(stage: Stage, command: list[str], extra: dict[str, str] | None = None) -> list[str]:
    """Give the command that runs another in the stage, with nothing of this machine's environment."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    home = {"PATH": path, "HOME": "/root" if stage.user == "0:0" else "/cache"}
    environ = {**home, **stage.environ, **(extra or {})}
    words = [f"{key}={value}" for key, value in environ.items()]
    inner = f'cd {shlex.quote(stage.folder)} && exec "$@"'
    shell = ["/bin/sh", "-c", inner, "sh", *command]
    return ["env", "-i", *words, "chroot", f"--userspec={stage.user}", str(stage.root), *shell]


@contextlib.contextmanager
def machine_files(root: Path) -> Iterator[None]:
    """Lend a tree /proc, the machine's name server and its certificates, as an engine does."""
    shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")
    if certificates := os.environ.get("SSL_CERT_FILE"):
        shutil.copyfile(certificates, root / CERTIFICATES)
    subprocess.run(["mount", "-t", "proc", "proc", str(root / "proc")], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(root / "proc")], check=True)
        (root / CERTIFICATES).unlink(missing_ok=True)


def try_out(stage: Stage) -> None:
    """Start the image's entry point as its user, ask for its health and a chat, and end it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    network = {"PORT": str(port), "GLM53_HOST": "127.0.0.1"}  # the chroot shares this machine's network
    started = time.perf_counter()
    log = (stage.root.parent / "server.log").open("w")
    with log, machine_files(stage.root):
        server = subprocess.Popen(in_chroot(stage, stage.entry, network), stdout=log, stderr=log)
        try:
            check = in_chroot(stage, [*stage.health, str(server.pid)], network)
            while subprocess.run(check, stdout=subprocess.DEVNULL).returncode != 0:
                if server.poll() is not None or time.perf_counter() - started > START_TIMEOUT_S:
                    raise SystemExit(f"check_image_steps: the server did not become healthy, see {log.name}")
            if server.poll() is not None:
                raise SystemExit(f"check_image_steps: the server ended, another one answers on {port}")
            print(f"{time.perf_counter() - started:7.1f} s  HEALTHCHECK succeeds after the start", flush=True)
            _timed(f"{QUESTION} {ANSWER}", lambda: _chat(port))
            print(f"{_resident_bytes(server.pid) / 1e6:7.0f} MB resident", flush=True)
        finally:
            server.send_signal(getattr(signal, stage.stop_signal))
            code = server.wait(60)
    print(f"exit code {code} after {stage.stop_signal}")
    if code != 0:
        raise SystemExit(1)


def _chat(port: int) -> None:
    """Ask what the demo model knows; another model, or one that does not compute right, does not."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200, "temperature": 0}
    )
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body.encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        choice = json.load(answer)["choices"][0]
    if choice["finish_reason"] != "stop" or ANSWER not in choice["message"]["content"]:
        raise SystemExit(f"check_image_steps: {QUESTION} {choice}")


def _timed(label: str, step: object) -> None:
    started = time.perf_counter()
    assert callable(step)
    step()
    print(f"{time.perf_counter() - started:7.1f} s  {label}", flush=True)


def _copy_tree(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", f"{source}/.", str(target)], check=True)


def _resident_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


def _size(folder: Path) -> int:
    output = subprocess.run(["du", "-sxb", str(folder)], check=True, capture_output=True, text=True).stdout
    return int(output.split()[0])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run the cpu image's steps in a chroot.")
    parser.add_argument("--base", type=Path, required=True, help="a debootstrap tree; it is copied")
    parser.add_argument("--work", type=Path, required=True, help="where the stages go; empty or absent")
    parser.add_argument("--target", default="cpu")
    arguments = parser.parse_args(argv)
    if os.geteuid() != 0:
        raise SystemExit("check_image_steps: chroot and mount need root")
    if arguments.work.exists() and any(arguments.work.iterdir()):
        raise SystemExit(f"check_image_steps: {arguments.work} is not empty")
    builder = Builder(arguments.base, arguments.work)
    instructions = parse((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    for stage in stages_for(instructions, arguments.target):
        last = builder.build(*stage)
    base_bytes, image_bytes = _size(arguments.base), _size(last.root)
    program = _size(last.root / "opt/glm53srv")
    print(
        f"{image_bytes / 1e6:7.0f} MB in the image: base tree {base_bytes / 1e6:.0f}, /opt/glm53srv "
        f"{program / 1e6:.0f}, distribution packages {(image_bytes - base_bytes - program) / 1e6:.0f}"
    )
    try_out(last)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
