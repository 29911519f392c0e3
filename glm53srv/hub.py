"""The model hub: what a repository holds, and the bytes of one file from any position.

huggingface_hub does names, tokens, endpoints, proxies and error codes. The bytes are read here, over its HTTP
session, because its own download (2.4) throws away the part of a file that it has when the process ends: of
fifteen shards of 8 GB that is up to 8 GB for each one under way.

huggingface_hub is part of the base install because tokenizers brings it anyway. It takes 0.3 s to import
(2-core EPYC VM, 29 November 2026), so nothing imports it before something must be fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

from glm53srv.errors import DownloadError

TIMEOUT_S = 30.0
"""Longest silence of the hub, in connecting and between two pieces of a file."""

_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP status codes after which the same request may succeed."""


class TransferBroken(Exception):
    """The connection ended early, or the hub is busy: asking again may help. The text is the reason."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository. size: bytes. sha256: of large files; git_sha1: git's name of small ones."""

    path: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None

    @property
    def identity(self) -> str:
        """Name of the content, the same in every revision that holds it."""
        return self.sha256 or self.git_sha1 or ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All files of one commit, in the hub's order."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size for file in self.files)


class Hub:
    """One hub. Any thread may call it.

    endpoint: base URL; None: HF_ENDPOINT, or huggingface.co. token: None: HF_TOKEN, or that of
    `hf auth login`.
    """

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        from huggingface_hub import HfApi

        self._api = HfApi(endpoint=endpoint, token=token)
        self._token = token

    @property
    def endpoint(self) -> str:
        """Base URL."""
        return str(self._api.endpoint)

    def snapshot(self, repo: str, revision: str) -> Snapshot:
        """List the files of a revision. Raises DownloadError."""
        import httpx2

        try:
            with self._refusals(repo, revision):
                info = self._api.model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
        except httpx2.TransportError as error:
            raise DownloadError(
                f"cannot reach {self.endpoint} ({_reason(error)}): check network and proxy (HTTPS_PROXY), or "
                "put the model's files into the directory yourself"
            ) from error
        files = []
        for item in info.siblings or ():
            if item.size is None or (item.lfs is None and item.blob_id is None):
                raise DownloadError(f"{self.endpoint} does not say the size of {item.rfilename} in {repo}")
            if not is_plain_path(item.rfilename):
                raise DownloadError(f"{repo} holds a file with the name {item.rfilename!r}: refused")
            sha256 = None if item.lfs is None else item.lfs.sha256
            files.append(RemoteFile(item.rfilename, item.size, sha256, None if sha256 else item.blob_id))
        return Snapshot(repo, info.sha or revision, tuple(files))

    def read(self, snapshot: Snapshot, file: RemoteFile, offset: int) -> Iterator[tuple[int, bytes]]:
        """Yield (position, bytes) of a file from `offset` on; from 0 if the hub does not do ranges.

        Raises TransferBroken when the connection ends early, DownloadError when asking again is of no use.
        """
        import httpx2
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, but not re-exported
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        url = hf_hub_url(snapshot.repo, file.path, revision=snapshot.commit, endpoint=self.endpoint)
        # Compressed bytes have no positions to go on from.
        headers = {**build_hf_headers(token=self._token), "accept-encoding": "identity"}
        if offset:
            headers["range"] = f"bytes={offset}-"
        try:
            with (
                self._refusals(snapshot.repo, snapshot.commit),
                get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response,
            ):
                if response.status_code == 416:
                    raise TransferBroken(f"the hub's file ends at {offset} of {file.size} bytes")
                if response.status_code in _RETRIED:
                    raise TransferBroken(f"HTTP {response.status_code}")
                hf_raise_for_status(response)
                position = offset if response.status_code == 206 else 0
                for chunk in response.iter_bytes():  # as it comes: nothing is held back, and lost at a break
                    yield position, chunk
                    position += len(chunk)
        except httpx2.TransportError as error:
            raise TransferBroken(_reason(error)) from error

    @contextmanager
    def _refusals(self, repo: str, revision: str) -> Iterator[None]:
        """Turn what the hub refuses, in the library's errors, into one line each."""
        from huggingface_hub import errors

        try:
            yield
        except errors.HFValidationError as error:
            raise DownloadError(f"{repo!r} is no repository name: it must be OWNER/NAME") from error
        except errors.OfflineModeIsEnabled as error:
            raise DownloadError(f"{repo} cannot be fetched while HF_HUB_OFFLINE is set: unset it") from error
        except errors.GatedRepoError as error:
            raise DownloadError(
                f"{repo} is gated: accept its terms on the hub's page, and give a token in HF_TOKEN"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise DownloadError(f"{repo} has no revision {revision}: check GLM53_MODEL_REVISION") from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            raise DownloadError(f"{self.endpoint}: {_refusal(repo, status)}") from error


def is_plain_path(path: str) -> bool:
    """Tell whether a file name of a repository stays inside the directory it is laid into."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\\" not in path


def _refusal(repo: str, status: int) -> str:
    if status == 401:
        return f"no repository {repo}, or not for you (HTTP 401): check its name, or give a token in HF_TOKEN"
    if status == 403:
        return f"the token may not read {repo} (HTTP 403): give another one in HF_TOKEN"
    if status == 404:
        return f"{repo} or one of its files is not there (HTTP 404): check GLM53_MODEL_REPO"
    if status == 429:
        return f"too many requests for {repo} (HTTP 429): wait some minutes and run the same again"
    return f"the hub failed for {repo} (HTTP {status}): run the same again later"


def _reason(error: Exception) -> str:
    """Give an error's text on one line, or its name when it has none."""
    return " ".join(str(error).split()) or type(error).__name__
