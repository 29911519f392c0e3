"""`glm53srv download`, and the fetching that `serve` does when the model directory is empty."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TextIO

from glm53srv.config import Config, load_config
from glm53srv.download import LAST_FILE, Downloader, Source
from glm53srv.flags import take_flags
from glm53srv.hub import Hub
from glm53srv.progress import ProgressLine
from glm53srv.transfer_rate import GB


def download_command(argv: Sequence[str], terminal: TextIO) -> str:
    """Fetch, or complete, the model of the configuration; gives one line for standard output.

    argv: options, and --verify. terminal: for the progress line. Raises ConfigError and DownloadError.
    """
    rest, flags = take_flags(argv, {}, switches=("--verify",))
    return fetch(load_config(rest), terminal, is_verifying="--verify" in flags)


def fetch_if_missing(config: Config, terminal: TextIO) -> str | None:
    """Fetch the model before serving, if the directory has none and the configuration says where from.

    This happens before the port opens: the checks that end a hopeless start in one line need the files. Gives
    what was done, None for nothing.
    """
    if (config.engine.model_dir / LAST_FILE).exists():
        return None
    if config.download.repo is None or not config.download.is_allowed:
        return None
    return fetch(config, terminal, is_verifying=False)


def fetch(config: Config, terminal: TextIO, *, is_verifying: bool) -> str:
    """Fetch, and give one line about it. Raises DownloadError."""
    source = Source.of(config.download.repo, config.download.revision)
    folder = config.engine.model_dir
    progress = ProgressLine(terminal, label="downloading")
    fetched = Downloader(Hub(), folder, is_verifying=is_verifying, progress=progress).fetch(source)
    return (
        f"{folder}: {fetched.num_files} files, {fetched.num_bytes / GB:.2f} GB of {source.repo} at "
        f"{fetched.commit[:12]}, {fetched.fetched_bytes / GB:.2f} GB fetched"
    )


def end_at_signals(exit_now: Callable[[int], None] = os._exit) -> None:
    """Let SIGTERM and SIGINT end the process at once, until the event loop takes them over.

    The first process of a container ignores both unless it asks for them. Nothing needs tidying: a part of a
    file is right at every moment, and the kernel lets go of lock and sockets.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        os.write(sys.stderr.fileno(), f"\nglm53srv: ended by {signal.Signals(number).name}\n".encode())
        exit_now(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
