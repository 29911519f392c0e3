"""Guesses which experts the next sparse layer will pick, and lists the copies that are worth an idle link.

The rule is glm53srv/offload/look_ahead.py, integer for integer. Three small kernels: scores by many programs,
each row's best by one, the choice by one. They run beside the copies of the layer in front, so nothing waits
for them: their speed is not worth a fourth reading of the router's weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm53srv.offload import offers as offers_rule
from glm53srv.offload.device.gpu.launch import Landing, RouterWeights, power_of_two

SCORED = 16
"""Experts of one program: 32 bytes of a row of weights, what memory gives at once."""
INPUTS = 256
"""Inputs of a program's piece."""

ABSENT = tl.constexpr(offers_rule.ABSENT)


@triton.jit(do_not_specialize=["num_experts", "input_stride", "expert_stride"])
def score_experts(
    x,
    gate,
    bias,
    scores,
    num_experts,
    input_stride,
    expert_stride,
    hidden: tl.constexpr,
    scored: tl.constexpr,
    inputs: tl.constexpr,
):
    """See launch_scores. A program scores `scored` experts for one row."""
    expert = tl.program_id(0) * scored + tl.arange(0, scored)
    row = tl.program_id(1)
    there = expert < num_experts
    columns = gate + expert[None, :].to(tl.int64) * expert_stride
    total = tl.zeros((scored,), tl.float32)
    for begin in range(0, hidden, inputs):
        item = begin + tl.arange(0, inputs)
        inside = item < hidden
        value = tl.load(x + row * hidden + item, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(
            columns + item[:, None].to(tl.int64) * input_stride,
            mask=inside[:, None] & there[None, :],
            other=0.0,
        )
        total += tl.sum(value[:, None] * weight.to(tl.float32), axis=0)
    score = 1.0 / (1.0 + tl.exp(-total)) + tl.load(bias + expert, mask=there, other=0.0)
    tl.store(scores + row * num_experts + expert, score, mask=there)


def launch_scores(x: torch.Tensor, router: RouterWeights, scores: torch.Tensor) -> None:
    """Apply a router to x, float16 (rows, hidden), contiguous: sigmoid plus bias, to float32 (rows, experts).

    scores: at least so many rows, written from the first on. Products and sums in float32: the router itself
    rounds its logits to float16, which is of no account for a guess.
    """
    rows, hidden = x.shape
    num_experts = router.gate.shape[1]
    score_experts[(triton.cdiv(num_experts, SCORED), rows)](
        x,
        router.gate,
        router.bias,
        scores,
        num_experts,
        router.gate.stride(0),
        router.gate.stride(1),
        hidden=hidden,
        scored=SCORED,
        inputs=INPUTS,
    )


@triton.jit(do_not_specialize=["num_experts"])
def list_experts(scores, lists, num_experts, top_k: tl.constexpr, width: tl.constexpr):
    """See launch_lists. A program lists one row's. width: power of two >= num_experts."""
    row = tl.program_id(0)
    expert = tl.arange(0, width)
    there = expert < num_experts
    score = tl.load(scores + row * num_experts + expert, mask=there, other=-float("inf"))
    for rank in range(top_k):
        best = tl.max(score, axis=0)
        found = tl.min(tl.where((score == best) & there, expert, width), axis=0)
        # No score equals a NaN: then nothing is listed, and no expert that does not exist.
        tl.store(lists + row * top_k + rank, tl.where(found < num_experts, found, -1).to(tl.int64))
        score = tl.where(expert == found, -float("inf"), score)


def launch_lists(scores: torch.Tensor, lists: torch.Tensor, rows: int) -> None:
    """List the best experts of each row's scores, float32 (any, experts): int64 (any, top_k), -1 for none.

    Among equals the lower expert comes first.
    """
    num_experts = scores.shape[1]
    list_experts[(rows,)](scores, lists, num_experts, top_k=lists.shape[1], width=power_of_two(num_experts))


@triton.jit(do_not_specialize=["home", "buffer", "rows", "num_ahead"])
def choose_experts(
    lists,
    slots,
    experts,
    sources,
    targets,
    count,
    home,
    buffer,
    rows,
    num_ahead,
    top_k: tl.constexpr,
    width: tl.constexpr,
    record_bytes: tl.constexpr,
):
    """See launch_choice. width: power of two >= rows * top_k."""
    place = tl.arange(0, width)
    inside = place < rows * top_k
    rank, row = place // rows, place % rows
    expert = tl.load(lists + row * top_k + rank, mask=inside, other=-1).to(tl.int32)
    present = expert >= 0
    same = (expert[:, None] == expert[None, :]) & present[None, :]
    first = tl.min(tl.where(same, place[None, :], width), axis=1)
    entry = tl.load(slots + tl.where(present, expert, 0), mask=present, other=0)
    is_open = present & (first == place) & (entry == ABSENT)
    is_before = is_open[None, :] & (place[None, :] < place[:, None])
    number = tl.sum(is_before.to(tl.int32), axis=1)
    is_chosen = is_open & (number < num_ahead)
    tl.store(experts + number, expert.to(tl.int64), mask=is_chosen)
    tl.store(sources + number, home + expert.to(tl.int64) * record_bytes, mask=is_chosen)
    tl.store(targets + number, buffer + number.to(tl.int64) * record_bytes, mask=is_chosen)
    tl.store(count, tl.sum(is_chosen.to(tl.int32), axis=0))


def launch_choice(
    lists: torch.Tensor,
    rows: int,
    slots: torch.Tensor,
    home: int,
    record_bytes: int,
    fetches: Landing,
    experts: torch.Tensor,
) -> None:
    """Choose what is fetched of the experts that rows list, int64 (any, top_k), best first.

    slots: int32 (experts,), the row of the residency table of the layer that is guessed, home: the address of
    its first record. fetches: its buffers, whose lists are written. experts: int64 (fetches.num_experts,),
    written as far as fetches.count says.
    """
    top_k = lists.shape[1]
    choose_experts[(1,)](
        lists,
        slots,
        experts,
        fetches.sources,
        fetches.targets,
        fetches.count,
        home,
        fetches.address,
        rows,
        fetches.num_experts,
        top_k=top_k,
        width=power_of_two(rows * top_k),
        record_bytes=record_bytes,
    )
