#!/bin/sh
# Runs llama.cpp's own server tests against a server of ours that already runs. On demand, not part of `make test`.
#
#   tests/outside/llama_cpp.sh PORT MODEL_NAME [pytest arguments]
#
# Needs uv and the package index. The tests come in the source package of llama-cpp-python and stay in WORK
# (default: a new folder under /tmp); nothing of them is kept here. docs/conformance.md says what the results mean.
set -eu
port=$1
model=$2
shift 2
work=${WORK:-$(mktemp -d /tmp/llama-tests.XXXXXX)}

uv venv --quiet --python 3.11 --seed "$work/venv"
VIRTUAL_ENV="$work/venv" uv pip install --quiet pip pytest pytest-timeout requests openai wget filelock pillow \
    huggingface_hub aiohttp numpy anthropic
"$work/venv/bin/python" -m pip download --quiet --no-deps --no-binary :all: -d "$work" llama-cpp-python==0.3.36
cd "$work"
tar xzf llama_cpp_python-*.tar.gz --wildcards '*/tools/server/tests/*'
cd llama_cpp_python-*/vendor/llama.cpp/tools/server/tests
# The presets download models, and the tests name models of OpenAI's: neither concerns a server that runs already.
sed -i 's/ServerPreset.load_all()/pass/' conftest.py
sed -i -E "s/(\"model\": ?)\"[^\"]*\"/\1\"$model\"/; s/(model=)\"[^\"]*\"/\1\"$model\"/" unit/*.py
DEBUG_EXTERNAL=1 PORT=$port exec "$work/venv/bin/python" -m pytest --timeout 60 -q -rA "$@"
