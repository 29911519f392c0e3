"""How well the synthetic routes fit what was published; their model is glm53srv/bench_model/routes.py.

python -m bench.synth_routes                              print the fit: targets beside what came out
python -m bench.synth_routes --tokens 4000 --out r.npy    uint16 (tokens, layers, top_k)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glm53srv.bench_model.routes import (
    ANCHOR_LAYERS,
    CONVERSATION_TOKENS,
    FIRST_MODEL_LAYER,
    GINI,
    HOTTEST,
    NUM_EXPERTS,
    RECALL,
    SHARE_RANKS,
    SHARES,
    TOP_K,
    Routes,
    generate,
    route_model,
)


def load_routes(path: Path) -> Routes:
    """Read a recorded trace: an integer array (tokens, layers, top_k). Raises ValueError with the file's
    name.
    """
    array = np.load(path, allow_pickle=False)
    if array.ndim != 3 or not np.issubdtype(array.dtype, np.integer) or array.min(initial=0) < 0:
        raise ValueError(f"{path}: need a non-negative integer array (tokens, layers, top_k)")
    return np.asarray(array, np.uint16)


def pick_counts(routes: Routes, num_experts: int = NUM_EXPERTS) -> NDArray[np.int64]:
    """Picks of every expert: int64 (layers, experts)."""
    return np.stack(
        [np.bincount(layer.ravel(), minlength=num_experts) for layer in routes.transpose(1, 0, 2)]
    )


def gini(counts: NDArray[np.int64]) -> float:
    """Gini coefficient of one layer's pick counts: 0 uniform, towards 1 concentrated."""
    ascending = np.sort(counts)
    n = len(ascending)
    return float(2 * (np.arange(1, n + 1) * ascending).sum() / (n * ascending.sum()) - (n + 1) / n)


def top_shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Part of a layer's picks held by its SHARE_RANKS most popular experts."""
    falling = -np.sort(-counts)
    return np.array([falling[:rank].sum() / falling.sum() for rank in SHARE_RANKS])


def recency_recall(
    routes: Routes, num_experts: int = NUM_EXPERTS, conversation_tokens: int = CONVERSATION_TOKENS
) -> dict[int, float]:
    """Part of the picks that are among the N experts of largest recency score, sum of 0.3 ** age, per N.

    Experts never seen in the conversation rank in random order. Every fifth token is looked at, from the
    41st of a conversation on.
    """
    num_layers, top_k = routes.shape[1:]
    sizes = tuple(RECALL)
    score = np.zeros((num_layers, num_experts), np.float32)
    rng = np.random.default_rng(0)
    found, seen = np.zeros(len(sizes)), 0
    for t, picks in enumerate(routes.astype(np.int64)):
        place = t % conversation_tokens
        if place == 0:
            score[:] = 0
        if place > 40 and place % 5 == 0:
            jittered = score + 1e-12 * rng.random(score.shape, dtype=np.float32)
            mine = np.take_along_axis(jittered, picks, 1)
            rank = (jittered[:, None, :] > mine[:, :, None]).sum(2)
            found += [(rank < size).sum() for size in sizes]
            seen += num_layers * top_k
        score *= 0.3
        np.put_along_axis(score, picks, np.take_along_axis(score, picks, 1) + 1.0, 1)
    return {size: float(hit / max(1, seen)) for size, hit in zip(sizes, found, strict=True)}


def distinct_picks(streams: list[Routes]) -> float:
    """Mean number of distinct (layer, expert) pairs per step when the streams decode together."""
    rows = np.sort(np.concatenate(streams, axis=2).astype(np.int32), axis=2)
    return float((1 + (np.diff(rows, axis=2) != 0).sum(2)).sum(1).mean())


def main(argv: list[str] | None = None) -> int:
    """Generate, save if asked, and print target beside result."""
    parser = argparse.ArgumentParser(
        description="Synthetic expert routes and their fit to published statistics."
    )
    parser.add_argument(
        "--tokens", type=int, default=9250, help="tokens per trace (default 9250, as published)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which conversations")
    parser.add_argument("--model-seed", type=int, default=0, help="which experts are popular")
    parser.add_argument("--draws", type=int, default=1, help="average the fit over this many seeds")
    parser.add_argument("--out", type=Path, help="write the first trace to this .npy file")
    args = parser.parse_args(argv)
    model = route_model(model_seed=args.model_seed)
    traces = [generate(args.tokens, seed=args.seed + i, model=model) for i in range(args.draws)]
    if args.out:
        np.save(args.out, traces[0])
    counts = [pick_counts(trace) for trace in traces]
    print(f"{args.tokens} tokens, mean of {args.draws}; got/published")
    for row, layer in enumerate(ANCHOR_LAYERS):
        mine = [c[layer - FIRST_MODEL_LAYER] for c in counts]
        share = np.mean([top_shares(c) for c in mine], 0)
        hottest = np.mean([c.max() * TOP_K / c.sum() for c in mine])
        listed = "  ".join(f"{g:.3f}/{w:.3f}" for g, w in zip(share, SHARES[row], strict=True))
        print(
            f"layer {layer:2d}  gini {np.mean([gini(c) for c in mine]):.2f}/{GINI[row]:.2f}"
            f"  hottest {hottest:.3f}/{HOTTEST[row]:.3f}  top 8..128 {listed}"
        )
    recalls = [recency_recall(trace) for trace in traces]
    for size, (low, high) in RECALL.items():
        print(f"recall of {size}: {np.mean([r[size] for r in recalls]):.3f}/{low:.3f}-{high:.3f}")
    streams = [trace[:600] for trace in traces[:1]]
    streams += [generate(600, seed=args.seed + 1000 + i, model=model) for i in range(3)]
    print(
        "distinct picks per step, 1/2/4 streams:", *(f"{distinct_picks(streams[:n]):.0f}" for n in (1, 2, 4))
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
