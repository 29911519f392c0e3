"""What every engine owes the step loop. One suite over all engines that this machine can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from glm53srv.engine.base import Engine, EngineLimits, SequenceStart, StepPlan
from glm53srv.engine.cpu import CpuEngine, EngineOptions
from glm53srv.engine.fake import FakeEngine
from glm53srv.errors import EngineError
from glm53srv.machine import read_machine
from glm53srv.offload.cost import CostOverrides
from glm53srv.offload.device.options import OffloadOptions
from glm53srv.offload.vram_plan import VramOptions
from glm53srv.request import PromptLogprobs, SamplingParams
from tests.engine.plans import GREEDY, Driver, Stream

EngineMaker = Callable[[], Engine]
PROMPT = tuple(range(300, 340))


def make_fake() -> Engine:
    limits = EngineLimits(
        max_streams=4,
        max_context_tokens=2048,
        max_chunk_tokens=64,
        page_tokens=256,
        num_pages=8,
        num_layers=8,
        vocab_size=2304,
        eos_token_ids=(2256, 2263, 2265),
    )
    return FakeEngine(limits)


# All lanes at once, a cache too small for the picks of one step, and chunks of 16 tokens staged.
OFFLOAD = OffloadOptions(
    costs=CostOverrides(0.0, 0.4, 0.4),
    vram=VramOptions(max_slots=24),
    chunk_slots=3,
    stage_min_picks=64,
    copies_per_step=16,
    calibrate_s=0.0,
)


class SharedEngine:
    """The CUDA engine as strained as OFFLOAD, its few slots poisoned before each copy.

    One for all tests, since loading takes a while: each leaves its slots to the next one's release. A test
    whose plan breaks the contract leaves an engine that may only be closed; the next one loads it anew.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._engine: Engine | None = None

    def get(self) -> Engine:
        """Give an engine without sequences."""
        if self._engine is not None:
            try:
                self._engine.step(StepPlan(0, release=tuple(range(self._engine.limits.max_streams))))
            except EngineError:
                self.close()
        if self._engine is None:
            from glm53srv.engine.cuda.engine import CudaEngine
            from glm53srv.engine.cuda.loading import CudaOptions

            strained = replace(OFFLOAD, mode="exact")
            options = CudaOptions(strained, cache_tokens=2048, max_chunk_tokens=64, poisons=True)
            self._engine = CudaEngine.load(self._model_dir, options, read_machine())
        return self._engine

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


@pytest.fixture(scope="session")
def cuda_engine(random_model_dir: Path) -> Iterator[SharedEngine]:
    shared = SharedEngine(random_model_dir)
    yield shared
    shared.close()


@pytest.fixture(params=["fake", "cpu", "offload", pytest.param("cuda", marks=pytest.mark.cuda)])
def engine(request: pytest.FixtureRequest, random_model_dir: Path) -> Iterator[Engine]:
    made: Engine
    if request.param == "cuda":
        yield request.getfixturevalue("cuda_engine").get()
        return
    if request.param == "fake":
        made = make_fake()
    else:
        offload = OFFLOAD if request.param == "offload" else None
        options = EngineOptions(cache_tokens=2048, max_chunk_tokens=64, offload=offload)
        made = CpuEngine.load(random_model_dir, options)
    yield made
    made.close()


@pytest.fixture
def driver(engine: Engine) -> Driver:
    return Driver(engine)


def is_on_cpu(driver: Driver) -> bool:
    """Tell whether an engine's sums are the same for every chunk length and for prefill and decode.

    A GPU takes other kernels, whose sums differ in rounding: on random weights, whose logits stand on knife
    edges, that changes tokens. What it owes there, bench/cuda/check_engine.py compares with stock exllamav3.
    """
    return isinstance(driver.engine, FakeEngine | CpuEngine)


def test_limits_are_whole_and_consistent(engine: Engine) -> None:
    limits = engine.limits
    assert limits.max_streams == 4
    assert limits.max_context_tokens <= limits.page_tokens * limits.num_pages
    assert limits.max_chunk_tokens == 64
    assert limits.num_layers == 8
    assert all(0 <= token_id < limits.vocab_size for token_id in limits.eos_token_ids)


def test_a_step_without_work_gives_nothing(driver: Driver) -> None:
    result = driver.step()
    assert (result.tokens, result.prefill_done) == ((), False)
    assert (result.stats.prefill_s, result.stats.decode_s) == (0.0, 0.0)


def test_prefill_samples_once_after_the_last_layer_of_the_last_chunk(driver: Driver) -> None:
    stream = Stream(slot=0, prompt=PROMPT, page_ids=(0,))
    driver.prefill(stream, chunk=16, layer_cuts=(3, 5))  # asserts done and tokens of each slice
    assert len(stream.output) == 1


def test_tokens_come_in_plan_order_and_the_prefill_last(driver: Driver) -> None:
    first, second = Stream(2, PROMPT, (0,)), Stream(0, PROMPT[:9], (1,))
    driver.prefill(first)
    driver.prefill(second)
    third = Stream(3, PROMPT[5:], (2,))
    (piece,) = third.slices(driver.engine, 64)
    result = driver.step(piece, decode=[second, first])
    assert [token.slot for token in result.tokens] == [0, 2, 3]


def test_warm_up_leaves_no_trace(engine: Engine) -> None:
    engine.warm_up()
    driver, stream = Driver(engine), Stream(0, PROMPT, (0,))
    driver.prefill(stream)
    driver.decode([stream], 3)
    assert len(stream.output) == 4


def test_same_tokens_at_every_chunk_length_and_layer_cut(driver: Driver) -> None:
    short, odd = (16, 7) if is_on_cpu(driver) else (64, 64)
    outputs = []
    for chunk, cuts in ((64, ()), (short, ()), (64, (1,)), (64, range(1, 8)), (odd, (4,))):
        stream = Stream(0, PROMPT, (3,))
        driver.prefill(stream, chunk, cuts)
        driver.decode([stream], 5)
        driver.release([stream])
        outputs.append(stream.output)
    assert all(output == outputs[0] for output in outputs)


def in_company(driver: Driver, first_page: int) -> list[list[int]]:
    """Prefill and decode four streams, each prompt beside those before it; gives their tokens."""
    streams = [Stream(slot, PROMPT[slot:], (first_page + slot,)) for slot in range(4)]
    for index, stream in enumerate(streams):
        driver.prefill(stream, layer_cuts=(2, 6), beside=streams[1:index])
    driver.decode(streams, 6)
    driver.release(streams)
    return [stream.output for stream in streams]


def test_a_sequence_gives_the_same_tokens_alone_and_beside_others(driver: Driver) -> None:
    alone = Stream(0, PROMPT, (0,))
    driver.prefill(alone)
    driver.decode([alone], 6)
    driver.release([alone])
    outputs = in_company(driver, 1)
    if is_on_cpu(driver):
        assert outputs[0][:7] == alone.output
    else:  # rows in company go through other kernels: the prompt's token is the same, and all are again
        assert outputs[0][0] == alone.output[0]
        assert in_company(driver, 0) == outputs


def test_release_forgets_and_a_slot_starts_afresh(driver: Driver) -> None:
    first = Stream(1, PROMPT, (0,))
    driver.prefill(first)
    driver.decode([first], 4)
    driver.release([first])
    other = Stream(1, PROMPT[::-1], (0,))
    driver.prefill(other)
    driver.release([other])
    again = Stream(1, PROMPT, (5,))
    driver.prefill(again)
    driver.decode([again], 4)
    assert again.output == first.output


@pytest.mark.parametrize("layer", [1, 4, 7])
def test_release_in_the_middle_of_a_chunk(driver: Driver, layer: int) -> None:
    beside = Stream(0, PROMPT, (0,))
    driver.prefill(beside)
    dropped = Stream(1, PROMPT[3:], (1,))
    driver.step(dropped.slices(driver.engine, 64, (layer,))[0], [])
    driver.release([dropped])
    fresh = Stream(1, PROMPT, (1,))
    driver.prefill(fresh)
    assert fresh.output == beside.output


def test_releasing_an_unknown_slot_is_ignored(driver: Driver) -> None:
    driver.step(release=(0, 3, 17))


def test_release_and_start_of_a_slot_in_one_step(driver: Driver) -> None:
    first = Stream(0, PROMPT, (0,))
    driver.prefill(first)
    second = Stream(0, PROMPT, (0,))
    (piece,) = second.slices(driver.engine, 64)
    result = driver.step(piece, release=(0,))
    assert [token.token_id for token in result.tokens] == first.output


def test_recomputing_prompt_and_output_continues_the_sequence(driver: Driver) -> None:
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    stream = Stream(0, PROMPT, (0,), sampling, seed=7)
    driver.prefill(stream)
    driver.decode([stream], 5)
    driver.release([stream])
    kept = tuple(stream.output[:3])
    resumed = Stream(0, PROMPT + kept, (4,), sampling, seed=7)
    pieces = resumed.slices(driver.engine, 64)
    start = SequenceStart("request-0", sampling, 7, PROMPT, kept)
    (piece,) = pieces
    piece = type(piece)(
        piece.slot, piece.token_ids, 0, piece.page_ids, 0, piece.layer_end, is_last_chunk=True, start=start
    )
    result = driver.step(piece)
    if is_on_cpu(driver):
        assert result.tokens[0].token_id == stream.output[3]


def test_sampling_parameters_reach_the_sampler(driver: Driver) -> None:
    sampling = SamplingParams(temperature=0.0, logit_bias=((400, 100.0),), num_logprobs=2)
    stream = Stream(0, PROMPT, (0,), sampling)
    driver.prefill(stream)
    assert stream.output == [400]
    assert stream.tokens[0].logprobs is not None
    assert len(stream.tokens[0].logprobs.top) == 2


def test_close_is_idempotent_and_nothing_may_follow(engine: Engine) -> None:
    engine.close()
    engine.close()
    with pytest.raises(Exception, match="after close"):
        engine.step(StepPlan(0))


def test_pages_are_found_through_the_page_ids(driver: Driver) -> None:
    prompt = tuple(300 + i % 500 for i in range(270))
    outputs = []
    for pages in ((0, 1), (5, 2)):
        stream = Stream(0, prompt, pages, GREEDY)
        driver.prefill(stream)
        driver.decode([stream], 3)
        driver.release([stream])
        outputs.append(stream.output)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("start_position", [1, 2, 17, len(PROMPT) - 1, len(PROMPT), len(PROMPT) + 5])
def test_prompt_logprobs_are_those_of_the_wanted_positions(driver: Driver, start_position: int) -> None:
    judged = []
    short, odd = (16, 7) if is_on_cpu(driver) else (64, 64)
    for chunk, cuts in ((64, ()), (short, (3,)), (odd, ())):
        stream = Stream(0, PROMPT, (0,), prompt_logprobs=PromptLogprobs(start_position, 2, (300,)))
        driver.prefill(stream, chunk, cuts)
        driver.release([stream])
        judged.append(stream.judged)
    assert len(judged[0]) == max(len(PROMPT) - start_position, 0)
    for other in judged[1:]:
        assert [entry.logprob for entry in other] == pytest.approx(
            [entry.logprob for entry in judged[0]], abs=1e-3
        )
    for entry in judged[0]:
        assert len(entry.top) == 2
        assert entry.top[0][1] >= entry.top[1][1]
        assert entry.top[0][1] >= entry.logprob
        assert [token_id for token_id, _ in entry.others] == [300]


def test_nothing_is_judged_unless_asked(driver: Driver) -> None:
    stream = Stream(0, PROMPT, (0,))
    driver.prefill(stream, 16)
    assert stream.judged == []


def test_a_prompt_token_has_the_log_probability_it_was_sampled_with(driver: Driver) -> None:
    sampling = SamplingParams(temperature=1.0, ignore_eos=True, num_logprobs=3)
    written = Stream(0, PROMPT, (0,), sampling, seed=5)
    driver.prefill(written)
    driver.decode([written], 8)
    wanted = PromptLogprobs(len(PROMPT), num_top=3)
    read = Stream(1, PROMPT + tuple(written.output), (1,), prompt_logprobs=wanted)
    driver.prefill(read, 16)
    sampled = [token.logprobs for token in written.tokens]
    assert len(read.judged) == len(sampled)
    if not is_on_cpu(driver):
        return
    for mine, theirs in zip(read.judged, sampled, strict=True):
        assert theirs is not None
        # float32 sums in another order: the two ways through a block differ in the last bits
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [token_id for token_id, _ in mine.top] == [token_id for token_id, _ in theirs.top]


def test_a_prompt_judged_beside_decoding_streams_is_judged_alike(driver: Driver) -> None:
    alone = Stream(0, PROMPT, (0,), prompt_logprobs=PromptLogprobs())
    driver.prefill(alone, 16)
    other = Stream(1, PROMPT[:5], (1,))
    driver.prefill(other)
    beside = Stream(2, PROMPT, (2,), prompt_logprobs=PromptLogprobs())
    driver.prefill(beside, 16, (2, 5), beside=[other])
    assert beside.judged == alone.judged
