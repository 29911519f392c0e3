"""Which experts are fetched before their layer is planned: the rule of guesses. A device kernel must give the
same integers.

While a layer computes, the router of the next sparse layer is applied to the same input: it names about two
thirds of what it will pick then. A few of these experts that VRAM lacks are fetched over the link at once:

    1. Each row lists its top_k best experts by the score by which that router chooses, best first.
    2. Places are read by rank, the rows in order within a rank. A place is open if its expert stands at no
       earlier place and the expert's table entry is ABSENT.
    3. The first num_ahead open places are fetched, in this order.
    4. In the layer's plan a standing pick that is a miss and was fetched counts among the hits where the
       split looks up what the CPU takes (split.py), and its lane is LINK: it came that way. It takes no
       landing buffer, and may take an offer as other experts of the link do (offers.py).

Ranks compare between rows, scores do not. Why no further than top_k: of GLM-5.3-Flash's picks the 8 best
guesses name .65 to .69, the 16 best .845 (measured by others, 0xSero/glm53-flash-offload), so one in six of
the second eight is right, and a wrong one takes the link's time from the layer's own. Why ABSENT alone:
a barred expert's copy is on its way already.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from glm53srv.offload.offers import ABSENT

Ints = NDArray[np.int32]

MAX_AHEAD = 4
"""Experts of a layer that may be fetched before its plan, a power of two."""
NUM_AHEAD = 2
"""From a layer's own copies to the next one's plan an H200 has 0.23 or 0.36 ms (traced, 2026-11-30), and its
copy engine carries an expert in 0.18. What does not fit shares the link with the next layer's own copies, and
one guess in three is wrong. Three were as good in fast mode and worse in exact. At most: where gaps hold
fewer, fewer are fetched, see AheadTuner."""
MORE_AHEAD = 1
"""So many more, at most, in steps of several rows, whose attention and experts take longer: of 2 / 4 rows
three experts gave 25.6 / 24.0 tok/s in exact mode, two 23.1 / 21.5 (one start of an H200, 2026-11-30). In
fast mode gaps hold three behind a latent attention only: so 2 / 4 rows gave 49.0, 45.9 / 50.2, 45.0 tok/s,
and 45.6, 46.8 / 42.8, 46.7 with three everywhere (one start, 2026-12-01)."""

LEAST_SHARE = 0.4
"""Of a copy that a gap must hold for one to be begun in it."""
BEFORE_GAP = 0.25
"""Of a copy that is done before the gap, beside a layer's last experts.

Both by bench/lanes_model.py, for links of 54, 25, 12.6 and 6.3 GB/s and one to four rows: what they choose is
within 1 % of the best there, but for one row on an H200, where the model prefers one and two by 2 % and the
H200 itself two and two (2026-12-01). Two for every layer of one row cost 4 % at 25 GB/s and 40 % at 12.6."""
GAP_STEPS = 32
"""Steps after which one counts 1/e."""


def fits_gap(gap_ms: float, copy_ms: float) -> int:
    """Give how many experts are worth fetching in a gap between two layers in which the link idles.

    copy_ms: one expert by the copy engine. What does not fit shares the link with the next layer's own
    copies, and one guess in three is wrong.
    """
    share = gap_ms / copy_ms
    return 0 if share < LEAST_SHARE else math.ceil(share + BEFORE_GAP)


class AheadTuner:
    """How many experts a layer's gap holds, by what gaps take on this machine. Engine thread only.

    Gaps are those of steps of so many rows, without and with a latent attention between the layers.
    """

    def __init__(self, copy_ms: float | None) -> None:
        """copy_ms: one expert by the copy engine, None if that was not measured."""
        self._copy_ms = copy_ms
        self._gaps: dict[tuple[int, bool], float] = {}

    def observe(self, num_rows: int, gap_ms: NDArray[np.float64], across: NDArray[np.bool_]) -> None:
        """Take a step: gap_ms (layers,), of the gap in front of each layer, NaN where it is not known.

        across: bool (layers,), whether it has a latent attention.
        """
        for is_across in (False, True):
            found = gap_ms[(across == is_across) & np.isfinite(gap_ms)]
            if found.size:
                newest, key = max(0.0, float(np.median(found))), (num_rows, is_across)
                before = self._gaps.get(key, newest)
                self._gaps[key] = before + (newest - before) / GAP_STEPS

    def most(self, num_rows: int) -> tuple[int, int]:
        """Give how many experts may be fetched for a layer without and with a latent attention in front.

        MAX_AHEAD while nothing is known.
        """
        return self._most(num_rows, is_across=False), self._most(num_rows, is_across=True)

    def _most(self, num_rows: int, *, is_across: bool) -> int:
        gap_ms = self._gaps.get((num_rows, is_across))
        if gap_ms is None or self._copy_ms is None:
            return MAX_AHEAD
        return min(MAX_AHEAD, fits_gap(gap_ms, self._copy_ms))


def num_buffers_ahead(num_ahead: int) -> int:
    """Give the experts of a layer that must find a buffer where num_ahead are fetched in steps of one row."""
    return min(MAX_AHEAD, num_ahead + MORE_AHEAD) if num_ahead else 0


def choose_guesses(lists: NDArray[np.integer], entries: Ints, num_ahead: int) -> Ints:
    """Apply the rule to one layer: int32 (at most num_ahead,), in the order in which they are fetched.

    lists: integer (rows, top_k), experts by falling score, -1 for none. entries: int32 (experts,), the
    layer's row of the residency table.
    """
    by_rank = lists.T.reshape(-1)
    present = by_rank[by_rank >= 0]
    _, first = np.unique(present, return_index=True)
    standing = present[np.sort(first)]
    chosen: Ints = standing[entries[standing] == ABSENT][:num_ahead].astype(np.int32)
    return chosen


def list_guesses(scores: NDArray[np.float32], top_k: int) -> Ints:
    """Give each row's best experts: int32 (rows, top_k), the lower expert first among equals.

    scores: float32 (rows, experts), without NaN.
    """
    return np.argsort(-scores, axis=1, kind="stable")[:, :top_k].astype(np.int32)
