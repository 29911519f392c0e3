"""FakeEngine must find every kind of broken plan; else the scheduler's tests would prove nothing."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from glm53srv.engine.base import DecodeRow, PrefillSlice, StepPlan, StepResult
from glm53srv.engine.fake import ContractViolation, FakeCosts, FakeEngine, PagedMemory, StepGate
from glm53srv.errors import EngineError
from glm53srv.request import SamplingParams
from tests.builders import EOS_ID, make_limits, make_start

LIMITS = make_limits(max_streams=2, num_pages=8, num_layers=3)  # 4 tokens a page, chunks of 8
GREEDY = SamplingParams(temperature=0.0)

PROMPT = (2, 3, 4, 5, 6)
WHOLE = PrefillSlice(
    slot=0,
    token_ids=PROMPT,
    start_position=0,
    page_ids=(0, 1),
    layer_begin=0,
    layer_end=3,
    is_last_chunk=True,
    start=make_start(GREEDY, prompt_ids=PROMPT),
)
OTHER = replace(WHOLE, slot=1, page_ids=(2, 3), start=make_start(GREEDY, prompt_ids=PROMPT, request_id="b"))


class Steps:
    """Sends plans with consecutive ids."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._next_id = 0

    def run(
        self, prefill: PrefillSlice | None = None, *decode: DecodeRow, release: tuple[int, ...] = ()
    ) -> StepResult:
        plan = StepPlan(self._next_id, release, prefill, decode)
        self._next_id += 1
        return self._engine.step(plan)


def prefilled(*pieces: PrefillSlice) -> tuple[Steps, list[int]]:
    """Make an engine that has run some prefills; gives the token that each sampled."""
    steps = Steps(FakeEngine(LIMITS))
    return steps, [steps.run(piece).tokens[0].token_id for piece in pieces]


def test_prefill_in_slices_and_chunks_gives_the_tokens_of_a_whole_one() -> None:
    _, whole = prefilled(WHOLE)
    pieces = Steps(FakeEngine(LIMITS))
    first = replace(WHOLE, token_ids=PROMPT[:3], is_last_chunk=False)
    assert not pieces.run(replace(first, layer_end=1)).prefill_done
    assert pieces.run(replace(first, layer_begin=1, start=None)).prefill_done
    last = replace(WHOLE, token_ids=PROMPT[3:], start_position=3, start=None)
    result = pieces.run(last)
    assert result.prefill_done
    assert [token.token_id for token in result.tokens] == whole


def test_decode_continues_from_the_sampled_token() -> None:
    steps, [token_id] = prefilled(WHOLE)
    result = steps.run(None, DecodeRow(0, token_id, 5, (0, 1)))
    assert [token.slot for token in result.tokens] == [0]
    steps.run(None, DecodeRow(0, result.tokens[0].token_id, 6, (0, 1)))


def test_result_lists_decode_rows_in_plan_order_then_the_prefill() -> None:
    steps = Steps(FakeEngine(make_limits(max_streams=3)))
    a = steps.run(WHOLE).tokens[0].token_id
    b = steps.run(OTHER).tokens[0].token_id
    third = replace(OTHER, slot=2, page_ids=(4, 5))
    result = steps.run(third, DecodeRow(1, b, 5, (2, 3)), DecodeRow(0, a, 5, (0, 1)))
    assert [token.slot for token in result.tokens] == [1, 0, 2]


def test_script_is_followed_and_then_ends() -> None:
    engine = FakeEngine(LIMITS, scripts={"r": [7, 8]})
    steps = Steps(engine)
    tokens = [steps.run(WHOLE).tokens[0].token_id]
    for position in range(5, 8):
        tokens.append(steps.run(None, DecodeRow(0, tokens[-1], position, (0, 1))).tokens[0].token_id)
    assert tokens == [7, 8, EOS_ID, EOS_ID]


def test_script_continues_after_preemption() -> None:
    engine = FakeEngine(LIMITS, scripts={"r": [7, 8]})
    start = make_start(GREEDY, prompt_ids=PROMPT, output_ids=[7])
    assert Steps(engine).run(replace(WHOLE, token_ids=(*PROMPT, 7), start=start)).tokens[0].token_id == 8


def test_costs_are_reported() -> None:
    steps = Steps(FakeEngine(LIMITS, costs=FakeCosts(layer_token_s=0.5, decode_row_s=2.0)))
    first = steps.run(replace(WHOLE, layer_end=2))
    assert (first.stats.prefill_s, first.stats.decode_s) == (0.5 * 2 * 5, 0.0)
    token_id = steps.run(replace(WHOLE, layer_begin=2, start=None)).tokens[0].token_id
    assert steps.run(None, DecodeRow(0, token_id, 5, (0, 1))).stats.decode_s == 2.0


ROW = DecodeRow(slot=0, token_id=-1, position=5, page_ids=(0, 1))  # the token is filled in by the tests


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (replace(ROW, slot=1), "holds nothing"),
        (replace(ROW, position=6), "position 6, expected 5"),
        (replace(ROW, position=4), "position 4, expected 5"),
        (replace(ROW, page_ids=(0,)), "too few pages"),
        (replace(ROW, page_ids=(1, 0)), "changed"),
        (replace(ROW, page_ids=(0, 2)), "changed"),
        (replace(ROW, page_ids=(0, 1, 1)), "twice"),
        (replace(ROW, page_ids=(0, 1, 8)), "out of range"),
    ],
)
def test_broken_decode_rows_are_found(row: DecodeRow, reason: str) -> None:
    steps, [token_id] = prefilled(WHOLE)
    with pytest.raises(ContractViolation, match=reason):
        steps.run(None, replace(row, token_id=token_id))


def test_wrong_decode_token_is_found() -> None:
    steps, [token_id] = prefilled(WHOLE)
    with pytest.raises(ContractViolation, match=f"token {token_id + 1}, expected {token_id}"):
        steps.run(None, replace(ROW, token_id=token_id + 1))


def test_memory_that_differs_between_layers_is_found() -> None:
    memory = PagedMemory(LIMITS)
    memory.write(range(3), (5, 2), 2, (7, 8, 9))
    memory.write(range(1, 2), (5, 2), 3, (10,))
    with pytest.raises(ContractViolation, match="different tokens in their layers"):
        memory.read((5, 2), 5)
    memory.write(range(3), (5, 2), 3, (11,))
    assert memory.read((5, 2), 5).tolist() == [-1, -1, 7, 11, 9]


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (replace(WHOLE, slot=2), "slot 2 does not exist"),
        (replace(WHOLE, start=None), "no start"),
        (replace(WHOLE, layer_begin=1), "layer 1, expected 0"),
        (replace(WHOLE, layer_end=4), "layer_end 4"),
        (replace(WHOLE, layer_end=0), "layer_end 0"),
        (replace(WHOLE, token_ids=PROMPT[:4]), "is_last_chunk True"),
        (replace(WHOLE, is_last_chunk=False), "is_last_chunk False"),
        (replace(WHOLE, token_ids=(9, *PROMPT[1:])), "other tokens"),
        (replace(WHOLE, start_position=1), "chunk at 1, expected 0"),
        (replace(WHOLE, page_ids=(0,)), "too few pages"),
        (replace(WHOLE, page_ids=(0, 0)), "twice"),
        (replace(WHOLE, token_ids=()), "0 tokens"),
    ],
)
def test_broken_first_slices_are_found(piece: PrefillSlice, reason: str) -> None:
    with pytest.raises(ContractViolation, match=reason):
        Steps(FakeEngine(LIMITS)).run(piece)


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (replace(WHOLE, layer_begin=2, start=None), "layer 2, expected 1"),
        (replace(WHOLE, layer_begin=0, start=None), "layer 0, expected 1"),
        (replace(WHOLE, layer_begin=1), "without a release"),
        (
            replace(WHOLE, layer_begin=1, start=None, token_ids=PROMPT[:4], is_last_chunk=False),
            "changed between its layers",
        ),
        (replace(WHOLE, layer_begin=1, start=None, page_ids=(1, 0)), "pages of slot 0 changed"),
        (OTHER, "inside a chunk"),
    ],
)
def test_broken_second_slices_are_found(piece: PrefillSlice, reason: str) -> None:
    steps = Steps(FakeEngine(LIMITS))
    steps.run(replace(WHOLE, layer_end=1))
    with pytest.raises(ContractViolation, match=reason):
        steps.run(piece)


def test_chunk_too_long_is_found() -> None:
    prompt = tuple(range(2, 11))
    piece = replace(WHOLE, token_ids=prompt, page_ids=(0, 1, 2), start=make_start(prompt_ids=prompt))
    with pytest.raises(ContractViolation, match="9 tokens in a chunk"):
        Steps(FakeEngine(LIMITS)).run(piece)


def test_page_of_another_sequence_is_found() -> None:
    steps, _ = prefilled(WHOLE)
    with pytest.raises(ContractViolation, match="share a page"):
        steps.run(replace(OTHER, page_ids=(1, 2)))


def test_decode_inside_its_own_prefill_is_found() -> None:
    steps = Steps(FakeEngine(LIMITS))
    steps.run(replace(WHOLE, layer_end=1))
    with pytest.raises(ContractViolation, match="before the end of its prefill"):
        steps.run(None, DecodeRow(0, 2, 5, (0, 1)))


def test_slot_twice_in_one_step_is_found() -> None:
    steps, [token_id] = prefilled(WHOLE)
    with pytest.raises(ContractViolation, match="a slot twice"):
        steps.run(None, DecodeRow(0, token_id, 5, (0, 1)), DecodeRow(0, token_id, 5, (0, 1)))


def test_release_frees_the_slot_and_its_pages_even_inside_a_chunk() -> None:
    engine = FakeEngine(LIMITS)
    steps = Steps(engine)
    steps.run(replace(WHOLE, layer_end=1))
    steps.run(replace(OTHER, page_ids=(0, 1)), release=(0, 1))
    assert engine.used_slots == (1,)


def test_step_ids_must_grow() -> None:
    engine = FakeEngine(LIMITS)
    engine.step(StepPlan(3))
    with pytest.raises(ContractViolation, match="step id 3 after 3"):
        engine.step(StepPlan(3))


def test_nothing_but_close_follows_a_failed_step() -> None:
    engine = FakeEngine(LIMITS, fail_at_step=0)
    with pytest.raises(EngineError, match="told to fail"):
        engine.step(StepPlan(0))
    with pytest.raises(ContractViolation, match="after a failed step"):
        engine.step(StepPlan(1))
    engine.close()
    engine.close()
    assert engine.is_closed


def test_gate_holds_from_a_step_on() -> None:
    gate = StepGate()
    gate.hold(from_step=1)
    engine = FakeEngine(LIMITS, before_step=gate.pass_through)
    engine.step(StepPlan(0))
    thread = threading.Thread(target=engine.step, args=(StepPlan(1),))
    thread.start()
    assert gate.wait_until_held() == 1
    gate.open()
    thread.join()
    engine.step(StepPlan(2))
