#!/bin/sh
# Everything that is measured on one GPU, in one go, with a short table last.
#
#     OUT=results MODEL=reference/demo/checkpoint sh bench/cuda/run_all.sh
#
# A quiet machine, please: the CPU workers and the link are half of what is measured. About 15
# minutes on an H200; SOAK (seconds) adds mixed load.
set -u
: "${OUT:=results}" "${MODEL:=reference/demo/checkpoint}" "${SOAK:=0}"
mkdir -p "$OUT"
python3 -m cffi_build
python3 -m bench.cuda.check_engine "$MODEL" exact --save "$OUT/exact.npz" >"$OUT/exact.log" 2>&1
python3 -m bench.cuda.check_engine "$MODEL" fast --against "$OUT/exact.npz" >"$OUT/fast.log" 2>&1
python3 -m pytest -q -p no:cacheprovider -m cuda tests/engine/test_engine_contract.py >"$OUT/contract.log" 2>&1
for mode in exact fast; do
    python3 -m glm53srv bench-model --mode "$mode" --beside 32768 --soak "$SOAK" \
        --out "$OUT/full_$mode.json" >"$OUT/full_$mode.log" 2>&1
done
for name in exact fast contract full_exact full_fast; do
    echo "== $name"
    tail -n 25 "$OUT/$name.log"
done
