"""The crew behind Python: sums, counts, faults and options. The protocol itself is tested in C."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from glm53srv.errors import EngineError, MachineError
from glm53srv.kernels import Clamp, Isa, KernelPool, Precision
from glm53srv.native_library import open_library
from glm53srv.offload.device import mailbox as places
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.crew import Crew, CrewOptions
from glm53srv.offload.device.mailbox import Mailbox, MailboxShape

HEADER = Path(__file__).parents[2] / "native" / "include" / "glm53_kernels.h"
HIDDEN, TOP_K, ROWS = 256, 4, 4
PATIENT_MS = 60_000


def make_mailbox(first_seq: int = 1, num_cells: int = 8) -> Mailbox:
    return Mailbox(MailboxShape(ROWS, TOP_K, HIDDEN, num_cells, first_seq))


@pytest.fixture(params=list(Precision), ids=lambda precision: precision.name)
def precision(request: pytest.FixtureRequest) -> Precision:
    chosen: Precision = request.param
    return chosen


@pytest.fixture
def mailbox() -> Mailbox:
    return make_mailbox(first_seq=2**32 - 20)  # the numbers wrap on the way


@pytest.fixture
def crew(arena: ExpertArena, mailbox: Mailbox, precision: Precision) -> Iterator[Crew]:
    options = CrewOptions(2, precision=precision, limit=10.0, deadline_ms=PATIENT_MS)
    with Crew(arena, mailbox, options) as made:
        yield made


def random_job(
    rng: np.random.Generator, arena: ExpertArena
) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    rows = int(rng.integers(1, ROWS + 1))
    x = rng.normal(size=(rows, HIDDEN)).astype(np.float32)
    picks = rng.integers(-1, arena.geometry.num_experts, (rows, TOP_K), dtype=np.int32)
    weights = rng.uniform(size=(rows, TOP_K)).astype(np.float32)
    return int(rng.integers(arena.geometry.num_layers)), x, picks, weights


def test_sums_are_those_of_the_pool_bit_for_bit(
    arena: ExpertArena, crew: Crew, mailbox: Mailbox, precision: Precision
) -> None:
    rng = np.random.default_rng(1)
    tables = [arena.table(layer) for layer in range(arena.geometry.num_layers)]
    num_experts = 0
    with KernelPool(1) as pool:
        for _ in range(100):
            layer, x, picks, weights = random_job(rng, arena)
            expected = pool.experts(x, tables[layer], picks, weights, 10.0, Clamp.ACTIVATION, precision)
            seq = crew.post(layer, x, picks, weights)
            np.testing.assert_array_equal(crew.wait(seq, len(x)), expected)
            distinct = len(np.unique(picks[picks >= 0]))
            assert mailbox.answer(seq).num_experts == distinct
            num_experts += distinct
    stats = crew.stats()
    assert (stats.num_jobs, stats.num_experts) == (100, num_experts)
    assert 0 < stats.ms_per_expert == stats.busy_ms / num_experts


def test_a_job_without_picks_gives_zeros_and_is_counted(arena: ExpertArena) -> None:
    mailbox = make_mailbox()
    with Crew(arena, mailbox, CrewOptions(1, deadline_ms=PATIENT_MS)) as crew:
        mailbox.partial(1, 2)[:] = np.nan
        x, picks = np.ones((2, HIDDEN), np.float32), np.full((2, TOP_K), -1, np.int32)
        seq = crew.post(0, x, picks, np.ones((2, TOP_K), np.float32))
        assert not crew.wait(seq, 2).any()
        assert (crew.stats().num_jobs, crew.stats().num_empty, crew.stats().ms_per_expert) == (1, 1, 0.0)


def test_jobs_under_way_up_to_the_number_of_cells(arena: ExpertArena) -> None:
    rng = np.random.default_rng(2)
    jobs = [random_job(rng, arena) for _ in range(8)]
    mailbox = make_mailbox()
    options = CrewOptions(1, precision=Precision.EXACT32, deadline_ms=PATIENT_MS)
    with Crew(arena, mailbox, options) as crew, KernelPool(1) as pool:
        numbers = [crew.post(*job) for job in jobs]
        for seq, (layer, x, picks, weights) in zip(numbers, jobs, strict=True):
            expected = pool.experts(x, arena.table(layer), picks, weights, 0.0)
            np.testing.assert_array_equal(crew.wait(seq, len(x)), expected)


@pytest.mark.parametrize("wrong", ["rows", "hidden", "picks"])
def test_a_job_of_the_wrong_shape_is_refused(arena: ExpertArena, wrong: str) -> None:
    x = np.ones((ROWS + (wrong == "rows"), HIDDEN + 128 * (wrong == "hidden")), np.float32)
    picks = np.zeros((len(x), TOP_K), np.int32)
    weights = np.ones((len(x), TOP_K - (wrong == "picks")), np.float32)
    with (
        Crew(arena, make_mailbox(), CrewOptions(1)) as crew,
        pytest.raises(ValueError, match=r"do(es)? not fit"),
    ):
        crew.post(0, x, picks, weights)


def test_an_expert_that_does_not_exist_fails_the_step(arena: ExpertArena) -> None:
    x, weights = np.ones((1, HIDDEN), np.float32), np.ones((1, 1), np.float32)
    with Crew(arena, make_mailbox(), CrewOptions(1, deadline_ms=PATIENT_MS)) as crew:
        crew.check()
        seq = crew.post(0, x, np.full((1, 1), 32, np.int32), weights)
        with pytest.raises(EngineError, match="refused job 1: a pick is neither"):
            crew.wait(seq, 1)
        with pytest.raises(EngineError, match="a pick is neither"):
            crew.check()


def test_a_stalled_worker_is_an_error_in_under_two_seconds(arena: ExpertArena) -> None:
    ffi = open_library().ffi
    released = threading.Event()

    @ffi.callback("int32_t(void *, const glm53_expert_job *)")  # type: ignore[untyped-decorator]  # cffi
    def stall(context: object, job: object) -> int:
        released.wait()
        return 0

    crew = Crew(arena, make_mailbox(), CrewOptions(2, deadline_ms=1000), compute=stall)
    x, weights = np.ones((1, HIDDEN), np.float32), np.ones((1, 1), np.float32)
    begin_s = time.monotonic()
    seq = crew.post(0, x, np.zeros((1, 1), np.int32), weights)
    with pytest.raises(EngineError, match="did not answer job 1 within 1000 ms: a thread hangs"):
        crew.wait(seq, 1)
    with pytest.raises(EngineError, match="did not answer"):
        crew.check()
    assert time.monotonic() - begin_s < 2.0
    released.set()
    crew.close()


def test_close_is_idempotent_and_ends_the_crew(arena: ExpertArena) -> None:
    crew = Crew(arena, make_mailbox(), CrewOptions(3))
    crew.close()
    crew.close()
    with pytest.raises(ValueError, match="closed"):
        crew.ring()


def count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_crew_that_nobody_holds_ends_its_threads_before_their_memory_goes(arena: ExpertArena) -> None:
    before = count_threads()
    crew = Crew(arena, make_mailbox(), CrewOptions(3, poll_us=10_000_000))
    crew.ring()
    assert count_threads() > before
    del crew
    assert count_threads() == before


def test_a_process_may_end_without_closing_its_crew(random_model_dir: Path) -> None:
    code = """
import sys
from pathlib import Path
from glm53srv.machine import read_machine
from glm53srv.model.checkpoint import Checkpoint
from glm53srv.model.config import load_model_config
from glm53srv.offload.device.arena import ExpertArena
from glm53srv.offload.device.crew import Crew, CrewOptions
from glm53srv.offload.device.mailbox import Mailbox, MailboxShape

folder = Path(sys.argv[1])
config = load_model_config(folder)
arena = ExpertArena.load(Checkpoint(folder), config, read_machine())
crew = Crew(arena, Mailbox(MailboxShape(4, 8, config.hidden_size)), CrewOptions(2, poll_us=10_000_000))
crew.ring()
"""
    command = [sys.executable, "-c", code, str(random_model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_are_pinned_to_the_given_cpus(arena: ExpertArena) -> None:
    with Crew(arena, make_mailbox(), CrewOptions(3, cpus=(0,))) as crew:
        assert crew.num_pinned == 3


def test_missing_instruction_set_is_a_machine_error(arena: ExpertArena) -> None:
    missing = [isa for isa in Isa if isa is not Isa.AUTO and not _offers(isa)]
    if not missing:
        pytest.skip("this CPU and build have every instruction set")
    with pytest.raises(MachineError, match="cannot start 1 CPU workers: this CPU or this build lacks"):
        Crew(arena, make_mailbox(), CrewOptions(1, isa=missing[0]))


def test_impossible_mailboxes_are_refused() -> None:
    for shape in (
        MailboxShape(9, 4, 256),
        MailboxShape(4, 4, 200),
        MailboxShape(4, 65, 256),
        MailboxShape(4, 4, 256, 6),
    ):
        with pytest.raises(ValueError, match="impossible mailbox"):
            Mailbox(shape)


def test_places_are_those_of_the_header() -> None:
    stated = dict(re.findall(r"GLM53_MAIL_(\w+) = (\d+)", HEADER.read_text()))
    answer = ("DONE", "STATUS", "NUM_EXPERTS", "ELAPSED_NS", "NUM_BLOCKS")
    job = ("POSTED", "LAYER", "ROWS", "NUM_PICKS", "X_KIND", "PART_EXPERT", "PART_BLOCKS", "PICKS")
    for name in ("HEADER_BYTES", *answer, *job):
        assert getattr(places, name) == int(stated[name]), name
    assert set(stated) == {"HEADER_BYTES", *answer, *job}


def _offers(isa: Isa) -> bool:
    return isa in open_library().features().isas


@pytest.mark.parametrize("rows", [1, 9, 33])
def test_an_errand_has_the_kernels_sums(
    arena: ExpertArena, crew: Crew, precision: Precision, rows: int
) -> None:
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, HIDDEN)).astype(np.float32)
    picks = rng.integers(-1, arena.geometry.num_experts, (rows, TOP_K), dtype=np.int32)
    weights = rng.uniform(size=(rows, TOP_K)).astype(np.float32)
    sums = np.empty_like(x)
    crew.begin(1, x, picks, weights, sums)
    with pytest.raises(ValueError, match="already"):
        crew.begin(1, x, picks, weights, sums)
    elapsed_ms = crew.finish()
    with KernelPool(1) as pool:
        expected = pool.experts(x, arena.table(1), picks, weights, 10.0, Clamp.ACTIVATION, precision)
    assert np.array_equal(sums, expected)
    assert elapsed_ms > 0
    layer, x, picks, weights = random_job(rng, arena)
    assert crew.wait(crew.post(layer, x, picks, weights), len(x)).shape == x.shape  # mail goes on


def test_impossible_errands_are_refused(arena: ExpertArena, crew: Crew) -> None:
    x, weights = np.zeros((2, HIDDEN), np.float32), np.ones((2, TOP_K), np.float32)
    picks, sums = np.zeros((2, TOP_K), np.int32), np.empty_like(x)
    with pytest.raises(ValueError, match="no errand"):
        crew.finish()
    with pytest.raises(ValueError, match="rows with"):
        crew.begin(0, x[:, :-1], picks, weights, sums)
    with pytest.raises(ValueError, match="do not fit"):
        crew.begin(0, x, picks[:1], weights, sums)
    with pytest.raises(EngineError, match="refused an errand"):
        crew.begin(99, x, picks, weights, sums)
    crew.begin(0, x, np.full_like(picks, arena.geometry.num_experts), weights, sums)
    with pytest.raises(EngineError, match="refused an errand"):
        crew.finish()
    with pytest.raises(ValueError, match="contiguous"):
        crew.begin(0, x, picks.astype(np.int64), weights, sums)
    with pytest.raises(ValueError, match="contiguous"):
        crew.begin(0, np.asfortranarray(x), picks, weights, sums)
    crew.begin(0, x, picks, weights, sums)
    assert crew.finish() > 0


def test_a_crew_that_is_closed_ends_its_errand(arena: ExpertArena, mailbox: Mailbox) -> None:
    rng = np.random.default_rng(0)
    made = Crew(arena, mailbox, CrewOptions(1, limit=10.0))
    rows = 64
    picks = rng.integers(0, arena.geometry.num_experts, (rows, TOP_K), dtype=np.int32)
    x, sums = np.ones((rows, HIDDEN), np.float32), np.zeros((rows, HIDDEN), np.float32)
    made.begin(0, x, picks, np.ones((rows, TOP_K), np.float32), sums)
    made.close()
    assert sums.any()
    made.close()
