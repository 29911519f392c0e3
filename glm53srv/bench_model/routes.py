"""Synthetic expert routes with the skew and locality published for GLM-5.3-Flash.

The model. A token's score of an expert is a fixed offset plus Gaussian noise of unit variance, and the top_k
largest scores win. With hundreds of experts the winning threshold hardly moves, so an expert of offset b is
picked with probability Phi(b - threshold): an offset is the normal quantile of the wanted probability, and no
curve has to be fitted. The noise is what makes neighbouring tokens agree:

    conversation   drawn once per conversation: its own working set
    theme, echo    first-order autoregressive, restarted with the conversation: minutes, the last few tokens
    white          the rest of the unit variance

The published skew was counted over four conversations, so part of it is their conversation noise; the offsets
are narrower by that share (see `_offsets`).

Sources. SHARES, HOTTEST: routing statistics of 0xSero/glm53-flash-offload, 9,250 decode tokens, model
layers 3, 7, 22, 36 and 43; layers between are interpolated, so assumed. The variance shares and time
constants below are our own fit to the published recall of the next top 8 from recent tokens (RECALL) and to
published cache replays; `python -m bench.synth_routes` prints all of them, docs/offload.md has the table.

Not modelled: ties between layers, prefill, and anything two streams share beyond popularity.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Routes = NDArray[np.uint16]

NUM_LAYERS, NUM_EXPERTS, TOP_K = 42, 288, 8
FIRST_MODEL_LAYER = 3
CONVERSATION_TOKENS = 2300  # 9,250 tokens are taken to be four conversations

ANCHOR_LAYERS = (3, 7, 22, 36, 43)
SHARE_RANKS = (8, 16, 32, 64, 128)
SHARES = (
    (0.053, 0.097, 0.178, 0.321, 0.569),
    (0.121, 0.193, 0.298, 0.451, 0.692),
    (0.159, 0.254, 0.392, 0.591, 0.842),
    (0.190, 0.312, 0.460, 0.645, 0.870),
    (0.176, 0.278, 0.419, 0.622, 0.864),
)
HOTTEST = (0.065, 0.194, 0.225, 0.245, 0.268)
GINI = (0.18, 0.37, 0.55, 0.60, 0.58)
RECALL = {8: (0.325, 0.336), 16: (0.44, 0.45), 24: (0.51, 0.51), 32: (0.56, 0.57)}

# Share of the unit variance in deep layers. TOPIC_BY_DEPTH scales the first: a near uniform layer has no
# room for a conversation's own working set.
VAR_CONVERSATION = 0.32
VAR_THEME = 0.06
ECHO_SHARE = 0.89
TOPIC_BY_DEPTH = (0.20, 0.50, 1.0, 1.0, 1.0)
TAU_THEME, TAU_ECHO = 60.0, 1.75  # tokens
SAMPLED_CONVERSATIONS = 4


@dataclass(frozen=True, slots=True)
class RouteModel:
    """Who is popular, and how much of the score each kind of noise makes.

    offsets: float32 (layers, experts). deviation: float32 (4, layers, 1), standard deviations of
    conversation, theme, echo, white.
    """

    offsets: NDArray[np.float32]
    deviation: NDArray[np.float32]


def route_model(
    num_layers: int = NUM_LAYERS, num_experts: int = NUM_EXPERTS, top_k: int = TOP_K, model_seed: int = 0
) -> RouteModel:
    """Build the model. Sizes other than 42, 288, 8 run; their skew is stretched to fit, not calibrated."""
    depth = FIRST_MODEL_LAYER + np.arange(num_layers) * (NUM_LAYERS - 1) / max(1, num_layers - 1)
    scale = np.interp(depth, ANCHOR_LAYERS, TOPIC_BY_DEPTH)
    conversation, theme = VAR_CONVERSATION * scale, VAR_THEME * scale
    rest = 1.0 - conversation - theme
    variance = np.stack([conversation, theme, ECHO_SHARE * rest, (1.0 - ECHO_SHARE) * rest])
    curves = np.stack(
        [
            _offsets(pick_probabilities(np.array(shares), hot, num_experts, top_k), VAR_CONVERSATION * topic)
            for shares, hot, topic in zip(SHARES, HOTTEST, TOPIC_BY_DEPTH, strict=True)
        ]
    )
    by_rank = np.stack([np.interp(depth, ANCHOR_LAYERS, curve) for curve in curves.T], axis=1)
    offsets = np.random.default_rng((model_seed, 0x5EED)).permuted(by_rank.astype(np.float32), axis=1)
    return RouteModel(offsets, np.sqrt(variance).astype(np.float32)[:, :, None])


def pick_probabilities(
    shares: NDArray[np.float64], hottest: float, num_experts: int, top_k: int
) -> NDArray[np.float64]:
    """Return the chance of each rank to be among a token's top_k: float64 (experts,), falling, sum top_k.

    shares: part of all picks held by the SHARE_RANKS most popular. hottest: the chance of rank 1. Between
    the given ranks the logarithm runs straight; each interval is then scaled to hold its share.
    """
    edges = np.concatenate([[0], np.asarray(SHARE_RANKS) * num_experts / NUM_EXPERTS, [num_experts]])
    edges = np.maximum.accumulate(np.rint(edges)).astype(int)
    mass = np.diff(np.concatenate([[0.0], shares, [1.0]])) * top_k
    width = np.maximum(np.diff(edges), 1)
    middle = (edges[:-1] + edges[1:]) / 2
    rank = np.arange(num_experts) + 0.5
    knots = np.concatenate([[0.5], middle, [num_experts]])
    level = np.log(np.concatenate([[max(hottest, mass[0] / width[0])], mass / width, [mass[-1] / width[-1]]]))
    level[-1] = 2 * level[-2] - np.interp(
        float(edges[-2]), knots, level
    )  # the tail falls on at its own slope
    curve = np.exp(np.interp(rank, knots, level))
    for _ in range(20):
        for begin, end, total in zip(edges[:-1], edges[1:], mass, strict=True):
            if end > begin:
                curve[begin:end] *= total / curve[begin:end].sum()
        curve = -np.sort(-np.minimum(curve, 0.98))
    return np.asarray(curve * (top_k / curve.sum()))


def _offsets(wanted: NDArray[np.float64], conversation: float) -> NDArray[np.float64]:
    """Return offsets, falling, whose popularity, counted over a few conversations, follows the wanted one.

    An expert is picked with probability Phi((offset + draw - threshold) / rest) in each conversation,
    `conversation` being the variance of the draws. Chance draws alone spread the ranked mean of
    SAMPLED_CONVERSATIONS such values, so the offsets start as the wanted quantiles and are moved until the
    ranked means agree, averaged over sixteen trials.
    """
    normal = statistics.NormalDist()
    grid = np.linspace(-6.0, 6.0, 2401)
    phi = np.array([normal.cdf(float(x)) for x in grid])
    goal = np.interp(wanted, phi, grid)
    shape = (16, SAMPLED_CONVERSATIONS, len(wanted))
    draws = np.random.default_rng(0).standard_normal(shape) * np.sqrt(conversation)
    rest = np.sqrt(1.0 - conversation)
    offsets, threshold = goal.copy(), np.zeros((*shape[:2], 1))
    for _ in range(30):
        score = (offsets + draws - threshold) / rest
        chance = np.interp(score, grid, phi)
        density = np.exp(-0.5 * score**2) / np.sqrt(2.0 * np.pi) / rest
        # A Newton step: in every conversation the chances sum to top_k.
        threshold += (chance.sum(-1, keepdims=True) - wanted.sum()) / density.sum(-1, keepdims=True)
        counted = chance.mean(axis=1)
        ranked = -np.sort(-counted, axis=1).mean(axis=0)
        offsets = -np.sort(-(offsets + 0.7 * (goal - np.interp(ranked, phi, grid))))
    return np.asarray(offsets - offsets.mean())


def generate(
    num_tokens: int,
    *,
    seed: int = 0,
    model: RouteModel | None = None,
    top_k: int = TOP_K,
    conversation_tokens: int = CONVERSATION_TOKENS,
) -> Routes:
    """Generate one decode stream: uint16 (num_tokens, layers, top_k), best score first, distinct in a row.

    seed draws the conversations; a new one starts every conversation_tokens. A longer trace begins with the
    shorter one. Raises ValueError for sizes that make no sense.
    """
    model = model or route_model()
    num_layers, num_experts = model.offsets.shape
    if num_tokens < 0 or conversation_tokens < 1 or not 1 <= top_k <= num_experts:
        raise ValueError("need num_tokens >= 0, conversation_tokens >= 1 and 1 <= top_k <= experts")
    rng = np.random.default_rng((seed, 0x70C5))
    keep = np.exp(-1.0 / np.array([TAU_THEME, TAU_ECHO])).astype(np.float32)
    fresh = np.sqrt(1.0 - keep**2) * 1.0
    deviation = model.deviation
    routes = np.empty((num_tokens, num_layers, top_k), np.uint16)
    base = theme = echo = model.offsets
    for t in range(num_tokens):
        noise = rng.standard_normal((3, num_layers, num_experts), dtype=np.float32)
        if t % conversation_tokens == 0:
            own = rng.standard_normal((num_layers, num_experts), dtype=np.float32)
            base = model.offsets + deviation[0] * own
            theme, echo = deviation[1] * noise[0], deviation[2] * noise[1]
        else:
            theme = keep[0] * theme + (fresh[0] * deviation[1]) * noise[0]
            echo = keep[1] * echo + (fresh[1] * deviation[2]) * noise[1]
        score = base + theme + echo + deviation[3] * noise[2]
        best = np.argpartition(score, num_experts - top_k, axis=1)[:, num_experts - top_k :]
        order = np.argsort(-np.take_along_axis(score, best, 1), axis=1)
        routes[t] = np.take_along_axis(best, order, 1)
    return routes
