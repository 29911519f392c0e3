"""A `glm53srv serve` process on a free port, and what it printed."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

READY = re.compile(r"ready .*url=(https?://[^\s;]+)")
LISTENING = re.compile(r"listening .*url=(https?://[^\s;]+)")
START_TIMEOUT_S = 60.0


class ServerProcess:
    """Starts the server and reads its lines in a thread; a context manager that ends it with SIGTERM."""

    def __init__(self, model_dir: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        command = [
            sys.executable,
            "-m",
            "glm53srv",
            "serve",
            "--model",
            str(model_dir),
            "--port",
            "0",
            *arguments,
        ]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GLM53_")}
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.output: list[str] = []
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**inherited, **(environ or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_for(self, pattern: re.Pattern[str], timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        """Read on until a line matches.

        Raises AssertionError with the whole output when the process ends first.
        """
        while True:
            line = self._lines.get(timeout=timeout_s)
            if line is None:
                raise AssertionError(
                    f"no line matches {pattern.pattern!r}; output was:\n{''.join(self.output)}"
                )
            if found := pattern.search(line):
                return found

    def wait_for_text(self, text: str) -> None:
        """Read on until a line holds this text."""
        self.wait_for(re.compile(re.escape(text)))

    def url_when_listening(self) -> str:
        """Base URL, as soon as the port is open; the model may still be loading."""
        return self.wait_for(LISTENING)[1]

    def url_when_ready(self) -> str:
        """Base URL, once the model is loaded."""
        return self.wait_for(READY)[1]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Exit code, once the process has ended and all its lines are read."""
        code = self.process.wait(timeout=timeout_s)
        self._reader.join(timeout=timeout_s)
        return code

    def stop(self) -> int:
        """End the process with SIGTERM, or with SIGKILL if that takes too long; closes the pipe."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.wait()
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            self._lines.put(line)
        self._lines.put(None)
