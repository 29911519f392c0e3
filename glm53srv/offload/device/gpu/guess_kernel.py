"""Guesses which experts the next sparse layer will pick, and lists the copies that are worth an idle link.

The rule is glm53srv/offload/look_ahead.py, integer for integer. Three small kernels: products by many
programs, each row's best by one, the choice by one. They run beside the copies of the layer in front.
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
CLOSED_WORD = tl.constexpr(1)
"""Of a gate; before it the most experts for a layer, behind it for one behind a latent attention."""


@triton.jit(do_not_specialize=["num_experts", "input_stride", "expert_stride", "max_rows"])
def score_experts(
    x,
    gate,
    sums,
    num_experts,
    input_stride,
    expert_stride,
    max_rows,
    hidden: tl.constexpr,
    scored: tl.constexpr,
    inputs: tl.constexpr,
):
    """See launch_scores. A program adds `inputs` products of `scored` experts for one row."""
    expert = tl.program_id(0) * scored + tl.arange(0, scored)
    row, piece = tl.program_id(1), tl.program_id(2)
    there = expert < num_experts
    item = piece * inputs + tl.arange(0, inputs)
    inside = item < hidden
    value = tl.load(x + row * hidden + item, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(
        gate + item[:, None].to(tl.int64) * input_stride + expert[None, :].to(tl.int64) * expert_stride,
        mask=inside[:, None] & there[None, :],
        other=0.0,
    )
    total = tl.sum(value[:, None] * weight.to(tl.float32), axis=0)
    tl.store(sums + (piece * max_rows + row) * num_experts + expert, total, mask=there)


def num_pieces(hidden: int) -> int:
    """Give the pieces into which a row's products are cut."""
    return -(-hidden // INPUTS)


def launch_scores(x: torch.Tensor, router: RouterWeights, sums: torch.Tensor) -> None:
    """Apply a router's matrix to x, float16 (rows, hidden), contiguous, piece by piece.

    sums: float32 (num_pieces(hidden), any, experts), rows from the first on. The router itself rounds its
    logits to float16, which is of no account for a guess. Many small programs: what is forked off the same
    plan begins only when this kernel ends (40 us with a program per 16 experts; H200, traced, 2026-11-30).
    """
    rows, hidden = x.shape
    num_experts = router.gate.shape[1]
    score_experts[(triton.cdiv(num_experts, SCORED), rows, num_pieces(hidden))](
        x,
        router.gate,
        sums,
        num_experts,
        router.gate.stride(0),
        router.gate.stride(1),
        sums.shape[1],
        hidden=hidden,
        scored=SCORED,
        inputs=INPUTS,
    )


@triton.jit(do_not_specialize=["num_experts", "max_rows"])
def list_experts(
    sums, bias, lists, num_experts, max_rows, pieces: tl.constexpr, top_k: tl.constexpr, width: tl.constexpr
):
    """See launch_lists. A program lists one row's. width: power of two >= num_experts."""
    row = tl.program_id(0)
    expert = tl.arange(0, width)
    there = expert < num_experts
    logit = tl.zeros((width,), tl.float32)
    for piece in range(pieces):
        logit += tl.load(sums + (piece * max_rows + row) * num_experts + expert, mask=there, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logit)) + tl.load(bias + expert, mask=there, other=0.0)
    score = tl.where(there, score, -float("inf"))
    for rank in range(top_k):
        best = tl.max(score, axis=0)
        found = tl.min(tl.where((score == best) & there, expert, width), axis=0)
        # No score equals a NaN: then nothing is listed, and no expert that does not exist.
        tl.store(lists + row * top_k + rank, tl.where(found < num_experts, found, -1).to(tl.int64))
        score = tl.where(expert == found, -float("inf"), score)


def launch_lists(sums: torch.Tensor, bias: torch.Tensor, lists: torch.Tensor, rows: int) -> None:
    """List each row's best experts by sigmoid plus bias, float32 (experts,): int64 (any, top_k), -1 for none.

    sums: float32 (pieces, any, experts), as launch_scores leaves them. Among equals the lower expert comes
    first.
    """
    pieces, max_rows, num_experts = sums.shape
    width = power_of_two(num_experts)
    list_experts[(rows,)](
        sums, bias, lists, num_experts, max_rows, pieces=pieces, top_k=lists.shape[1], width=width
    )


@triton.jit(do_not_specialize=["home", "buffer", "rows", "num_ahead"])
def choose_experts(
    lists,
    slots,
    experts,
    sources,
    targets,
    count,
    gate,
    home,
    buffer,
    rows,
    num_ahead,
    top_k: tl.constexpr,
    width: tl.constexpr,
    record_bytes: tl.constexpr,
    most_word: tl.constexpr,
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
    most = tl.minimum(tl.load(gate + most_word), num_ahead)
    is_chosen = is_open & (number < most) & (tl.load(gate + CLOSED_WORD) == 0)
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
    gate: torch.Tensor,
    *,
    is_across: bool = False,
) -> None:
    """Choose what is fetched of the experts that rows list, int64 (any, top_k), best first.

    slots: int32 (experts,), the row of the residency table of the layer that is guessed, home: the address of
    its first record. fetches: its buffers, whose lists are written. experts: int64 (fetches.num_experts,),
    written as far as fetches.count says. gate: int32 (3,), at most so many, none if the second is not 0, and
    at most so many if the layer is_across.
    """
    top_k = lists.shape[1]
    choose_experts[(1,)](
        lists,
        slots,
        experts,
        fetches.sources,
        fetches.targets,
        fetches.count,
        gate,
        home,
        fetches.address,
        rows,
        fetches.num_experts,
        top_k=top_k,
        width=power_of_two(rows * top_k),
        record_bytes=record_bytes,
        most_word=2 if is_across else 0,
    )
