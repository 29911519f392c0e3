"""The CPU engine: bits that depend neither on company nor on pauses, and plans that break the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glm53srv.engine.base import DecodeRow, PrefillSlice, SampledToken, StepPlan
from glm53srv.engine.cpu import CpuEngine, EngineOptions
from glm53srv.errors import CheckpointError, EngineError
from glm53srv.kernels import Isa
from glm53srv.request import SamplingParams
from tests.engine.plans import Driver, Stream

# All log probabilities come along, so that equality is equality of logits to the last bits, not just of
# tokens.
WATCHED = SamplingParams(temperature=0.0, ignore_eos=True, num_logprobs=20)
OPTIONS = EngineOptions(cache_tokens=4096, max_chunk_tokens=512)


@pytest.fixture(scope="module")
def loaded(random_model_dir: Path) -> Iterator[CpuEngine]:
    engine = CpuEngine.load(random_model_dir, OPTIONS)
    yield engine
    engine.close()


@pytest.fixture
def driver(loaded: CpuEngine) -> Iterator[Driver]:
    driver = Driver(loaded)
    yield driver
    driver.step(release=range(4))


def prompt(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(256, 2256, count))


def alone(driver: Driver, ids: tuple[int, ...], num_steps: int) -> list[SampledToken]:
    """Give the tokens of a sequence that has the engine for itself."""
    stream = Stream(0, ids, (0, 1), WATCHED)
    driver.prefill(stream)
    driver.decode([stream], num_steps)
    driver.release([stream])
    return stream.tokens


def same(actual: list[SampledToken], expected: list[SampledToken]) -> bool:
    """Tell whether tokens and log probabilities agree bit for bit, whatever the slot."""
    return [(t.token_id, t.logprobs) for t in actual] == [(t.token_id, t.logprobs) for t in expected]


# 20: one page, dense. 255: a page border. 262: pools are cut from the first decoded tokens on.
@pytest.mark.parametrize("length", [20, 255, 262])
def test_logits_are_bitwise_the_same_alone_and_in_a_batch(driver: Driver, length: int) -> None:
    ids = prompt(length)
    expected = alone(driver, ids, 10)
    watched = Stream(2, ids, (7, 3), WATCHED)
    others = [
        Stream(0, prompt(30, 1), (8,), WATCHED),
        Stream(1, prompt(230, 2), (9, 13), WATCHED),
        Stream(3, prompt(630, 3), (11, 15, 0), WATCHED),
    ]
    driver.prefill(others[0])
    driver.prefill(watched, beside=[others[0]])
    driver.decode([others[0], watched], 2)
    driver.prefill(others[1], beside=[watched, others[0]])
    driver.prefill(others[2], layer_cuts=(4,), beside=[watched])
    driver.decode([others[2], others[0], watched, others[1]], 3)
    assert same(watched.tokens, expected)


@pytest.mark.parametrize("layer", range(1, 8))
def test_pause_between_layers_changes_no_bit(driver: Driver, layer: int) -> None:
    ids = prompt(40, seed=5)
    expected = alone(driver, ids, 2)
    other = Stream(1, prompt(25, seed=6), (4,), WATCHED)
    driver.prefill(other)
    paused = Stream(0, ids, (0, 1), WATCHED)
    driver.prefill(paused, layer_cuts=(layer,), beside=[other])
    driver.decode([paused, other], 2)
    assert same(paused.tokens, expected)


def test_chunk_over_several_pages_with_pauses_at_every_layer(driver: Driver) -> None:
    ids = prompt(600, seed=8)
    whole = Stream(0, ids, (2, 9, 4), WATCHED)
    driver.prefill(whole, chunk=300)
    driver.release([whole])
    cut = Stream(0, ids, (10, 11, 12), WATCHED)
    driver.prefill(cut, chunk=300, layer_cuts=range(1, 8))
    assert same(cut.tokens, whole.tokens)


def test_kernels_of_one_thread_and_two_give_the_same_bits(driver: Driver, random_model_dir: Path) -> None:
    expected = alone(driver, prompt(30), 3)
    double = CpuEngine.load(random_model_dir, replace(OPTIONS, num_threads=2))
    try:
        assert same(alone(Driver(double), prompt(30), 3), expected)
    finally:
        double.close()


def test_padding_of_the_head_is_never_sampled(driver: Driver) -> None:
    stream = Stream(0, prompt(20), (0,), replace(WATCHED, logit_bias=((2303, 100.0),)))
    driver.prefill(stream)
    assert stream.output[0] < 2292


def test_more_streams_than_a_kernel_takes_at_once(random_model_dir: Path) -> None:
    engine = CpuEngine.load(random_model_dir, replace(OPTIONS, max_streams=10))
    try:
        driver = Driver(engine)
        expected = alone(driver, prompt(12), 3)
        streams = [Stream(slot, prompt(12), (slot,), WATCHED) for slot in range(10)]
        for stream in streams:
            driver.prefill(stream)
        driver.decode(streams, 3)
        assert all(same(stream.tokens, expected) for stream in streams)
    finally:
        engine.close()


def test_load_reports_progress_and_names_what_is_wrong(random_model_dir: Path, tmp_path: Path) -> None:
    reports: list[tuple[float, str]] = []
    engine = CpuEngine.load(
        random_model_dir, OPTIONS, lambda fraction, stage: reports.append((fraction, stage))
    )
    engine.close()
    fractions = [fraction for fraction, _ in reports]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert engine.is_random
    with pytest.raises(CheckpointError, match="no such directory"):
        CpuEngine.load(tmp_path / "nowhere", OPTIONS)


def test_missing_tokenizer_is_an_error_of_the_checkpoint(random_model_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((random_model_dir / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        CpuEngine.load(tmp_path, OPTIONS)


def test_cache_is_counted_in_whole_pages(random_model_dir: Path) -> None:
    engine = CpuEngine.load(random_model_dir, replace(OPTIONS, cache_tokens=257, isa=Isa.SCALAR))
    assert (engine.limits.num_pages, engine.limits.max_context_tokens) == (2, 512)
    engine.close()


START = Stream(0, prompt(20), (0,), WATCHED)


def first_slice(engine: CpuEngine, **changes: object) -> PrefillSlice:
    return replace(START.slices(engine, 512)[0], **changes)  # type: ignore[arg-type]  # any field


BROKEN: list[tuple[str, Callable[[CpuEngine], list[StepPlan]]]] = [
    ("slot 0 has no start", lambda e: [StepPlan(0, prefill=first_slice(e, start=None))]),
    ("slot 4 does not exist", lambda e: [StepPlan(0, prefill=first_slice(e, slot=4))]),
    (
        "slot 0 started without a release",
        lambda e: [StepPlan(i, prefill=first_slice(e)) for i in range(2)],
    ),
    ("chunk at 1, expected 0", lambda e: [StepPlan(0, prefill=first_slice(e, start_position=1))]),
    ("layers 1 to 8, expected to start at 0", lambda e: [StepPlan(0, prefill=first_slice(e, layer_begin=1))]),
    ("layers 0 to 9, expected", lambda e: [StepPlan(0, prefill=first_slice(e, layer_end=9))]),
    ("layers 0 to 0, expected", lambda e: [StepPlan(0, prefill=first_slice(e, layer_end=0))]),
    ("too few pages for 20 tokens", lambda e: [StepPlan(0, prefill=first_slice(e, page_ids=()))]),
    ("page id out of range", lambda e: [StepPlan(0, prefill=first_slice(e, page_ids=(16,)))]),
    ("unknown token id", lambda e: [StepPlan(0, prefill=first_slice(e, token_ids=(2304,)))]),
    ("0 tokens in a chunk", lambda e: [StepPlan(0, prefill=first_slice(e, token_ids=()))]),
    ("513 tokens in a chunk", lambda e: [StepPlan(0, prefill=first_slice(e, token_ids=(5,) * 513))]),
    (
        "the chunk changed between its layers",
        lambda e: [
            StepPlan(0, prefill=first_slice(e, layer_end=4)),
            StepPlan(1, prefill=first_slice(e, layer_begin=4, start=None, token_ids=(1, 2))),
        ],
    ),
    (
        "prefill inside a chunk of slot [1]",
        lambda e: [
            StepPlan(0, prefill=first_slice(e, slot=1, layer_end=4)),
            StepPlan(1, prefill=first_slice(e)),
        ],
    ),
    (
        "is prefilled already",
        lambda e: [
            StepPlan(0, prefill=first_slice(e)),
            StepPlan(1, prefill=first_slice(e, start=None, start_position=20)),
        ],
    ),
    ("decode before the end of its prefill", lambda e: [StepPlan(0, decode=(DecodeRow(0, 5, 20, (0,)),))]),
    (
        "position 21, expected 20",
        lambda e: [StepPlan(0, prefill=first_slice(e)), StepPlan(1, decode=(DecodeRow(0, 5, 21, (0,)),))],
    ),
    (
        "a slot decodes twice in one step",
        lambda e: [StepPlan(0, prefill=first_slice(e)), StepPlan(1, decode=(DecodeRow(0, 5, 20, (0,)),) * 2)],
    ),
    (
        "a slot prefills and decodes at once",
        lambda e: [StepPlan(0, prefill=first_slice(e), decode=(DecodeRow(0, 5, 20, (0,)),))],
    ),
]


@pytest.mark.parametrize(("message", "plans"), BROKEN, ids=[message for message, _ in BROKEN])
def test_broken_plan_is_an_engine_error_and_poisons(
    random_model_dir: Path, message: str, plans: Callable[[CpuEngine], list[StepPlan]]
) -> None:
    engine = CpuEngine.load(random_model_dir, OPTIONS)
    try:
        *before, broken = plans(engine)
        for plan in before:
            engine.step(plan)
        with pytest.raises(EngineError, match="the plan breaks the engine contract") as caught:
            engine.step(broken)
        assert message in str(caught.value)
        with pytest.raises(EngineError, match="step after a failed step"):
            engine.step(StepPlan(9))
    finally:
        engine.close()
