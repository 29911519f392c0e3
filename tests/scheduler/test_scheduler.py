"""Scheduler: admission, order, time, pages, ends. Results are checked by a strict fake engine."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from glm53srv.engine.base import PrefillSlice, StepPlan
from glm53srv.engine.fake import FakeCosts
from glm53srv.errors import ContextLengthExceeded, EngineError, InvalidRequest, QueueFull
from glm53srv.request import FinishReason, PromptLogprobs, SamplingParams, TokenEvent
from glm53srv.scheduler.scheduler import PLANNED_SHARE, SchedulerSettings
from glm53srv.scheduler.sequence import SequenceState
from tests.builders import EOS_ID, make_limits, make_request
from tests.scheduler.harness import Bench, Record, run_alone, tokens_alone

ENDLESS = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)


def start_decoding(bench: Bench, num_streams: int, *, num_prompt: int = 3) -> list[Record]:
    """Submit requests that end only at the context, and step until all of them decode."""
    records = [
        bench.submit(make_request(f"decoding-{index}", num_prompt=num_prompt, sampling=ENDLESS))
        for index in range(num_streams)
    ]
    while not all(record.events for record in records):
        bench.step()
    return records


def slot_of(record: Record) -> int:
    slot = record.sequence.slot
    assert slot is not None
    return slot


def decode_slots(plan: StepPlan) -> list[int]:
    return [row.slot for row in plan.decode]


def prefill_of(plan: StepPlan) -> PrefillSlice:
    assert plan.prefill is not None
    return plan.prefill


# -- one request


def test_request_runs_to_its_stop_id() -> None:
    bench = Bench(scripts={"r": [7, 8, 9]})
    record = bench.submit(make_request())
    bench.run_to_end()
    assert record.token_ids == [7, 8, 9, EOS_ID]
    assert record.finish is FinishReason.STOP
    assert [event.is_stop_token for event in record.events] == [False, False, False, True]
    assert record.sequence.state is SequenceState.FINISHED


def test_nothing_to_do_gives_no_plan() -> None:
    assert Bench().begin() is None


def test_max_tokens_ends_with_length() -> None:
    bench = Bench(scripts={"r": [7] * 50})
    record = bench.submit(make_request(max_tokens=4))
    bench.run_to_end()
    assert record.token_ids == [7] * 4
    assert record.finish is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", [None, 10_000])
def test_output_is_clamped_to_what_is_left_of_the_context(max_tokens: int | None) -> None:
    bench = Bench(make_limits(max_context_tokens=20), scripts={"r": [7] * 50})
    record = bench.submit(make_request(num_prompt=13, max_tokens=max_tokens))
    bench.run_to_end()
    assert len(record.token_ids) == 7
    assert record.finish is FinishReason.LENGTH


def test_context_is_bounded_by_all_pages_together() -> None:
    bench = Bench(make_limits(max_context_tokens=64, page_tokens=4, num_pages=5), scripts={"r": [7] * 50})
    record = bench.submit(make_request(num_prompt=13))
    bench.run_to_end()
    assert len(record.token_ids) == 7
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 20 tokens"):
        bench.submit(make_request(num_prompt=20))


def test_prompt_without_room_for_a_token_is_refused() -> None:
    bench = Bench(make_limits(max_context_tokens=20))
    with pytest.raises(ContextLengthExceeded, match=r"20 tokens\. However, you requested 24 tokens \(20 in"):
        bench.submit(make_request(num_prompt=20, max_tokens=4))
    record = bench.submit(make_request(num_prompt=19))
    bench.run_to_end()
    assert len(record.token_ids) == 1


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (make_request(prompt_ids=[2, 40]), "messages"),
        (make_request(prompt_ids=[-1, 2]), "messages"),
        (make_request(sampling=SamplingParams(logit_bias=((40, 1.0),))), "logit_bias"),
        (make_request(sampling=SamplingParams(stop_token_ids=(3, 40))), "stop_token_ids"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(request_: object, param: str) -> None:
    bench = Bench(make_limits(vocab_size=40))
    with pytest.raises(InvalidRequest, match="between 0 and 39") as caught:
        bench.submit(request_)  # type: ignore[arg-type]  # parametrize has no types
    assert caught.value.param == param
    assert bench.stats.total_rejected == 1


def test_seed_is_the_requests_or_a_fresh_one() -> None:
    bench = Bench()
    seeds = [
        bench.submit(make_request(sampling=SamplingParams(seed=seed))).sequence.seed
        for seed in (None, 5, -1, None)
    ]
    assert seeds == [1001, 5, 2**64 - 1, 1002]


# -- admission


def test_streams_are_admitted_in_order_and_the_rest_waits() -> None:
    bench = Bench(make_limits(max_streams=2))
    records = [bench.submit(make_request(f"r{index}", sampling=ENDLESS)) for index in range(4)]
    bench.step()
    assert [record.sequence.slot for record in records] == [0, 1, None, None]
    bench.abort(records[0])
    plan = bench.step()
    assert plan.release == (0,)
    assert [record.sequence.slot for record in records] == [None, 1, 0, None]


def test_pages_are_not_promised_to_two_sequences() -> None:
    # Six pages. The first prompt takes two a chunk and needs five in all; the second would fit meanwhile.
    limits = make_limits(max_streams=2, num_pages=6, page_tokens=4, max_context_tokens=24, max_chunk_tokens=8)
    bench = Bench(limits, costs=FakeCosts(layer_token_s=10.0))
    first = bench.submit(make_request("first", num_prompt=18, max_tokens=1))
    bench.step()
    second = bench.submit(make_request("second", num_prompt=7, max_tokens=1))
    while not first.events:
        bench.step()
        assert second.sequence.slot is None
    bench.run_to_end()
    assert bench.stats.total_preemptions == 0
    assert len(second.events) == 1


def test_queue_takes_max_queue_beyond_the_streams() -> None:
    bench = Bench(make_limits(max_streams=2), settings=SchedulerSettings(max_queue=3))
    for index in range(5):
        bench.submit(make_request(f"r{index}"))
    with pytest.raises(QueueFull) as caught:
        bench.submit(make_request("too many"))
    assert caught.value.status == 429
    assert caught.value.retry_after_s == 1
    bench.run_to_end()
    bench.submit(make_request("later"))


def test_retry_after_follows_the_measured_time_of_a_stream() -> None:
    bench = Bench(
        make_limits(max_streams=2, max_context_tokens=40),
        settings=SchedulerSettings(max_queue=0),
        costs=FakeCosts(decode_row_s=1.0),
    )
    for _ in range(2):  # one at a time, so that 36 decode steps of a second each are 36 seconds
        bench.submit(make_request(sampling=ENDLESS))
        bench.run_to_end()
    for _ in range(2):
        bench.submit(make_request(sampling=ENDLESS))
    with pytest.raises(QueueFull) as caught:
        bench.submit(make_request())
    assert caught.value.retry_after_s == 18  # 36 s a stream, two streams


# -- time


def test_every_stream_decodes_in_every_step_of_a_long_prefill() -> None:
    bench = Bench(costs=FakeCosts(layer_token_s=0.1, decode_row_s=0.01))
    decoding = start_decoding(bench, 3)
    bench.submit(make_request("long", num_prompt=40, sampling=ENDLESS))
    for plan in bench.steps(15):  # 40 tokens, 3 layers, one layer a step
        assert decode_slots(plan) == [slot_of(record) for record in decoding]
        assert prefill_of(plan).layer_end - prefill_of(plan).layer_begin == 1


def test_slice_fills_the_token_interval_beside_the_decode_step() -> None:
    limits = make_limits(num_layers=40, max_chunk_tokens=8)
    settings = SchedulerSettings(token_interval_s=0.5 / PLANNED_SHARE)
    bench = Bench(limits, settings=settings, costs=FakeCosts(layer_token_s=0.0078125, decode_row_s=0.0625))
    start_decoding(bench, 2, num_prompt=8)
    bench.step()  # the first decode step of two rows is measured
    bench.submit(make_request("long", num_prompt=16, sampling=ENDLESS))
    # The planned 0.5 s less two rows of 0.0625 s is 0.375 s: six layers of 8 tokens at 0.0625 s each.
    layers = [prefill_of(plan).layer_end - prefill_of(plan).layer_begin for plan in bench.steps(14)]
    assert layers == [6, 6, 6, 6, 6, 6, 4] * 2


def test_slice_fills_the_idle_bound_where_nothing_decodes() -> None:
    limits = make_limits(num_layers=40, max_chunk_tokens=8)
    bench = Bench(limits, costs=FakeCosts(layer_token_s=0.0078125))
    bench.submit(make_request(num_prompt=16, sampling=ENDLESS))
    layers = [prefill_of(plan).layer_end - prefill_of(plan).layer_begin for plan in bench.steps(7)]
    assert layers == [1, 16, 16, 7, 16, 16, 8]  # one to measure, then a second's worth


@pytest.mark.parametrize("tells_layers", [True, False])
def test_streams_keep_their_interval_beside_a_long_prompt_with_slow_layers(tells_layers: bool) -> None:
    # The random model's measured shape: 13 ms a layer for 512 tokens, but 33 ms in the two latent layers, and
    # 11 ms more with every chunk.
    costs = FakeCosts(
        layer_token_s=0.013 / 8,
        decode_row_s=0.005,
        slow_layers=(3, 7),
        slow_token_s=0.033 / 8,
        slow_growth_s=0.011 / 64,
        tells_layers=tells_layers,
    )
    limits = make_limits(num_layers=8, max_context_tokens=128)
    bench = Bench(limits, settings=SchedulerSettings(token_interval_s=0.2), costs=costs)
    start_decoding(bench, 1, num_prompt=2)
    long = bench.submit(make_request("long", num_prompt=64, sampling=ENDLESS))
    gaps_s = []
    while not long.events:
        begin_s = bench.now_s
        bench.step()
        gaps_s.append(bench.now_s - begin_s)
    assert max(gaps_s) < 0.2
    assert statistics.mean(gaps_s) > 0.1  # and the interval is used


def test_decode_step_longer_than_the_interval_still_leaves_one_layer() -> None:
    bench = Bench(costs=FakeCosts(layer_token_s=0.1, decode_row_s=5.0))
    start_decoding(bench, 2)
    bench.submit(make_request("long", num_prompt=8, sampling=ENDLESS))
    assert [prefill_of(plan).layer_end for plan in bench.steps(3)] == [1, 2, 3]


def test_chunks_do_not_depend_on_load() -> None:
    def chunks(bench: Bench, num_others: int) -> list[tuple[int, tuple[int, ...]]]:
        watched = bench.submit(make_request("watched", num_prompt=29, sampling=ENDLESS))
        for index in range(num_others):
            bench.submit(make_request(f"other-{index}", num_prompt=5 + 7 * index, sampling=ENDLESS))
        while not watched.events:
            bench.step()
        return [
            (piece.start_position, piece.token_ids)
            for piece in bench.slices
            if piece.slot == slot_of(watched) and piece.layer_begin == 0
        ]

    alone = chunks(Bench(), 0)
    busy = chunks(Bench(costs=FakeCosts(layer_token_s=0.3, decode_row_s=0.1)), 3)
    assert busy == alone
    assert [start for start, _ in alone] == [0, 8, 16, 24]


# -- order of prefills


@pytest.mark.parametrize("num_slices_before", [1, 2, 3])
def test_short_prompt_goes_between_two_chunks_of_a_long_one(num_slices_before: int) -> None:
    bench = Bench(make_limits(num_layers=3), costs=FakeCosts(layer_token_s=1.0))  # a layer a step
    long = bench.submit(make_request("long", num_prompt=60))
    bench.steps(num_slices_before)
    short = bench.submit(make_request("short", num_prompt=3))
    bench.steps(6 - num_slices_before)
    assert len(short.events) == 1
    assert long.sequence.num_computed_tokens == 8


def test_prompts_that_came_together_take_turns_in_order() -> None:
    bench = Bench(make_limits(num_layers=1))
    for index in range(3):
        bench.submit(make_request(f"r{index}", num_prompt=24))
    assert [prefill_of(plan).slot for plan in bench.steps(9)] == [0, 1, 2] * 3


def test_long_prompt_is_not_starved_by_short_ones() -> None:
    bench = Bench(make_limits(max_streams=2, num_layers=1))
    long = bench.submit(make_request("long", num_prompt=60, max_tokens=1))
    num_steps = 0
    while not long.events:
        if len(bench.records) - bench.stats.total_finished < 3:
            bench.submit(make_request(f"short-{num_steps}", num_prompt=8, max_tokens=1))
        bench.step()
        num_steps += 1
    assert num_steps <= 16  # 8 chunks, each after at most one of another


def test_chunk_is_not_interrupted() -> None:
    bench = Bench(costs=FakeCosts(layer_token_s=1.0), settings=SchedulerSettings(idle_slice_s=1.0))
    for index in range(3):
        bench.submit(make_request(f"r{index}", num_prompt=20, sampling=ENDLESS))
    plans = bench.steps(27)
    begun = [(prefill_of(plan).slot, prefill_of(plan).layer_begin) for plan in plans]
    assert begun == [(slot, layer) for _ in range(3) for slot in range(3) for layer in range(3)]


# -- ends


def test_abort_in_the_queue_leaves_no_trace() -> None:
    bench = Bench(make_limits(max_streams=1))
    bench.submit(make_request("running", sampling=ENDLESS))
    queued = bench.submit(make_request("queued"))
    bench.step()
    assert bench.abort(queued)
    assert not bench.abort(queued)
    assert queued.sequence.state is SequenceState.ABORTED
    assert bench.stats.num_waiting == 0


def test_abort_inside_a_chunk_releases_the_slot_in_the_next_plan() -> None:
    bench = Bench(costs=FakeCosts(layer_token_s=10.0))
    first = bench.submit(make_request("first", num_prompt=20))
    second = bench.submit(make_request("second", num_prompt=20))
    bench.step()
    bench.abort(first)
    plan = bench.step()
    assert plan.release == (0,)
    assert prefill_of(plan).slot == slot_of(second)
    assert prefill_of(plan).layer_begin == 0


def test_abort_during_a_step_drops_its_token() -> None:
    bench = Bench()
    aborted, other = start_decoding(bench, 2)
    num_before = len(aborted.events)
    bench.begin()
    slot = slot_of(aborted)
    bench.abort(aborted)
    bench.end()
    assert len(aborted.events) == num_before
    assert bench.step().release == (slot,)
    assert other.token_ids == tokens_alone(other.sequence.request, bench.limits)[: len(other.token_ids)]


def test_abort_during_the_last_slice_of_a_prefill_drops_its_token() -> None:
    bench = Bench(make_limits(num_layers=1))
    record = bench.submit(make_request())
    bench.begin()
    bench.abort(record)
    bench.end()
    assert record.events == []
    bench.run_to_end()


def test_slot_and_pages_of_an_abort_in_flight_serve_the_next_request() -> None:
    bench = Bench(make_limits(max_streams=1))
    [aborted] = start_decoding(bench, 1)
    bench.begin()
    bench.abort(aborted)
    follower = bench.submit(make_request("follower", num_prompt=9, max_tokens=5))
    bench.end()
    plan = bench.step()
    assert (plan.release, prefill_of(plan).slot) == ((0,), 0)
    bench.run_to_end()
    assert follower.token_ids == tokens_alone(follower.sequence.request, bench.limits)


def test_finish_ends_like_abort_but_counts_as_finished() -> None:
    bench = Bench()
    [record] = start_decoding(bench, 1)
    assert bench.finish(record)
    assert not bench.finish(record)
    assert record.sequence.state is SequenceState.FINISHED
    assert (bench.stats.total_finished, bench.stats.total_aborted) == (1, 0)
    assert bench.step() == StepPlan(step_id=bench.plans[-1].step_id, release=(0,))
    bench.run_to_end()


def test_answer_that_does_not_fit_the_plan_is_an_engine_error() -> None:
    for change in ("step_id", "tokens", "prefill_done"):
        bench = Bench()
        start_decoding(bench, 2)
        plan = bench.scheduler.plan_step(bench.now_s)
        assert plan is not None
        result = bench.engine.step(plan)
        if change == "step_id":
            result = replace(result, step_id=plan.step_id + 1)
        elif change == "tokens":
            result = replace(result, tokens=result.tokens[::-1])
        else:
            result = replace(result, prefill_done=True)
        with pytest.raises(EngineError, match=f"step {plan.step_id} wants slots"):
            bench.scheduler.apply(result, bench.now_s)


# -- pages


def test_pages_are_taken_as_positions_need_them() -> None:
    bench = Bench(make_limits(num_layers=1, page_tokens=4, max_chunk_tokens=8))
    bench.submit(make_request(num_prompt=16, sampling=ENDLESS))
    used = []
    for _ in range(8):
        bench.step()
        used.append(bench.stats.num_pages_used)
    assert used == [2, 4, 5, 5, 5, 5, 6, 6]  # two chunks, then one page for every four tokens


def test_youngest_gives_its_pages_and_loses_no_token() -> None:
    limits = make_limits(max_streams=3, num_pages=12, max_context_tokens=40, page_tokens=4)
    bench = Bench(limits)
    records = [
        bench.submit(make_request(f"r{index}", num_prompt=5, max_tokens=20, sampling=ENDLESS))
        for index in range(3)
    ]
    bench.run_to_end()
    preemptions = [record.sequence.num_preemptions for record in records]
    assert preemptions[0] == 0
    assert preemptions[2] >= 1
    assert bench.stats.total_preemptions == sum(preemptions)
    for record in records:
        assert record.token_ids == tokens_alone(record.sequence.request, limits)


def test_preempted_goes_before_those_that_never_ran() -> None:
    limits = make_limits(max_streams=2, num_pages=8, max_context_tokens=32, page_tokens=4)
    bench = Bench(limits)
    for index in range(4):
        bench.submit(make_request(f"r{index}", num_prompt=6, max_tokens=16, sampling=ENDLESS))
    bench.run_to_end()
    started: dict[str, list[int]] = {}
    for plan in bench.plans:
        if plan.prefill is not None and plan.prefill.start is not None:
            started.setdefault(plan.prefill.start.request_id, []).append(plan.step_id)
    assert len(started["r1"]) >= 2
    assert max(started["r1"]) < min(started["r2"])


def test_only_sequence_is_never_preempted() -> None:
    limits = make_limits(num_pages=5, page_tokens=4, max_context_tokens=64)
    bench = Bench(limits)
    record = bench.submit(make_request(num_prompt=3, sampling=ENDLESS))
    bench.run_to_end()
    assert len(record.token_ids) == 17
    assert bench.stats.total_preemptions == 0


def test_youngest_pauses_instead_of_preempting_itself() -> None:
    # Four pages of four tokens: the elder ends at 12 tokens, so it never needs a fourth page.
    limits = make_limits(max_streams=2, num_pages=4, page_tokens=4, max_context_tokens=16)
    bench = Bench(limits)
    elder = bench.submit(make_request("elder", num_prompt=9, max_tokens=3, sampling=ENDLESS))
    younger = bench.submit(make_request("younger", num_prompt=2, max_tokens=8, sampling=ENDLESS))
    bench.run_to_end()
    assert bench.stats.total_preemptions == 0
    for record in (elder, younger):
        assert record.token_ids == tokens_alone(record.sequence.request, limits)


def test_prefill_without_pages_leaves_its_turn_to_another() -> None:
    limits = make_limits(max_streams=3, num_pages=6, page_tokens=4, max_context_tokens=24, max_chunk_tokens=4)
    bench = Bench(limits)
    records = [
        bench.submit(make_request(f"r{index}", num_prompt=num_prompt, max_tokens=4, sampling=ENDLESS))
        for index, num_prompt in enumerate((4, 3, 15))
    ]
    bench.run_to_end(max_steps=200)
    for record in records:
        assert record.token_ids == tokens_alone(record.sequence.request, limits)


# -- inspection


def test_stats_count_what_happened() -> None:
    bench = Bench(make_limits(max_streams=2), scripts={"a": [7, 8], "b": [7] * 60, "c": [7]})
    bench.submit(make_request("a", num_prompt=9))
    running = bench.submit(make_request("b", num_prompt=3))
    waiting = bench.submit(make_request("c", num_prompt=3))
    bench.step()
    assert (bench.stats.num_running, bench.stats.num_waiting) == (2, 1)
    bench.abort(waiting)
    bench.steps(10)
    bench.abort(running)
    bench.run_to_end()
    stats = bench.stats
    assert (stats.total_requests, stats.total_finished, stats.total_aborted) == (3, 1, 2)
    assert stats.total_prefill_tokens == 12
    assert stats.total_output_tokens == sum(len(record.token_ids) for record in bench.records.values())
    assert stats.total_steps == len(bench.plans)


def test_a_prompt_alone_ends_without_a_token() -> None:
    bench = Bench()
    request = replace(make_request(num_prompt=20, max_tokens=0), prompt_logprobs=PromptLogprobs())
    record = bench.submit(request)
    bench.run_to_end()
    assert record.token_ids == []
    assert record.finish is FinishReason.LENGTH
    assert len(record.prompt_logprobs) == 19
    assert bench.stats.total_output_tokens == 0


def test_progress_of_the_prompt_is_told_chunk_by_chunk_to_who_asks() -> None:
    bench = Bench()
    asked = bench.submit(replace(make_request("a", num_prompt=20, max_tokens=1), reports_prompt=True))
    silent = bench.submit(make_request("b", num_prompt=20, max_tokens=1))
    bench.run_to_end()
    assert [event.prompt.num_computed for event in asked.events if event.prompt] == [8, 16, 20]
    assert all(event.prompt is None for event in silent.events)


def test_an_answer_without_the_prompt_logprobs_it_owes_is_an_engine_error() -> None:
    bench = Bench()
    bench.submit(replace(make_request(num_prompt=4), prompt_logprobs=PromptLogprobs()))
    plan = bench.scheduler.plan_step(bench.now_s)
    assert plan is not None
    layers = bench.limits.num_layers
    while plan.prefill is not None and plan.prefill.layer_end < layers:
        bench.scheduler.apply(bench.engine.step(plan), bench.now_s)
        plan = bench.scheduler.plan_step(bench.now_s)
        assert plan is not None
    result = bench.engine.step(plan)
    with pytest.raises(EngineError, match="log probabilities"):
        bench.scheduler.apply(replace(result, prompt_logprobs=result.prompt_logprobs[1:]), bench.now_s)


def test_a_preempted_prompt_is_told_each_position_once() -> None:
    limits = make_limits(max_streams=2, num_pages=8)
    bench = Bench(limits, costs=FakeCosts(layer_token_s=1.0))  # one layer of a chunk per step
    elder = bench.submit(make_request("elder", num_prompt=1, sampling=ENDLESS, max_tokens=12))
    request = replace(make_request("younger", num_prompt=24, max_tokens=2), prompt_logprobs=PromptLogprobs(2))
    younger = bench.submit(request)
    while younger.sequence.num_preemptions == 0:
        bench.step()
    num_told_before = len(younger.prompt_logprobs)
    bench.run_to_end()
    assert 0 < num_told_before < 22
    assert younger.prompt_logprobs == run_alone(request, limits).prompt_logprobs
    assert len(younger.prompt_logprobs) == 22
    assert elder.finish is FinishReason.LENGTH


def test_a_sequence_that_cannot_go_on_ends_with_an_error_and_its_neighbour_runs() -> None:
    bench = Bench()
    failing, other = start_decoding(bench, 2)
    plan = bench.scheduler.plan_step(bench.now_s)
    assert plan is not None
    result = bench.engine.step(plan)
    bad = slot_of(failing)
    tokens = tuple(
        replace(token, error="dead end") if token.slot == bad else token for token in result.tokens
    )
    events = dict(bench.scheduler.apply(replace(result, tokens=tokens), bench.now_s))
    assert events[failing.sequence.sequence_id] == TokenEvent(
        None, finish=FinishReason.ERROR, error="dead end"
    )
    assert events[other.sequence.sequence_id].token_id is not None
    assert not failing.sequence.is_live
    bench.scheduler.check_integrity()
    bench.run_to_end()
