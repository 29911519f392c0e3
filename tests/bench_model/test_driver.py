"""The driver's plans keep the contract, as the book of slots checks it in every real engine."""

from __future__ import annotations

from collections.abc import Sequence

from glm53srv.bench_model.driver import Driver, TimedModel
from glm53srv.engine.base import EngineLimits, SampledToken, StepPlan, StepResult, StepStats
from glm53srv.engine.slot_book import Slot, SlotBook

LIMITS = EngineLimits(
    max_streams=4,
    max_context_tokens=2048,
    max_chunk_tokens=100,
    page_tokens=16,
    num_pages=128,
    num_layers=6,
    vocab_size=300,
    eos_token_ids=(1,),
)


class BookEngine:
    """An engine that computes nothing and checks plans. Not FakeEngine: it wants its own tokens back, and the
    driver draws them."""

    limits = LIMITS
    offload_report = None

    def __init__(self) -> None:
        self.book: SlotBook[None, str] = SlotBook(LIMITS)
        self.decoded: list[int] = []

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass

    def step(self, plan: StepPlan) -> StepResult:
        for slot_id in plan.release:
            self.book.slots.pop(slot_id, None)
        self.book.check_plan(plan)
        tokens = [SampledToken(row.slot, 0) for row in plan.decode]
        for row, slot in zip(plan.decode, self.book.check_decode(plan.decode), strict=True):
            slot.num_computed += 1
            self.decoded.append(row.token_id)
        piece = plan.prefill
        if piece is not None:
            if piece.start is not None:
                self.book.check_start(piece)
                self.book.slots[piece.slot] = Slot(None)
            slot = self.book.check_slice(piece)
            if piece.layer_end < LIMITS.num_layers:
                slot.pause(piece, "between layers")
            else:
                slot.finish(piece)
                tokens += [SampledToken(piece.slot, 0)] * piece.is_last_chunk
        return StepResult(plan.step_id, tuple(tokens), piece is not None, StepStats())


def test_prompts_steps_and_releases_are_legal_plans() -> None:
    driver = Driver(BookEngine())
    for slot, length in enumerate([1, 99, 100, 350]):
        assert driver.prefill_s(slot, length) > 0
    for _ in range(5):
        assert len(driver.step(decode=[0, 1, 2, 3]).tokens) == 4
    driver.step(release=[1, 2])
    assert len(driver.step(decode=[0, 3]).tokens) == 2


def test_a_prompt_some_layers_at_a_time_beside_a_decoding_stream() -> None:
    driver = Driver(BookEngine())
    driver.prefill_s(0, 20)
    pieces = driver.pieces(1, 250, layers=4)
    assert [(piece.layer_begin, piece.layer_end) for piece in pieces] == [(0, 4), (4, 6)] * 3
    results = [driver.step(piece, decode=[0]) for piece in pieces]
    assert [len(result.tokens) for result in results] == [1] * 5 + [2]  # the prompt's own token comes last
    driver.step(release=[0, 1])


def test_a_dropped_prompt_leaves_its_slot_free() -> None:
    driver = Driver(BookEngine())
    for piece in driver.pieces(2, 250, layers=1)[:8]:
        driver.step(piece)
    driver.step(release=[2])
    assert driver.prefill_s(2, 30) > 0


def test_tokens_are_drawn_anew_and_the_same_in_each_run() -> None:
    engines = [BookEngine(), BookEngine()]
    for engine in engines:
        driver = Driver(engine)
        driver.prefill_s(0, 5)
        for _ in range(50):
            driver.step(decode=[0])
    assert engines[0].decoded == engines[1].decoded
    assert len(set(engines[0].decoded)) > 25


def test_a_timed_model_notes_each_decode_and_passes_the_rest_on() -> None:
    class Model:
        num_layers = 7

        def decode(self, *arguments: int) -> int:
            return sum(arguments)

    model = TimedModel(Model())
    assert (model.num_layers, model.decode(1, 2), model.decode(3)) == (7, 3, 3)
    assert len(model.enqueue_s) == 2
    assert min(model.enqueue_s) >= 0


def test_a_timed_model_calls_what_comes_behind_a_step_when_it_is_enqueued() -> None:
    told = []

    class Model:
        def decode(self, number: int) -> None:
            told.append(f"decode {number}")

    model = TimedModel(Model(), lambda: told.append("behind"))
    model.decode(1)
    model.decode(2)
    assert told == ["decode 1", "behind", "decode 2", "behind"]


def test_routes_are_told_the_rows_of_every_decode_step() -> None:
    told = []

    class Routes:
        def send(self, streams: Sequence[int]) -> None:
            told.append(list(streams))

    driver = Driver(BookEngine(), routes=Routes())
    driver.prefill_s(0, 30)
    driver.prefill_s(2, 30)
    driver.step(decode=[0, 2])
    driver.step(driver.pieces(1, 5)[0], decode=[2])
    driver.step(release=[0, 1, 2])
    assert told == [[0, 2], [2]]
