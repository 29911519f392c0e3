#!/bin/sh
# Sends what /openapi.json allows, and what it does not, to a server that already runs, and looks for 5xx.
# On demand, not part of `make test`.
#
#   tests/outside/schemathesis.sh PORT [schemathesis arguments]
#
# Needs uv and the package index. Give the server a small cache (--cache-tokens 2048), so that answers without
# max_tokens end soon.
set -eu
port=$1
shift
work=${WORK:-$(mktemp -d /tmp/schemathesis.XXXXXX)}
uv venv --quiet --python 3.11 "$work/venv"
VIRTUAL_ENV="$work/venv" uv pip install --quiet schemathesis==4.32.5
cd "$work"  # it leaves a folder of its runs
exec "$work/venv/bin/schemathesis" run "http://127.0.0.1:$port/openapi.json" --checks not_a_server_error \
    --request-timeout 60 --exclude-path /abort_request "$@"
