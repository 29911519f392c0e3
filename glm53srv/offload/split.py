"""The split rule: which lane computes each pick of a step. A device kernel must give the same integers.

For one layer with P = rows * top_k picks (row-major, -1 where there is no pick):

    1. first[i] = the smallest j with picks[j] == picks[i]. Pick i stands for its expert if first[i] == i.
    2. A standing pick is a hit if slots[picks[i]] >= 0, else a miss. H and M count them, but a miss that was
       fetched ahead (look_ahead.py) counts in H and is no miss in what follows: its lane is LINK.
    3. An expert has num_parts equal parts of its neurons; num_cpu = cpu_count[H, M] // num_parts whole ones
       and share = cpu_count[H, M] % num_parts parts of one more are the CPU's.
    4. rank[i] of a standing miss = the number of standing misses j with (heat[j], expert[j]) < (heat[i],
       expert[i]), compared in that order: coldest first, the lower expert first among equals.
    5. A hit's lane is VRAM; a miss's lane is CPU if rank < num_cpu; SPLIT if rank == num_cpu and share > 0:
       the CPU computes its first share parts, the GPU the rest; else LINK.
    6. Every pick takes the lane of first[i]; an absent pick has lane NONE and first[i] == i.

All arithmetic is on integers. The order of picks and rows has no influence but on `first`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HEAT_ONE = 1 << 20
"""Integer heat of an expert picked in every step; see residency.ResidencyPolicy.heat_table."""


class Lane(enum.IntEnum):
    """Who computes a pick. The values are those in the routing log."""

    NONE = 0  # no pick here
    VRAM = 1  # from its slot
    LINK = 2  # by the GPU, read from the home copy over the link
    CPU = 3  # by the CPU, from the home copy
    SPLIT = 4  # by both: the CPU its first parts, the GPU the rest over the link


@dataclass(frozen=True, slots=True)
class Split:
    """The lanes of a step. lanes: int8 (layers, P). first: int32 (layers, P), see the head of the file.

    num_hits, num_link, num_cpu: int32 (layers,), distinct experts per lane; one that is shared is among those
    of the link. share: int32 (layers,), its parts that the CPU computes, of num_parts; 0 where none is.
    is_ahead: bool (layers, P), standing picks that were fetched ahead.
    """

    lanes: NDArray[np.int8]
    first: NDArray[np.int32]
    num_hits: NDArray[np.int32]
    num_link: NDArray[np.int32]
    num_cpu: NDArray[np.int32]
    is_ahead: NDArray[np.bool_]
    share: NDArray[np.int32]
    num_parts: int

    @property
    def link_load(self) -> NDArray[np.float64]:
        """Experts that the link carries, the shared one by its rest: (layers,)."""
        return np.asarray(self.num_link - self.share / self.num_parts, np.float64)

    @property
    def cpu_load(self) -> NDArray[np.float64]:
        """Experts that the CPU computes, the shared one by its part: (layers,)."""
        return np.asarray(self.num_cpu + self.share / self.num_parts, np.float64)

    @property
    def standing(self) -> NDArray[np.bool_]:
        """Picks that stand for their expert: bool (layers, P)."""
        return np.asarray((self.first == np.arange(self.first.shape[1])) & (self.lanes != Lane.NONE))


def split_picks(
    picks: NDArray[np.integer],
    slots: NDArray[np.int32],
    heat: NDArray[np.int32],
    cpu_count: NDArray[np.int32],
    fetched: NDArray[np.int32] | None = None,
    num_parts: int = 1,
) -> Split:
    """Apply the rule to several layers at once.

    picks: integer (layers, P), -1 for none. slots: int32 (layers, experts), -1 if not in VRAM. heat: int32
    (layers, experts). cpu_count: int32 (P + 1, P + 1) or larger, in parts, see cost.cpu_count_table. fetched:
    int32 (layers, any number), experts that were fetched ahead, -1 for none. Raises IndexError for an expert
    that does not exist.
    """
    num_layers, width = picks.shape
    expert = picks.astype(np.int32)
    present = expert >= 0
    layer = np.arange(num_layers)[:, None]
    place = np.arange(width, dtype=np.int32)
    same = expert[:, :, None] == expert[:, None, :]
    first = np.where(present, same.argmax(axis=2), place).astype(np.int32)
    standing = present & (first == place)
    looked_up = np.where(present, expert, 0)
    is_hit = standing & (slots[layer, looked_up] >= 0)
    is_ahead = np.zeros(picks.shape, np.bool_)
    if fetched is not None:
        is_ahead = standing & ~is_hit & (expert[:, :, None] == fetched[:, None, :]).any(axis=2)
    is_miss = standing & ~is_hit & ~is_ahead
    num_hits = is_hit.sum(axis=1, dtype=np.int32)
    num_ahead = is_ahead.sum(axis=1, dtype=np.int32)
    num_misses = is_miss.sum(axis=1, dtype=np.int32)
    num_cpu, share = np.divmod(cpu_count[num_hits + num_ahead, num_misses], np.int32(num_parts))
    # One sortable number per pick: heat above, expert below. int64, since heat takes up to 31 bits.
    order = (heat[layer, looked_up].astype(np.int64) << 20) | looked_up
    colder = is_miss[:, None, :] & (order[:, None, :] < order[:, :, None])
    rank = colder.sum(axis=2, dtype=np.int32)
    lane = np.where(is_hit, np.int8(Lane.VRAM), np.int8(Lane.NONE))
    lane = np.where(is_miss, np.where(rank < num_cpu[:, None], np.int8(Lane.CPU), np.int8(Lane.LINK)), lane)
    is_split = is_miss & (rank == num_cpu[:, None]) & (share > 0)[:, None]
    lane = np.where(is_split, np.int8(Lane.SPLIT), lane)
    lane = np.where(is_ahead, np.int8(Lane.LINK), lane)
    lanes = np.where(present, np.take_along_axis(lane, first, axis=1), np.int8(Lane.NONE)).astype(np.int8)
    num_link = num_misses - num_cpu + num_ahead
    return Split(lanes, first, num_hits, num_link, num_cpu, is_ahead, share, num_parts)
