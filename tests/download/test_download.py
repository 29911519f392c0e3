"""Fetching from a hub that breaks off, lies, refuses or is not there; always to be run again."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glm53srv.download import MAX_FAILURES, PUBLISHED_REVISION, Downloader, Fetched, Source
from glm53srv.errors import DownloadError
from glm53srv.hub import Hub, is_plain_path
from glm53srv.progress import Progress
from tests.download.hub_stand_in import COMMIT, REPO, Fault, HubStandIn, Refusal

SHARD = random.Random(1).randbytes(700_001)
FILES = {
    ".gitattributes": b"*.safetensors filter=lfs",
    "config.json": b'{"model_type": "glm5_next"}',
    "model-00001.safetensors": SHARD,
    "model-00002.safetensors": SHARD[::-1],
    "notes/empty.txt": b"",
    "twin.safetensors": SHARD,
}
SHARD_NAME = "model-00001.safetensors"
SOURCE = Source(REPO, "main")


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    with HubStandIn(dict(FILES)) as stand_in:
        yield stand_in


def run(
    hub: HubStandIn,
    folder: Path,
    *,
    is_verifying: bool = False,
    pauses: list[float] | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    free_bytes: Callable[[Path], int] = lambda folder: 10**12,
    source: Source = SOURCE,
) -> Fetched:
    downloader = Downloader(
        Hub(hub.url),
        folder,
        is_verifying=is_verifying,
        progress=progress,
        pause=([] if pauses is None else pauses).append,
        clock=clock,
        sample_s=0.01,
        free_bytes=free_bytes,
    )
    return downloader.fetch(source)


def laid(folder: Path) -> dict[str, bytes]:
    """Give the files of a model directory, without the work folder."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".download" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


WANTED = {name: data for name, data in FILES.items() if not name.startswith(".")}


def test_every_file_comes_and_config_json_comes_last(hub: HubStandIn, tmp_path: Path) -> None:
    fetched = run(hub, tmp_path / "new" / "model")
    assert laid(tmp_path / "new" / "model") == WANTED
    assert fetched == Fetched(COMMIT, 5, sum(map(len, WANTED.values())), sum(map(len, WANTED.values())))
    assert hub.requests[-1] == ("config.json", None)
    assert {name for name, _ in hub.requests} == set(WANTED)


def test_a_second_run_fetches_nothing(hub: HubStandIn, tmp_path: Path) -> None:
    run(hub, tmp_path)
    hub.requests.clear()
    assert run(hub, tmp_path).fetched_bytes == 0
    assert hub.requests == []


def test_a_pinned_model_that_is_whole_needs_no_hub(hub: HubStandIn, tmp_path: Path) -> None:
    pinned = Source(REPO, COMMIT)
    first = run(hub, tmp_path, source=pinned)
    num_answers = hub.num_answers
    again = run(hub, tmp_path, source=pinned)
    assert (again.num_files, again.num_bytes, again.fetched_bytes) == (first.num_files, first.num_bytes, 0)
    assert hub.num_answers == num_answers
    (tmp_path / SHARD_NAME).write_bytes(SHARD[:-1])
    assert run(hub, tmp_path, source=pinned).fetched_bytes == len(SHARD)  # a short file is noticed and mended
    assert laid(tmp_path) == WANTED


def test_a_branch_is_always_asked_for(hub: HubStandIn, tmp_path: Path) -> None:
    run(hub, tmp_path)
    num_answers = hub.num_answers
    run(hub, tmp_path)
    assert hub.num_answers == num_answers + 1


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_broken_connection_goes_on_where_it_broke(hub: HubStandIn, tmp_path: Path, is_reset: bool) -> None:
    hub.faults[SHARD_NAME] = [Fault(cut_at=300_000, is_reset=is_reset), Fault(status=503)]
    pauses: list[float] = []
    run(hub, tmp_path, pauses=pauses)
    assert laid(tmp_path) == WANTED
    ranges = [wanted for name, wanted in hub.requests if name == SHARD_NAME]
    assert ranges[0] is None
    if not is_reset:  # a reset may discard what the client has not read yet
        assert ranges[1:] == ["bytes=300000-", "bytes=300000-"]
        assert pauses == [1.0, 2.0]


def test_the_next_run_goes_on_where_the_last_one_gave_up(hub: HubStandIn, tmp_path: Path) -> None:
    hub.faults[SHARD_NAME] = [Fault(cut_at=300_000), *[Fault(status=503)] * MAX_FAILURES]
    pauses: list[float] = []
    with pytest.raises(DownloadError, match=r"HTTP 503, 6 times in a row; run the same again to go on"):
        run(hub, tmp_path, pauses=pauses)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 16.0]
    assert not (tmp_path / "config.json").exists()
    hub.requests.clear()
    fetched = run(hub, tmp_path)
    assert laid(tmp_path) == WANTED
    assert (SHARD_NAME, "bytes=300000-") in hub.requests
    assert fetched.fetched_bytes >= len(SHARD) - 300_000 + len(FILES["config.json"])
    assert fetched.fetched_bytes < sum(map(len, WANTED.values()))


def test_a_hub_without_ranges_starts_the_file_anew(hub: HubStandIn, tmp_path: Path) -> None:
    hub.faults[SHARD_NAME] = [Fault(cut_at=300_000), Fault(ignores_range=True)]
    run(hub, tmp_path)
    assert laid(tmp_path) == WANTED


def test_a_file_longer_than_its_list_entry_is_refused(hub: HubStandIn, tmp_path: Path) -> None:
    hub.faults[SHARD_NAME] = [Fault(body=SHARD + b"x")]
    with pytest.raises(DownloadError, match="longer at the hub than its list of files says"):
        run(hub, tmp_path)
    assert SHARD_NAME not in laid(tmp_path)


def test_a_file_shorter_than_its_list_entry_is_given_up(hub: HubStandIn, tmp_path: Path) -> None:
    hub.sizes[SHARD_NAME] = len(SHARD) + 5
    with pytest.raises(DownloadError, match="file ends at 700001 of 700006 bytes, 6 times in a row"):
        run(hub, tmp_path)
    assert SHARD_NAME not in laid(tmp_path)


def test_a_damaged_small_file_is_noticed_without_asking(hub: HubStandIn, tmp_path: Path) -> None:
    hub.faults["config.json"] = [Fault(body=FILES["config.json"].replace(b"glm5", b"glm6"))]
    with pytest.raises(DownloadError, match=r"config\.json came damaged"):
        run(hub, tmp_path)
    run(hub, tmp_path)
    assert laid(tmp_path) == WANTED


def test_verify_notices_a_damaged_large_file(hub: HubStandIn, tmp_path: Path) -> None:
    hub.faults[SHARD_NAME] = [Fault(body=bytes([SHARD[0] ^ 1]) + SHARD[1:])]
    with pytest.raises(DownloadError, match=f"{SHARD_NAME} came damaged"):
        run(hub, tmp_path, is_verifying=True)
    run(hub, tmp_path, is_verifying=True)
    assert laid(tmp_path) == WANTED


def test_verify_fetches_again_what_was_damaged_on_disk(hub: HubStandIn, tmp_path: Path) -> None:
    run(hub, tmp_path)
    shard = tmp_path / SHARD_NAME
    shard.write_bytes(SHARD[:-1] + bytes([SHARD[-1] ^ 1]))
    assert run(hub, tmp_path).fetched_bytes == 0  # the size is right: only --verify looks further
    assert run(hub, tmp_path, is_verifying=True).fetched_bytes == len(SHARD)
    assert laid(tmp_path) == WANTED


def test_files_of_another_commit_are_compared_by_hash(hub: HubStandIn, tmp_path: Path) -> None:
    run(hub, tmp_path)
    changed = bytes(reversed(SHARD[:10])) + SHARD[10:]
    hub.files = {**FILES, SHARD_NAME: changed}
    hub.commit = "d" * 40
    fetched = run(hub, tmp_path)
    assert fetched.fetched_bytes == len(SHARD)  # the other shards are the same in both commits
    assert laid(tmp_path)[SHARD_NAME] == changed


def test_a_part_of_another_commit_is_not_continued(hub: HubStandIn, tmp_path: Path) -> None:
    hub.faults[SHARD_NAME] = [Fault(cut_at=300_000), *[Fault(status=503)] * MAX_FAILURES]
    with pytest.raises(DownloadError):
        run(hub, tmp_path)
    hub.files = {**FILES, SHARD_NAME: SHARD[::-1] + b"!"}
    hub.commit = "d" * 40
    run(hub, tmp_path)
    assert laid(tmp_path)[SHARD_NAME] == SHARD[::-1] + b"!"
    assert list((tmp_path / ".download").glob("*.part")) == []


def test_a_directory_that_lost_a_shard_is_not_complete_until_it_is_back(
    hub: HubStandIn, tmp_path: Path
) -> None:
    run(hub, tmp_path)
    (tmp_path / SHARD_NAME).unlink()
    hub.faults[SHARD_NAME] = [Fault(status=503)] * MAX_FAILURES
    with pytest.raises(DownloadError):
        run(hub, tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_a_directory_with_another_model_is_left_alone(hub: HubStandIn, tmp_path: Path) -> None:
    mine = {"config.json": b"{}", "tokenizer.json": b"mine"}
    for name, data in mine.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DownloadError, match="holds another model than maker/model: name another directory"):
        run(hub, tmp_path)
    assert laid(tmp_path) == mine


def test_a_directory_of_another_repository_is_left_alone(hub: HubStandIn, tmp_path: Path) -> None:
    run(hub, tmp_path)
    state = tmp_path / ".download" / "state.json"
    state.write_text(state.read_text().replace(REPO, "other/model"))
    with pytest.raises(DownloadError, match="holds other/model, not maker/model"):
        run(hub, tmp_path)
    assert laid(tmp_path) == WANTED


def test_files_that_came_by_other_means_are_hashed_and_kept(hub: HubStandIn, tmp_path: Path) -> None:
    for name in ("config.json", SHARD_NAME):
        (tmp_path / name).write_bytes(WANTED[name])
    (tmp_path / "twin.safetensors").write_bytes(SHARD[::-1])
    shown: list[str] = []
    fetched = run(hub, tmp_path, progress=lambda fraction, stage: shown.append(stage))
    assert laid(tmp_path) == WANTED
    wrong_and_missing = ("twin.safetensors", "model-00002.safetensors", "config.json")
    assert fetched.fetched_bytes == sum(len(WANTED[name]) for name in wrong_and_missing)
    assert any(stage.startswith("checking 0.00 of 0.00 GB") for stage in shown)


def test_too_little_space_is_said_before_anything_comes(hub: HubStandIn, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"has 0\.2 GB free, 0\.3 GB are needed: free some"):
        run(hub, tmp_path, free_bytes=lambda folder: 200_000_000)
    assert hub.requests == []


def test_a_disk_that_fills_up_is_one_line(hub: HubStandIn, tmp_path: Path) -> None:
    hub.faults[SHARD_NAME] = [Fault(cut_at=300_000), *[Fault(status=503)] * MAX_FAILURES]
    with pytest.raises(DownloadError):
        run(hub, tmp_path)
    part = next(path for path in (tmp_path / ".download").glob("*.part") if path.stat().st_size == 300_000)
    part.unlink()
    part.symlink_to("/dev/full")
    with pytest.raises(DownloadError, match=os.strerror(errno.ENOSPC)):
        run(hub, tmp_path)


def test_a_directory_that_cannot_be_written_is_one_line(hub: HubStandIn, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match=r"cannot be written \(Not a directory\): name a directory"):
        run(hub, tmp_path / "file" / "model")


def test_two_downloads_do_not_share_a_directory(hub: HubStandIn, tmp_path: Path) -> None:
    (tmp_path / ".download").mkdir()
    with (tmp_path / ".download" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with pytest.raises(DownloadError, match=r"another download into .* is running"):
            run(hub, tmp_path)


def test_a_hub_out_of_reach_is_one_line(hub: HubStandIn, tmp_path: Path) -> None:
    with HubStandIn({}) as gone:
        pass
    with pytest.raises(DownloadError, match=r"cannot reach http://127.0.0.1:\d+ .*refused.*HTTPS_PROXY"):
        run(gone, tmp_path)


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        (Refusal(401), r"no repository maker/model, or not for you \(HTTP 401\): .*HF_TOKEN"),
        (Refusal(401, "RepoNotFound"), r"no repository maker/model, or not for you \(HTTP 401\)"),
        (Refusal(401, "GatedRepo"), "maker/model is gated: accept its terms"),
        (Refusal(403), r"the token may not read maker/model \(HTTP 403\)"),
        (Refusal(404, "RepoNotFound"), r"is not there \(HTTP 404\): check GLM53_MODEL_REPO"),
        (Refusal(404, "RevisionNotFound"), "has no revision main: check GLM53_MODEL_REVISION"),
        (Refusal(429), r"too many requests for maker/model \(HTTP 429\)"),
        (Refusal(500), r"the hub failed for maker/model \(HTTP 500\)"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    hub: HubStandIn, tmp_path: Path, refusal: Refusal, text: str
) -> None:
    hub.refusal = refusal
    with pytest.raises(DownloadError, match=text) as caught:
        run(hub, tmp_path)
    assert "\n" not in str(caught.value)


def test_the_token_goes_with_every_request(hub: HubStandIn, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    with pytest.raises(DownloadError, match="HTTP 401"):
        Downloader(Hub(hub.url, token="hf_wrong"), tmp_path).fetch(SOURCE)
    Downloader(Hub(hub.url, token="hf_secret"), tmp_path).fetch(SOURCE)
    assert laid(tmp_path) == WANTED


def test_a_file_that_the_hub_refuses_is_not_asked_for_again(hub: HubStandIn, tmp_path: Path) -> None:
    hub.faults[SHARD_NAME] = [Fault(status=404)]
    with pytest.raises(DownloadError, match=r"or one of its files is not there"):
        run(hub, tmp_path)
    assert [name for name, _ in hub.requests].count(SHARD_NAME) == 1


def test_a_repository_without_a_model_is_refused(hub: HubStandIn, tmp_path: Path) -> None:
    hub.files = {"README.md": b"empty branch"}
    with pytest.raises(DownloadError, match=r"holds no config\.json: it is no model"):
        run(hub, tmp_path)


def test_a_name_that_leaves_the_directory_is_refused(hub: HubStandIn, tmp_path: Path) -> None:
    hub.files = {**FILES, "../outside": b"x"}
    with pytest.raises(DownloadError, match=r"'\.\./outside': refused"):
        run(hub, tmp_path / "model")
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("name", ["a", "a/b.txt", "..a"])
def test_plain_names(name: str) -> None:
    assert is_plain_path(name)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "a/../../b", "..", "a\\b"])
def test_names_that_are_not_plain(name: str) -> None:
    assert not is_plain_path(name)


def test_a_wrong_repository_name_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="is no repository name: it must be OWNER/NAME"):
        Downloader(Hub("http://127.0.0.1:9"), tmp_path).fetch(Source("no spaces/in it", "main"))


def test_the_published_revision_is_pinned_and_another_repository_has_main() -> None:
    assert Source.of(None, None).revision == PUBLISHED_REVISION
    assert Source.of("a/b", None).revision == "main"
    assert Source.of(None, "2.05bpw").revision == "2.05bpw"


def test_progress_never_falls_and_ends_at_one(hub: HubStandIn, tmp_path: Path) -> None:
    """The hub begins anew in the middle of a file, and is held up each time until progress was looked at."""
    hub.files = {"config.json": b"{}", SHARD_NAME: SHARD}
    looked = [threading.Event(), threading.Event()]
    hub.faults[SHARD_NAME] = [
        Fault(cut_at=300_000, hold=looked[0]),
        Fault(ignores_range=True, cut_at=100_000, hold=looked[1]),
    ]
    shown: list[tuple[float, str]] = []

    def look(fraction: float, stage: str) -> None:
        shown.append((fraction, stage))
        if fraction > 0.3:
            looked[0].set()
        if len(hub.requests) == 2:
            parts = (tmp_path / ".download").glob("*.part")
            if any(part.stat().st_size == 100_000 for part in parts):
                looked[1].set()

    run(hub, tmp_path, progress=look)
    assert all(event.is_set() for event in looked)
    fractions = [fraction for fraction, _ in shown]
    assert fractions == sorted(fractions)
    assert shown[-1] == (1.0, "whole")
    assert shown[-2][1].startswith("0.00 of 0.00 GB")
