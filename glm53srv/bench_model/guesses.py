"""Guesses as good as published ones, for traces whose picks no router's input could tell.

A router applied one layer early names .65 to .69 of GLM-5.3-Flash's picks (measured by others:
0xSero/glm53-flash-offload). So each pick is guessed with that probability; what is missing is filled up with
wrong experts, the most recent of the stream by the score that recalls picks best (sum of .3^age), since a
router that errs names popular experts, which are often in VRAM already.
"""

from __future__ import annotations

import numpy as np

from glm53srv.bench_model.routes import NUM_EXPERTS, Routes

RECALL = 0.67
DECAY = 0.3


def guess_routes(
    routes: Routes, recall: float = RECALL, *, seed: int = 0, num_experts: int = NUM_EXPERTS
) -> Routes:
    """Guess each token's picks: integer as routes, (tokens, layers, top_k), distinct in a row, in any order.

    Ranks say nothing here: right and wrong guesses are shuffled. Raises ValueError for a recall that is no
    probability, or where there are too few experts to be wrong.
    """
    num_tokens, num_layers, top_k = routes.shape
    if not 0 <= recall <= 1 or num_experts < 2 * top_k:
        raise ValueError(f"need a recall in 0..1, not {recall}, and twice {top_k} experts, not {num_experts}")
    rng = np.random.default_rng((seed, 0x60E55))
    recent = np.zeros((num_layers, num_experts))
    guesses = np.empty_like(routes)
    for token in range(num_tokens):
        picks = routes[token].astype(np.intp)
        score = recent + 1e-9 * rng.random(recent.shape)  # none seen yet: any
        is_known = rng.random(picks.shape) < recall
        np.put_along_axis(score, picks, np.where(is_known, np.inf, -np.inf), 1)
        best = np.argpartition(-score, top_k - 1, axis=1)[:, :top_k]
        guesses[token] = rng.permuted(best, axis=1)
        recent *= DECAY
        np.put_along_axis(recent, picks, np.take_along_axis(recent, picks, 1) + 1.0, 1)
    return guesses
