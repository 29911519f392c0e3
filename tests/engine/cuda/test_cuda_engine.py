"""The CUDA engine's steps over a model and an offload that need no GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import cast

import pytest

pytest.importorskip("torch", reason="needs torch, as make test-triton installs it")

from glm53srv.engine.base import StepPlan
from glm53srv.engine.cuda.model import CudaModel
from glm53srv.engine.cuda.warm_up import STEPS_PER_WIDTH, capture_every_width, run_every_shape
from glm53srv.errors import EngineError
from glm53srv.offload.device.gpu.gpu_offload import GpuOffload
from glm53srv.request import PromptLogprobs
from tests.engine.cuda.fakes import (
    NUM_LAYERS,
    VOCAB,
    FakeModel,
    FakeOffload,
    FakeRoom,
    logits_after,
    make_engine,
)
from tests.engine.plans import Driver, Stream


class Bench:
    def __init__(self) -> None:
        self.model, self.offload = FakeModel(), FakeOffload()
        self.engine = make_engine(self.model, self.offload)
        self.driver = Driver(self.engine)

    def stream(self, slot: int, length: int) -> Stream:
        return Stream(slot, tuple((7 * slot + i) % VOCAB for i in range(length)), (2 * slot, 2 * slot + 1))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.engine.close()


def greedy(prompt: tuple[int, ...], count: int) -> list[int]:
    """Give what greedy decoding of the fake model says."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens)[:VOCAB].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3, 5)])
def test_any_cut_of_chunks_and_layers_gives_the_models_own_tokens(
    bench: Bench, cuts: tuple[int, ...]
) -> None:
    stream = bench.stream(0, 40)
    bench.driver.prefill(stream, 16, cuts)
    bench.driver.decode([stream], 5)
    assert stream.output == greedy(stream.prompt, 6)


def test_streams_beside_each_other_keep_their_own_tokens(bench: Bench) -> None:
    first, second = bench.stream(0, 5), bench.stream(1, 33)
    bench.driver.prefill(first)
    bench.driver.prefill(second, 16, (3,), beside=[first])
    bench.driver.decode([second, first], 3)
    assert first.output == greedy(first.prompt, len(first.output))
    assert second.output == greedy(second.prompt, 4)


def test_the_offload_sees_brackets_in_order(bench: Bench) -> None:
    stream = bench.stream(0, 20)
    bench.driver.prefill(stream, 16, (2,))
    bench.driver.decode([stream], 1)
    assert bench.offload.calls == [
        *("chunk 16", "stage", "end more", "chunk 4", "stage", "end last"),
        *("decode 1", "enqueued", "finished"),
    ]


def test_a_step_gets_the_number_of_its_first_cpu_job_whether_it_is_a_graph_or_not(bench: Bench) -> None:
    stream, other = bench.stream(0, 4), bench.stream(1, 4)
    bench.model.captured = [(1, True)]
    bench.driver.prefill(stream)
    bench.driver.prefill(other, beside=[stream])
    bench.driver.decode([stream, other], 1)
    assert bench.offload.captured_steps == [True, False]
    assert bench.model.first_jobs == [1000, 1001]


def test_only_a_last_or_judged_chunk_runs_the_last_layer_whole(bench: Bench) -> None:
    stream = bench.stream(0, 40)
    stream.prompt_logprobs = PromptLogprobs(20, 2)
    bench.driver.prefill(stream, 16)
    assert bench.model.wanted_rows == [False, True, True]
    assert len(stream.judged) == 20


def test_a_prompt_is_judged_by_the_token_before(bench: Bench) -> None:
    stream = bench.stream(0, 12)
    stream.prompt_logprobs = PromptLogprobs(1, 1)
    bench.driver.prefill(stream, 5)
    for position, judged in enumerate(stream.judged, start=1):
        best = int(logits_after(stream.prompt[:position])[:VOCAB].argmax())
        assert judged.top[0][0] == best


def test_release_frees_a_state_once_and_ends_its_chunk(bench: Bench) -> None:
    stream = bench.stream(0, 40)
    pieces = stream.slices(bench.engine, 16, (3,))
    for piece in pieces[:3]:
        bench.driver.step(piece)
    bench.driver.release([stream])
    bench.driver.release([stream])
    assert bench.model.num_states == 0
    assert bench.offload.calls[-3:] == ["end last", "tell", "tell"]
    other = bench.stream(1, 3)
    bench.driver.prefill(other)
    assert other.output == greedy(other.prompt, 1)


def test_each_layer_of_a_slice_has_its_time(bench: Bench) -> None:
    stream = bench.stream(0, 10)
    result = bench.driver.step(stream.slices(bench.engine, 16, (4,))[0])
    assert len(result.stats.layers_s) == 4
    assert sum(result.stats.layers_s) >= result.stats.prefill_s * 0.99


@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 1])
def test_a_prompt_that_outgrows_the_card_ends_alone(
    bench: Bench, layer: int, caplog: pytest.LogCaptureFixture
) -> None:
    neighbour, stream = bench.stream(0, 4), bench.stream(1, 40)
    bench.driver.prefill(neighbour)
    bench.model.fails_at = layer
    results = []
    for piece in stream.slices(bench.engine, 16, (3,)):
        results.append(bench.driver.step(piece, [neighbour]))
        neighbour.take(results[-1].tokens[0])
    *before, last = results
    assert all(len(result.tokens) == 1 for result in before)
    assert [result.prefill_done for result in results] == [False, True] * 3
    assert last.tokens[1].slot == 1
    assert "did not fit into GPU memory" in str(last.tokens[1].error)
    assert "prompt of slot 1 dropped: out of memory, tried to allocate much" in caplog.text
    assert "and more" not in caplog.text
    bench.driver.release([stream])
    assert bench.model.num_states == 1
    again = bench.stream(1, 20)
    bench.driver.prefill(again, beside=[neighbour])
    assert again.output == greedy(again.prompt, 1)
    assert neighbour.output == greedy(neighbour.prompt, len(neighbour.output))


def test_memory_that_runs_out_in_decode_ends_the_engine(bench: Bench) -> None:
    stream = bench.stream(0, 4)
    bench.driver.prefill(stream)

    def fail(*arguments: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bench.model.decode = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(EngineError, match=r"step .* failed: RuntimeError: CUDA error"):
        bench.driver.decode([stream], 1)
    with pytest.raises(EngineError, match="after a failed step"):
        bench.engine.step(StepPlan(99))


@pytest.mark.parametrize("pages", [(0, 8), (0, -1), (8,)])
def test_pages_that_change_between_two_steps_are_checked_anew(bench: Bench, pages: tuple[int, ...]) -> None:
    stream = bench.stream(0, 4)
    bench.driver.prefill(stream)
    bench.driver.decode([stream], 2)
    stream.page_ids = pages
    with pytest.raises(EngineError, match="page id out of range"):
        bench.driver.decode([stream], 1)


def test_warm_up_runs_a_chunk_and_every_width_and_leaves_nothing(bench: Bench) -> None:
    filled: list[int] = []
    model, offload = cast(CudaModel, bench.model), cast(GpuOffload, bench.offload)
    run_every_shape(model, offload, bench.engine.limits, filled.append)
    calls = bench.offload.calls
    assert filled == [4]  # a page of each of four rows
    assert calls[:3] == ["chunk 16", "stage", "end last"]
    assert [call for call in calls if call.startswith("decode")] == [
        f"decode {width}" for width in (1, 2, 3, 4) for _ in range(3)
    ]
    assert bench.model.num_states == 0


def with_room() -> tuple[Bench, FakeRoom]:
    bench = Bench()
    room = FakeRoom(bench.offload)
    bench.engine = make_engine(bench.model, bench.offload, room=room)
    bench.driver = Driver(bench.engine)
    return bench, room


def test_pages_have_memory_before_a_chunk_borrows_and_a_step_begins() -> None:
    bench, _ = with_room()
    stream = bench.stream(1, 255)  # of pages 2 and 3, the first alone
    bench.driver.prefill(stream, 16)
    calls = bench.offload.calls
    assert calls[:3] == ["fill 7", "chunk 16", "stage"]
    calls.clear()
    bench.driver.decode([stream], 2)
    assert [call for call in calls if call.split()[0] in ("fill", "decode")] == [
        *("fill 3", "decode 1"),
        *("fill 4", "decode 1"),
    ]
    assert bench.model.page_ids == [[(2,)], [(2, 3)]]
    calls.clear()
    bench.engine.step(StepPlan(90, release=(1,)))
    assert calls == ["empty 0", "tell"]  # that all is idle again
    bench.engine.close()
    assert calls[2:] == ["close", "close pages"]


def test_pages_are_not_emptied_in_a_step_that_fills_others() -> None:
    bench, _ = with_room()
    first, second = bench.stream(0, 4), bench.stream(1, 4)
    bench.driver.prefill(first)
    bench.offload.calls.clear()
    result = bench.driver.step(second.slices(bench.engine, 16)[0], release=[0])
    second.take(result.tokens[-1])
    assert not any(call.startswith("empty") for call in bench.offload.calls)
    bench.driver.decode([second], 1)
    assert "empty 3" in bench.offload.calls
    bench.engine.close()


def test_a_prompt_whose_pages_get_no_memory_ends_alone_with_an_error() -> None:
    bench, room = with_room()
    first, second = bench.stream(0, 4), bench.stream(1, 4)
    bench.driver.prefill(first)
    room.most = 6
    bench.driver.prefill(second)
    assert "did not fit into GPU memory" in str(second.tokens[-1].error)
    bench.driver.decode([first], 1)
    assert first.output == greedy(first.prompt, 2)
    bench.engine.close()


def test_a_row_whose_next_page_gets_no_memory_ends_alone_with_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench, room = with_room()
    first, second = bench.stream(0, 20), bench.stream(1, 256)  # of pages 0 and 1, 2 and 3
    for stream in (first, second):
        bench.driver.prefill(stream)
    room.most = room.num_pages = 3
    result = bench.driver.step(decode=[first, second])
    told, failed = result.tokens
    assert told.error is None
    first.take(told)
    assert failed.slot == 1
    assert "no memory left for another page" in str(failed.error)
    assert "sequence of slot 1 dropped: no memory for pages" in caplog.text
    assert "and more" not in caplog.text
    bench.driver.release([second])
    bench.driver.decode([first], 2)
    assert first.output == greedy(first.prompt, 4)
    room.most = room.num_pages = 0
    last = bench.driver.step(decode=[first])
    assert last.tokens[0].error is not None
    bench.engine.close()


def test_close_frees_in_order_and_only_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.engine.close()
    bench.engine.close()
    assert bench.offload.calls == ["close"]
    assert bench.model.is_unloaded

    def lost() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    broken = Bench()
    broken.model.wait = lost  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        broken.engine.close()
    assert "the GPU could not be freed: CUDA error: unspecified launch failure" in caplog.text


@pytest.mark.parametrize("most_by_row", [2, 0])
def test_every_width_is_captured_and_run(bench: Bench, most_by_row: int) -> None:
    limits = bench.engine.limits
    assert capture_every_width(bench.model, bench.offload, limits, most_by_row=most_by_row)  # type: ignore[arg-type]
    assert bench.model.captured == [(width, most_by_row) for width in (1, 2, 3, 4)]
    assert bench.engine.captured_widths == (1, 2, 3, 4)
    assert [call for call in bench.offload.calls if call.startswith("decode")] == [
        f"decode {width}" for width in (1, 2, 3, 4) for _ in range(STEPS_PER_WIDTH)
    ]
    assert bench.model.num_states == 0


def test_a_width_that_cannot_be_captured_leaves_all_without_graphs(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.model.refuses_width = 3
    limits = bench.engine.limits
    assert not capture_every_width(bench.model, bench.offload, limits, most_by_row=0)  # type: ignore[arg-type]
    assert bench.engine.captured_widths == ()
    (record,) = caplog.records
    assert record.getMessage() == (
        "decode runs without CUDA graphs: operation not permitted when stream is capturing"
    )
