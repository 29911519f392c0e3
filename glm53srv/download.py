"""Fetches a checkpoint into a directory, and can be ended at any moment and run again.

DIR/.download/<content id>.part   a file under way; named after its content, so that a part of another
                                  revision is never continued
DIR/.download/state.json          the commit whose files lie in DIR
DIR/<name>                        whole and checked; config.json comes last, so that a directory with
                                  config.json holds all of its files
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from glm53srv.errors import DownloadError
from glm53srv.hub import Hub, RemoteFile, Snapshot, TransferBroken
from glm53srv.model_folder import FolderState, has_content, read_state, size_of, write_all, write_state
from glm53srv.progress import Progress
from glm53srv.transfer_rate import GB, TransferRate

logger = logging.getLogger(__name__)

PUBLISHED_REPO = "turboderp/GLM-5.3-Flash-exl3"
PUBLISHED_REVISION = "332ab457b709b7ba30dd9a448be5de03b80a7ac9"
"""The 3.05bpw branch as it was when this server was made for it; its main branch is empty."""

LAST_FILE = "config.json"
WORK_FOLDER = ".download"
NUM_WORKERS = 4
"""Files at a time: one connection to a content network rarely fills a fast line."""

MAX_FAILURES = 6
"""Attempts in a row that bring no new byte before a file is given up: about a minute with the pauses."""

_SPARE_BYTES = 2**28
"""Room that stays free on the disk beyond the files themselves."""


@dataclass(frozen=True, slots=True)
class Source:
    """What to fetch. revision: a commit, branch or tag."""

    repo: str = PUBLISHED_REPO
    revision: str = PUBLISHED_REVISION

    @staticmethod
    def of(repo: str | None, revision: str | None) -> Source:
        """Fill in what was not given: the published model, its pinned commit, main of any other."""
        repo = repo or PUBLISHED_REPO
        return Source(repo, revision or (PUBLISHED_REVISION if repo == PUBLISHED_REPO else "main"))


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result. num_bytes: of all files; fetched_bytes: that came over the network in this run."""

    commit: str
    num_files: int
    num_bytes: int
    fetched_bytes: int


class Downloader:
    """Fetches one source into one directory. Built for one run; fetch() is called once.

    is_verifying: hash large files too, those that were there as well as those that came. pause: waits between
    attempts of a file; seconds. clock: seconds, monotonic. sample_s: between two reports of progress.
    free_bytes: what the file system of a folder has.
    """

    def __init__(
        self,
        hub: Hub,
        folder: Path,
        *,
        is_verifying: bool = False,
        progress: Progress | None = None,
        pause: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sample_s: float = 0.5,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        self._hub = hub
        self._folder = folder
        self._work = folder / WORK_FOLDER
        self._is_verifying = is_verifying
        self._progress = progress or (lambda fraction, stage: None)
        self._is_stopped = threading.Event()
        self._pause = pause or self._is_stopped.wait
        self._clock = clock
        self._sample_s = sample_s
        self._free_bytes = free_bytes

    def fetch(self, source: Source) -> Fetched:
        """Make the directory hold every file of the source, whole.

        Raises DownloadError, one line that says what to do; what has come stays for the next run.
        """
        with self._owned_folder():
            if (known := self._known_whole(source)) is not None:
                return known
            self._progress(0.0, f"asking for {source.repo}")
            snapshot = self._hub.snapshot(source.repo, source.revision)
            wanted = [file for file in snapshot.files if not file.path.startswith(".")]
            if not any(file.path == LAST_FILE for file in wanted):
                raise DownloadError(
                    f"{source.repo} at {source.revision} holds no {LAST_FILE}: it is no model, name another "
                    "GLM53_MODEL_REVISION"
                )
            self._require_same_model(snapshot, wanted)
            self._set_aside_config(wanted)
            missing = self._missing(snapshot, wanted)
            self._require_space(missing)
            sizes = {file.path: file.size for file in wanted}
            write_state(self._work, FolderState(snapshot.repo, snapshot.commit, sizes))
            fetched_bytes = self._fetch_all(snapshot, wanted, missing)
            for left in self._work.glob("*.part"):  # of other revisions
                left.unlink()
            self._progress(1.0, "whole")
        return Fetched(snapshot.commit, len(wanted), sum(file.size for file in wanted), fetched_bytes)

    @contextmanager
    def _owned_folder(self) -> Iterator[None]:
        """Make the folder, and keep other downloads out of it."""
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            lock = (self._work / "lock").open("w")
        except OSError as error:
            raise DownloadError(
                f"{self._folder} cannot be written ({error.strerror}): name a directory you may write with "
                "--model, or mount it writable"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise DownloadError(
                    f"another download into {self._folder} is running: wait for it"
                ) from error
            yield

    def _known_whole(self, source: Source) -> Fetched | None:
        """Tell without the hub that all is there: a machine that has its model starts without a network too.

        Only for a commit; a branch may have moved. None when there is something to ask.
        """
        state = read_state(self._work)
        if (
            self._is_verifying
            or state is None
            or (state.repo, state.commit) != (source.repo, source.revision)
        ):
            return None
        if any(size_of(self._folder / path) != size for path, size in state.sizes.items()):
            return None
        if not (self._folder / LAST_FILE).exists():
            return None
        self._progress(1.0, "whole")
        return Fetched(state.commit, len(state.sizes), sum(state.sizes.values()), 0)

    def _require_same_model(self, snapshot: Snapshot, wanted: list[RemoteFile]) -> None:
        """Refuse a directory that holds something else: completing it would replace somebody's files."""
        state = read_state(self._work)
        if state is not None:
            if state.repo != snapshot.repo:
                raise DownloadError(
                    f"{self._folder} holds {state.repo}, not {snapshot.repo}: name another directory with "
                    "--model"
                )
            return
        config = self._folder / LAST_FILE
        entry = next(file for file in wanted if file.path == LAST_FILE)
        if config.exists() and not has_content(config, entry):
            raise DownloadError(
                f"{self._folder} holds another model than {snapshot.repo}: name another directory with "
                "--model"
            )

    def _set_aside_config(self, wanted: list[RemoteFile]) -> None:
        """Make a directory that is not whole say so: one with config.json counts as complete."""
        config = self._folder / LAST_FILE
        others = [self._folder / file.path for file in wanted if file.path != LAST_FILE]
        if config.exists() and not all(path.exists() for path in others):
            config.unlink()

    def _missing(self, snapshot: Snapshot, wanted: list[RemoteFile]) -> list[RemoteFile]:
        """Give the files that are not there as they should be; wrong ones are removed.

        The right size is enough for a large file that an earlier run brought from the same commit; any other
        file is compared by its hash.
        """
        state = read_state(self._work)
        is_ours = state is not None and (state.repo, state.commit) == (snapshot.repo, snapshot.commit)
        to_hash = [file for file in wanted if self._is_hashed(file, is_ours)]
        rate = TransferRate(sum(file.size for file in to_hash), self._clock)
        num_hashed = 0

        def show(num_bytes: int) -> None:
            nonlocal num_hashed
            num_hashed += num_bytes
            self._progress(0.0, f"checking {rate.text(num_hashed)}")

        missing = []
        for file in wanted:
            path = self._folder / file.path
            if not path.exists():
                missing.append(file)
                continue
            is_hashed = file in to_hash
            if path.stat().st_size != file.size or (is_hashed and not has_content(path, file, show)):
                logger.warning("%s differs from %s: it is fetched again", path, snapshot.repo)
                path.unlink()
                missing.append(file)
        return missing

    def _is_hashed(self, file: RemoteFile, is_ours: bool) -> bool:
        """Tell whether the file as it lies there is hashed; its size alone is always compared."""
        is_there = (self._folder / file.path).exists()
        return is_there and (self._is_verifying or not is_ours or file.sha256 is None)

    def _require_space(self, missing: list[RemoteFile]) -> None:
        needed = sum(file.size - size_of(self._part(file)) for file in missing)
        free = self._free_bytes(self._folder)
        if needed and needed + _SPARE_BYTES > free:
            raise DownloadError(
                f"{self._folder} has {free / GB:.1f} GB free, {(needed + _SPARE_BYTES) / GB:.1f} GB are "
                "needed: free some, or name a directory on another disk with --model"
            )

    def _fetch_all(self, snapshot: Snapshot, wanted: list[RemoteFile], missing: list[RemoteFile]) -> int:
        """Fetch the missing files, config.json after all others; gives the bytes that came."""
        # One place per file, written by its worker alone and summed up here: no lock is needed.
        present = {file.path: size_of(self._part(file)) for file in missing}
        before = sum(present.values())
        total = sum(file.size for file in wanted)
        kept = total - sum(file.size for file in missing)
        rate = TransferRate(total, self._clock)
        shown = 0

        def show() -> None:
            nonlocal shown
            shown = max(shown, kept + sum(present.values()))  # less for a moment when the hub begins anew
            self._progress(min(shown / max(1, total), 0.999), rate.text(shown))

        first = [file for file in missing if file.path != LAST_FILE]
        workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="download")
        try:
            running = {workers.submit(self._fetch_file, snapshot, file, present) for file in first}
            _follow(running, show, self._sample_s)
            for file in missing:
                if file.path == LAST_FILE:
                    self._fetch_file(snapshot, file, present)
        finally:
            self._is_stopped.set()
            workers.shutdown(wait=True, cancel_futures=True)
        show()
        return sum(present.values()) - before

    def _fetch_file(self, snapshot: Snapshot, file: RemoteFile, present: dict[str, int]) -> None:
        """Bring one file, going on after broken connections, check it and put it in its place."""
        part = self._part(file)
        failures = 0
        while size_of(part) < file.size or not part.exists():
            size_before = size_of(part)
            try:
                self._append(snapshot, file, part, present)
                reason = "the hub sent less than the file's size"
            except TransferBroken as error:
                reason = str(error)
            except OSError as error:
                raise DownloadError(
                    f"{part} cannot be written ({error.strerror}): mend that and run the same again to go on"
                ) from error
            if self._is_stopped.is_set():
                raise DownloadError("the download was stopped; run the same again to go on")
            if size_of(part) >= file.size and part.exists():
                break
            failures = 0 if size_of(part) > size_before else failures + 1
            if failures >= MAX_FAILURES:
                raise DownloadError(
                    f"{file.path}: {reason}, {failures} times in a row; run the same again to go on"
                )
            logger.info("%s: %s, going on at %d bytes", file.path, reason, size_of(part))
            self._pause(min(2.0**failures, 16.0))
        self._accept(file, part)

    def _append(self, snapshot: Snapshot, file: RemoteFile, part: Path, present: dict[str, int]) -> None:
        """Write what one request brings. Unbuffered: the file is right at every moment, also at a kill."""
        with part.open("ab", buffering=0) as out:
            for position, chunk in self._hub.read(snapshot, file, out.tell()):
                if position != out.tell():  # the hub began anew
                    out.truncate(position)
                if position + len(chunk) > file.size:
                    out.truncate(0)
                    raise DownloadError(f"{file.path} is longer at the hub than its list of files says")
                write_all(out.fileno(), chunk)
                present[file.path] = position + len(chunk)
                if self._is_stopped.is_set():
                    return

    def _accept(self, file: RemoteFile, part: Path) -> None:
        """Move a whole file to its name. Small files are always hashed, large ones when asked."""
        if (self._is_verifying or file.sha256 is None) and not has_content(part, file):
            part.unlink()
            raise DownloadError(
                f"{file.path} came damaged (its hash is wrong); run the same to fetch it again"
            )
        target = self._folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)

    def _part(self, file: RemoteFile) -> Path:
        """Give the place of a file under way; two files of one content come at the same time, so have two."""
        return self._work / f"{file.identity}.{zlib.crc32(file.path.encode()):08x}.part"


def _follow(running: set[Future[None]], show: Callable[[], None], sample_s: float) -> None:
    """Show progress until all have ended; raises what the first failed one raised."""
    while running:
        done, running = wait(running, timeout=sample_s, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        show()
