#!/bin/sh
# Everything that is measured on one GPU, in one go, with a short table last.
#
#     OUT=results MODEL=reference/demo/checkpoint sh bench/cuda/run_all.sh
#
# A quiet machine, please: the CPU workers and the link are half of what is measured. About 10
# minutes on an H200; SOAK (seconds) adds mixed load, HTTP="--minutes 4" runs the HTTP checks in full with so
# much of it, SERVE (minutes) serves the whole model on random weights for that long under mixed load.
# Everything is run whatever fails before it; ends with 1 if something failed.
set -u
: "${OUT:=results}" "${MODEL:=reference/demo/checkpoint}" "${SOAK:=0}" "${HTTP:=--short}" "${SERVE:=0}"
mkdir -p "$OUT"
status=0

measure() {
    name=$1
    shift
    "$@" >"$OUT/$name.log" 2>&1 || status=1
}

# Streams are even, and nothing creeps: minutes of mixed load over HTTP.
serve() {
    url=http://127.0.0.1:30000
    python3 -m bench.cuda.serve_random --tokenizer "$MODEL" --mode fast >"$OUT/serve.log" 2>&1 &
    server=$!
    until grep -q "ready url" "$OUT/serve.log"; do
        kill -0 "$server" 2>/dev/null || { status=1; return; }
        sleep 1
    done
    for streams in 1 4; do
        measure "rate_$streams" python3 bench/stream_rate.py --url "$url" --streams "$streams"
    done
    measure mixed python3 -m bench.mixed_load --url "$url" --minutes "$1" --max-prompt 32768 \
        --pid "$server" --out "$OUT/mixed.json" --quiet
    kill "$server"
    wait "$server" || status=1
}

python3 -m cffi_build || exit 1
measure exact python3 -m bench.cuda.check_engine "$MODEL" exact --save "$OUT/exact.npz"
measure fast python3 -m bench.cuda.check_engine "$MODEL" fast --against "$OUT/exact.npz"
measure pages python3 -m bench.cuda.check_pages --layers 8 --vram 12 --chunk-slots 4 --chunk 2048
measure contract python3 -m pytest -q -p no:cacheprovider -m cuda tests/engine/test_engine_contract.py
for mode in exact fast; do
    measure "full_$mode" python3 -m glm53srv bench-model --mode "$mode" --beside 32768 --soak "$SOAK" \
        --out "$OUT/full_$mode.json"
done
# shellcheck disable=SC2086  # several words
measure http python3 -m bench.all $HTTP --model "$MODEL" --panel reference/demo-exl3-ref-panel.json \
    --serve "--engine cuda --mode exact" --out "$OUT/http"
[ "$SERVE" = 0 ] || serve "$SERVE"
for name in exact fast pages contract full_exact full_fast http rate_1 rate_4 mixed; do
    [ -f "$OUT/$name.log" ] || continue
    echo "== $name"
    tail -n 25 "$OUT/$name.log"
done
exit "$status"
