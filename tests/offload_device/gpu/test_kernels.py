"""Table updates, copies and the combination under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glm53srv.model.checkpoint import CodebookName
from glm53srv.offload.device.gpu.combine_kernel import launch_combine
from glm53srv.offload.device.gpu.copy_kernel import USUAL, CopyShape, launch_gather
from glm53srv.offload.device.gpu.cpu_lane import make_ring
from glm53srv.offload.device.gpu.host_log import StepLog, read_stamps
from glm53srv.offload.device.gpu.host_reader import launch_fetch
from glm53srv.offload.device.gpu.launch import MailRing, cut_of, make_landing
from glm53srv.offload.device.gpu.table_kernel import launch_update
from glm53srv.offload.device.layout import Part, RecordLayout
from glm53srv.offload.device.mailbox import DONE, Mailbox, MailboxShape
from glm53srv.offload.device.region import Region
from glm53srv.offload.offers import ABSENT
from glm53srv.offload.residency_update import ResidencyUpdate

RECORD = 36_864


def int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))


@pytest.mark.parametrize("seed", range(200))
def test_updates_equal_those_of_the_rule(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, experts = int(rng.integers(1, 8)), int(rng.integers(1, 300))
    table = rng.integers(-2, 50, (layers, experts)).astype(np.int32)
    table[rng.random(table.shape) < 0.4] = ABSENT
    keys = rng.permutation(layers * experts).astype(np.int32)
    num_unmap, num_map = (int(count) for count in rng.integers(0, min(len(keys) // 2, 300) + 1, 2))
    unmap, mapped = keys[:num_unmap], keys[num_unmap : num_unmap + num_map]
    slots = rng.integers(0, 1000, len(mapped), np.int32)
    bar = rng.permutation(keys)[: int(rng.integers(0, 300))]
    none = np.empty(0, np.int32)
    expected = table.copy()
    ResidencyUpdate(unmap, mapped, slots, none, none, bar_keys=bar).change(expected.reshape(-1))
    changed = torch.from_numpy(table)
    launch_update(changed, int32(unmap), int32(bar), int32(mapped), int32(slots))
    np.testing.assert_array_equal(changed.numpy(), expected)


def test_an_update_of_two_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="2 keys for 1 slots"):
        launch_update(
            torch.zeros(4, dtype=torch.int32),
            int32(np.array([])),
            int32(np.array([])),
            int32(np.array([0, 1])),
            int32(np.array([3])),
        )


@pytest.mark.parametrize(
    ("num_copies", "num_bytes"), [(0, RECORD), (1, 16), (1, RECORD), (5, 49_168), (40, 256)]
)
@pytest.mark.parametrize("shape", [USUAL, CopyShape(32, 4, 2048)])
def test_copies_move_every_byte_and_no_other(num_copies: int, num_bytes: int, shape: CopyShape) -> None:
    rng = np.random.default_rng(num_copies)
    stride = -(-num_bytes // 256) * 256 + 256  # a gap behind each record must stay as it is
    source, target = Region(64 * stride), Region(64 * stride)
    source.array()[:] = rng.integers(0, 256, source.num_bytes, dtype=np.uint8)
    target.array()[:] = 0xEE
    keys, slots = rng.permutation(64)[:num_copies], rng.permutation(64)[:num_copies]
    expected = target.array().copy()
    for key, slot in zip(keys, slots, strict=True):
        begin = int(slot) * stride
        expected[begin : begin + num_bytes] = source.array()[int(key) * stride :][:num_bytes]
    landing = make_landing(torch.zeros((max(1, num_copies), num_bytes), dtype=torch.uint8))
    landing.sources[:num_copies] = torch.from_numpy(source.address + keys.astype(np.int64) * stride)
    landing.targets[:num_copies] = torch.from_numpy(target.address + slots.astype(np.int64) * stride)
    landing.count.fill_(num_copies)
    launch_gather(landing, num_bytes, shape)
    np.testing.assert_array_equal(target.array(), expected)


@pytest.mark.parametrize("words", [(48, 48, 48), (16, 24, 128), (40, 56, 8 * 7)])
@pytest.mark.parametrize(("hidden", "blocks"), [(128, 2), (256, 5), (384, 16)])
def test_of_a_shared_expert_only_the_rest_is_copied(
    words: tuple[int, int, int], hidden: int, blocks: int
) -> None:
    layout = RecordLayout(hidden, 128 * blocks, words, CodebookName.MUL1)
    size, rng = layout.record_bytes, np.random.default_rng(blocks)
    source, target = Region(3 * size), Region(3 * size)
    source.array()[:] = rng.integers(0, 256, source.num_bytes, dtype=np.uint8)
    target.array()[:] = 0xEE
    own = torch.from_numpy(rng.uniform(0.5, 1.0, layout.intermediate).astype(np.float16))
    skips = [0, int(rng.integers(1, blocks)), 0]
    landing = make_landing(torch.zeros((3, 16), dtype=torch.uint8), layout.intermediate)
    landing.scales.fill_(torch.nan)
    for index, skip in enumerate(skips):
        landing.sources[index] = source.address + index * size
        landing.targets[index] = target.address + index * size
        landing.skips[index] = skip
    landing.mask[0], landing.mask[1] = own.data_ptr(), skips[1]
    landing.count.fill_(3)
    launch_gather(landing, size, cut=cut_of(layout))
    expected = source.array().reshape(3, -1).copy()
    for part in Part:  # a block is 8 tiles: columns of gate and up, rows of down
        begin = layout.offset(part)
        matrix = (
            expected[1, begin : begin + layout.num_bytes(part)].view(np.int16).reshape(layout.shape(part))
        )
        left_out = 8 * skips[1]
        (matrix[:left_out] if part is Part.DOWN else matrix[:, :left_out])[:] = np.int16(-4370)  # 0xEEEE
    np.testing.assert_array_equal(target.array().reshape(3, -1), expected)
    masked = own.clone()
    masked[: 128 * skips[1]] = 0
    assert torch.equal(landing.scales, masked)


def test_without_a_shared_expert_no_scales_are_written() -> None:
    layout = RecordLayout(128, 256, (48, 48, 48), CodebookName.MUL1)
    landing = make_landing(torch.zeros((1, layout.record_bytes), dtype=torch.uint8), layout.intermediate)
    landing.scales.fill_(3.0)
    launch_gather(landing, layout.record_bytes, cut=cut_of(layout))
    assert bool((landing.scales == 3.0).all())


@pytest.mark.parametrize("num_bytes", [4, 4092, 4096, 4100, 40_000])
def test_fetching_copies_every_word(num_bytes: int) -> None:
    source = torch.from_numpy(np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8))
    target = torch.zeros(num_bytes + 4, dtype=torch.uint8)
    launch_fetch(source, target[:num_bytes])
    assert torch.equal(target[:num_bytes], source)
    assert not target[num_bytes:].any()


def test_fetching_between_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot fetch 8 bytes into 4"):
        launch_fetch(torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match="cannot fetch 3 bytes into 3"):
        launch_fetch(torch.zeros(3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8))


def test_a_record_of_broken_words_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot copy 24 bytes"):
        launch_gather(make_landing(torch.zeros((1, 24), dtype=torch.uint8)), 24)


def test_without_buffers_nothing_is_copied() -> None:
    landing = make_landing(torch.zeros((0, 32), dtype=torch.uint8))
    landing.count.fill_(1)  # to be read by no kernel: its addresses are 0
    launch_gather(landing, 32)


def answered(partial: np.ndarray, layer: int) -> tuple[MailRing, Mailbox]:
    """Answer job 7 + layer of a new mailbox with `partial`; the mailbox is the ring's memory."""
    rows, hidden = partial.shape
    mailbox = Mailbox(MailboxShape(rows, 4, hidden, num_cells=4, first_seq=7))
    ring = make_ring(mailbox, "cpu")
    ring.first_seq.fill_(7)
    mailbox.partial(7 + layer, rows)[:] = partial
    mailbox.cell(7 + layer)[DONE : DONE + 4].view(np.uint32)[0] = 7 + layer
    return ring, mailbox


@pytest.mark.parametrize(("rows", "hidden"), [(1, 128), (1, 4096), (4, 4096), (3, 640)])
@pytest.mark.parametrize("counts", [[1, 2, 3, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0, 5]])
def test_combining_adds_each_float_once(rows: int, hidden: int, counts: list[int]) -> None:
    rng = np.random.default_rng(rows * hidden)
    out, partial = (rng.normal(size=(rows, hidden)).astype(np.float32) for _ in range(2))
    total = torch.from_numpy(out.copy())
    ring, _mailbox = answered(partial, 2)
    launch_combine(total, int32(np.array(counts)), 2, ring)
    np.testing.assert_array_equal(total.numpy(), out + partial)


@pytest.mark.parametrize("has_hits", [False, True])
def test_an_empty_job_is_waited_for_and_not_read(has_hits: bool) -> None:
    out = np.ones((2, 256), np.float32)
    total = torch.from_numpy(out.copy())
    ring, _mailbox = answered(np.full((2, 256), np.nan, np.float32), 1)
    hits = torch.arange(4 * 256, dtype=torch.float32).view(4, 256) if has_hits else None
    launch_combine(total, int32(np.array([8, 0, 0, 0, 0, 0, 0])), 1, ring, hits)
    np.testing.assert_array_equal(total.numpy(), out if hits is None else out + hits[:2].numpy())


@pytest.mark.parametrize(("rows", "hidden"), [(1, 128), (3, 4096)])
def test_combining_adds_what_was_computed_before(rows: int, hidden: int) -> None:
    rng = np.random.default_rng(rows)
    out, partial, hits = (rng.normal(size=(rows, hidden)).astype(np.float32) for _ in range(3))
    total = torch.from_numpy(out.copy())
    ring, _mailbox = answered(partial, 2)
    launch_combine(total, int32(np.array([1, 2, 3, 0, 0, 0, 0])), 2, ring, torch.from_numpy(hits))
    np.testing.assert_array_equal(total.numpy(), out + hits + partial)


def test_times_of_a_shared_expert_count_it_on_both_sides() -> None:
    # words: VRAM, link, CPU, then posted, arrived and answered in ns, then blocks on the CPU
    counts = np.array([[3, 3, 1, 100, 900_100, 950_100, 4, 0], [0, 1, 0, 0, 0, 0, 0, 0]], np.int32)
    guesses = np.array([[2, 1], [0, 0]], np.int32)  # one that is right is off the link, too
    nothing = np.empty((2, 0), np.int32)
    times = read_stamps(StepLog(nothing, nothing, nothing.astype(np.int8), counts, guesses), num_blocks=16)
    assert times.gpu_lanes == [(4.25, 1.75, 0.9)]
    assert times.wait_ms.tolist() == [0.05]
    np.testing.assert_array_equal(times.cpu_ms, [0.95, np.nan])


def test_the_time_of_an_answer_is_known_where_it_was_waited_for() -> None:
    end = 2**31 - 100  # the clock's low word wraps between post and answer
    counts = np.array([[0, 1, 1, 100, 900_100, 904_100, 0, 0], [0, 1, 1, end, 0, 0, 0, 0]], np.int64)
    counts[1, 4:6] = np.array([end + 300_000, end + 420_000]) - 2**32
    nothing, guesses = np.empty((2, 0), np.int32), np.zeros((2, 2), np.int32)
    log = StepLog(nothing, nothing, nothing.astype(np.int8), counts.astype(np.int32), guesses)
    np.testing.assert_array_equal(read_stamps(log, 16).cpu_ms, [np.nan, 0.42])


def test_a_gap_is_from_the_answer_in_front_to_the_plan() -> None:
    counts, end = np.zeros((5, 8), np.int64), 2**31 - 100  # the clock's low word wraps in the last gap
    counts[:4, 3:6] = [[100, 900_100, 950_100], [1_100_100, 1_500_000, 1_500_100], [0, 0, 0], [9, 10, end]]
    counts[4, 3:6] = end + 250_000 - 2**32
    nothing, guesses = np.empty((5, 0), np.int32), np.zeros((5, 2), np.int32)
    log = StepLog(nothing, nothing, nothing.astype(np.int8), counts.astype(np.int32), guesses)
    np.testing.assert_array_equal(read_stamps(log, 16).gap_ms, [np.nan, 0.15, np.nan, np.nan, 0.25])
