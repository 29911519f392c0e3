"""Wrong set-ups that any machine can have: each a way to break things, and the line that must come of it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from tests.wrong_setups.workbench import WEIGHTS, Workbench

CONFIG, CHECKPOINT, MACHINE, DOWNLOAD = 2, 3, 4, 6
"""Exit codes (`glm53srv --help`)."""

Breaker = Callable[[Workbench], object]
FETCH = "fetch the checkpoint again"


@dataclass(frozen=True, slots=True)
class Setup:
    """One wrong set-up of `glm53srv serve`. problem, remedy: what the one line must say."""

    name: str
    exit_code: int
    problem: str
    remedy: str
    break_it: Breaker


def arguments(*words: str) -> Breaker:
    """Add words to the command line."""
    return lambda bench: bench.arguments.extend(words)


def variables(**values: str) -> Breaker:
    """Set variables of the environment."""
    return lambda bench: bench.environ.update(values)


def config_file(text: str) -> Breaker:
    """Write glm53srv.toml into the folder the command runs in."""
    return lambda bench: (bench.folder / "glm53srv.toml").write_text(text)


def no_model(bench: Workbench) -> None:
    bench.model_dir = bench.folder / "elsewhere"


def no_folder_for_a_repository(bench: Workbench) -> None:
    """Without a repository serve would take the demo model."""
    bench.environ |= {"GLM53_MODEL_DIR": "", "GLM53_MODEL_REPO": "nobody/nothing"}
    bench.model_dir = bench.folder  # the test then names none


def model_is_a_file(bench: Workbench) -> None:
    bench.model_dir = bench.path(WEIGHTS)


def remove(name: str) -> Breaker:
    return lambda bench: bench.path(name).unlink()


def write(name: str, text: str) -> Breaker:
    return lambda bench: bench.path(name).write_text(text)


def set_key(name: str, section: str, key: str, value: object) -> Breaker:
    """Change one key of a JSON file; section "": at the top."""

    def edit(bench: Workbench) -> None:
        bench.edit_json(name, lambda root: (root[section] if section else root).update({key: value}))

    return edit


def rename_weights(name: str) -> Breaker:
    return lambda bench: bench.path(WEIGHTS).rename(bench.path(name))


def index_of(file: str, tensor: str | None = None) -> Breaker:
    """Write an index that puts a tensor, by default one that is there, into a file."""

    def edit(bench: Workbench) -> None:
        name = tensor or bench.tensor_names()[0]
        bench.path("model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: file}}))

    return edit


def truncate(bench: Workbench) -> None:
    with bench.path(WEIGHTS).open("r+b") as file:
        file.truncate(bench.path(WEIGHTS).stat().st_size - 4096)


def lose_kpool(bench: Workbench) -> None:
    """What happens when kpool_aux.safetensors is not fetched."""

    def edit(header: dict[str, object]) -> None:
        for name in [name for name in header if "kpool" in name]:
            del header[name]

    bench.edit_header(edit)


def copy_weights(bench: Workbench) -> None:
    bench.path("again.safetensors").write_bytes(bench.path(WEIGHTS).read_bytes())


def take_port(bench: Workbench) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    bench.closers.append(taken.close)
    bench.arguments += ["--port", str(taken.getsockname()[1])]


def socket_is_a_file(bench: Workbench) -> None:
    (bench.folder / "socket").write_text("not a socket")
    bench.arguments += ["--unix-socket", str(bench.folder / "socket")]


def bad_certificate(bench: Workbench) -> None:
    for name in ("cert", "key"):
        (bench.folder / name).write_text("not PEM")
    bench.arguments += ["--tls-cert", str(bench.folder / "cert"), "--tls-key", str(bench.folder / "key")]


SETUPS = (
    Setup("no such model", CHECKPOINT, "no such directory", "name the folder", no_model),
    Setup("no folder named", CONFIG, "no model", "give --model DIR", no_folder_for_a_repository),
    Setup("model is a file", CHECKPOINT, "no such directory", "name the folder", model_is_a_file),
    Setup("no config.json", CHECKPOINT, "config.json: cannot be read", "belongs to", remove("config.json")),
    Setup("garbage config.json", CHECKPOINT, "not valid JSON", "fetch", write("config.json", "{,")),
    Setup("config.json a list", CHECKPOINT, "must hold a JSON object", FETCH, write("config.json", "[]")),
    Setup(
        "wrong architecture",
        CHECKPOINT,
        "architectures is LlamaForCausalLM",
        "only Glm5NextForConditionalGeneration is served",
        set_key("config.json", "", "architectures", ["LlamaForCausalLM"]),
    ),
    Setup(
        "wrong model_type",
        CHECKPOINT,
        "model_type is 'llama'",
        "only glm5_next is served",
        set_key("config.json", "", "model_type", "llama"),
    ),
    Setup(
        "wrong quantisation",
        CHECKPOINT,
        "quant_method is 'gptq'",
        "only EXL3 checkpoints are served",
        set_key("config.json", "quantization_config", "quant_method", "gptq"),
    ),
    Setup(
        "unknown codebook",
        CHECKPOINT,
        "codebook is 'mine'",
        "known are",
        set_key("config.json", "quantization_config", "codebook", "mine"),
    ),
    Setup(
        "other dimensions",
        CHECKPOINT,
        "config.json asks for",
        FETCH,
        set_key("config.json", "text_config", "vocab_size", 123_456),
    ),
    Setup(
        "end token outside the vocabulary",
        CHECKPOINT,
        "outside the vocabulary",
        FETCH,
        set_key("generation_config.json", "", "eos_token_id", [99_999_999]),
    ),
    Setup("no tokenizer", CHECKPOINT, "tokenizer.json: cannot be read", "belongs", remove("tokenizer.json")),
    Setup(
        "garbage tokenizer",
        CHECKPOINT,
        "not a tokenizer of the expected form",
        FETCH,
        write("tokenizer.json", '{"model": 1}'),
    ),
    Setup("no weights", CHECKPOINT, "holds no .safetensors file", "name the folder", remove(WEIGHTS)),
    Setup(
        "missing shard, by number",
        CHECKPOINT,
        "model-00002-of-00003.safetensors and 1 more is missing",
        FETCH,
        rename_weights("model-00001-of-00003.safetensors"),
    ),
    Setup(
        "missing shard, by index",
        CHECKPOINT,
        "other.safetensors is missing",
        FETCH,
        index_of("other.safetensors"),
    ),
    Setup(
        "index of other files",
        CHECKPOINT,
        "files of different versions",
        FETCH,
        index_of(WEIGHTS, "no.such.tensor"),
    ),
    Setup(
        "garbage index",
        CHECKPOINT,
        "not an index of weights",
        FETCH,
        write("model.safetensors.index.json", "[]"),
    ),
    Setup("truncated shard", CHECKPOINT, "truncated", "fetch the file again", truncate),
    Setup("empty shard", CHECKPOINT, "truncated, 0 bytes", "fetch the file again", write(WEIGHTS, "")),
    Setup(
        "git-lfs pointer",
        CHECKPOINT,
        "git-lfs pointer",
        "git lfs pull",
        write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"),
    ),
    Setup("not safetensors", CHECKPOINT, "not a safetensors file", FETCH, write(WEIGHTS, "garbage" * 99)),
    Setup("kpool_aux not fetched", CHECKPOINT, "tensors are missing", "fetch them", lose_kpool),
    Setup("the same tensors twice", CHECKPOINT, "is also in", "remove one of the files", copy_weights),
    Setup("bad flag", CONFIG, "unknown option '--prot'", "did you mean --port?", arguments("--prot", "1")),
    Setup("foreign word", CONFIG, "unknown argument 'please'", "--help", arguments("please")),
    Setup("flag without value", CONFIG, "--max-streams needs a value", "--help", arguments("--max-streams")),
    Setup(
        "flag instead of a value",
        CONFIG,
        "--max-streams needs a value",
        "--help",
        arguments("--max-streams", "--mode", "fast"),
    ),
    Setup("bad number", CONFIG, "-cs is '64k'", "must be a whole number", arguments("-cs", "64k")),
    Setup("bad choice", CONFIG, "--mode is 'fats'", "did you mean fast?", arguments("--mode", "fats")),
    Setup(
        "bad variable",
        CONFIG,
        "unknown environment variable GLM53_MODUS",
        "did you mean GLM53_MODE?",
        variables(GLM53_MODUS="fast"),
    ),
    Setup("bad env value", CONFIG, "PORT is 'http'", "must be a whole number", variables(PORT="http")),
    Setup("NVMe mode", CONFIG, "GLM53_MODE is 'nvme'", "no NVMe mode", variables(GLM53_MODE="nvme")),
    Setup(
        "NVMe variable",
        CONFIG,
        "GLM53_NV_STORE: there is no NVMe mode",
        "unset it",
        variables(GLM53_NV_STORE="/nvx"),
    ),
    Setup("bad TOML", CONFIG, "not valid TOML", "write lines such as port = 8080", config_file("port = \n")),
    Setup("unknown key", CONFIG, "unknown key 'prot'", "did you mean port?", config_file("prot = 1\n")),
    Setup("TOML table", CONFIG, "unknown key 'server'", "did you mean", config_file("[server]\nport = 1\n")),
    Setup(
        "no such file",
        CONFIG,
        "cannot be read",
        "name a TOML file with --config",
        arguments("--config", "x.toml"),
    ),
    Setup("TLS key alone", CONFIG, "belong together", "give both or none", arguments("--tls-key", "k.pem")),
    Setup("bad certificate", CONFIG, "cannot be used", "name a PEM certificate chain", bad_certificate),
    Setup(
        "no key in the keys", CONFIG, "GLM53_API_KEY holds no key", "set one", variables(GLM53_API_KEY=",")
    ),
    Setup(
        "foreign CPU",
        CONFIG,
        "GLM53_CT_CPUS names CPU 65000",
        "use GLM53_CT_CPUS=auto",
        variables(GLM53_CT_CPUS="65000", GLM53_OFFLOAD="simulate"),
    ),
    Setup("port in use", CONFIG, f"pid {os.getpid()})", "--port", take_port),
    Setup("foreign address", CONFIG, "cannot listen on", "--host", arguments("--host", "203.0.113.1")),
    Setup("socket is a file", CONFIG, "cannot listen on", "choose with --unix-socket", socket_is_a_file),
    Setup(
        "no folder for the socket",
        CONFIG,
        "cannot listen on",
        "choose with --unix-socket",
        arguments("--unix-socket", "no/such/folder/socket"),
    ),
    Setup(
        "too much context",
        MACHINE,
        "too little memory",
        "use --cache-tokens",
        arguments("-cs", "100000000000"),
    ),
)
