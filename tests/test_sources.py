"""Flags, variables and the file: one precedence, the last wins, and the original interface moves over."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from glm53srv.config import Config, describe, load_config, resolve
from glm53srv.config_command import show_config
from glm53srv.errors import ConfigError
from glm53srv.options import OPTIONS, grouped, usage
from glm53srv.original_interface import ORIGINAL_NAMES, REFUSED_PREFIXES, WITHOUT_EFFECT, OriginalName
from glm53srv.sources import BY_NAME, START_SCRIPT_ENV, read_settings

MODEL = ["--model", "some/dir"]
NOTHING_SET = resolve(read_settings(MODEL, {}), 8)


def configure(argv: list[str], environ: dict[str, str] | None = None) -> Config:
    return load_config([*MODEL, *argv], environ or {}, num_cores=8)


def parts(config: Config) -> tuple[object, ...]:
    """What a server is built from, without the notes about where it came from."""
    return config.engine, config.scheduler, config.server, config.download


def test_the_named_file_goes_before_the_variable(tmp_path: Path) -> None:
    for name, port in (("a", 1), ("b", 2), ("c", 3)):
        (tmp_path / f"{name}.toml").write_text(f"port = {port}\n")
    environ = {"GLM53_CONFIG": str(tmp_path / "a.toml")}
    assert configure([], environ).server.port == 1
    flag = f"--config={tmp_path / 'b.toml'}"
    assert configure([flag], environ).server.port == 2
    assert configure([flag, "--config", str(tmp_path / "c.toml")], environ).server.port == 3


def test_every_option_can_be_given_in_all_three_ways(tmp_path: Path) -> None:
    samples = {"int": "300", "float": "7.5", "str": "t", "path": "d"}
    for option in OPTIONS:
        text = option.choices[-1] if option.choices else samples[option.kind]
        if option.maximum is not None and float(text) > option.maximum:
            text = str(int(option.maximum))
        file = tmp_path / f"{option.name}.toml"
        file.write_text(f"{option.name} = {text if option.kind in ('int', 'float') else json.dumps(text)}\n")
        ways = (
            read_settings([option.flags[0], text], {}),
            read_settings([], {option.env: text}),
            read_settings(["--config", str(file)], {}),
        )
        assert len({way.values[option.name] for way in ways}) == 1, option.name
        assert [way.sources[option.name] for way in ways] == ["command line", "environment", "file"]
        assert [way.names[option.name] for way in ways] == [option.flags[0], option.env, str(file)]


def test_true_and_false_of_a_file_are_1_and_0(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("model_download = false\n")
    assert not configure(["--config", str(file)]).download.is_allowed
    file.write_text("port = true\n")
    with pytest.raises(ConfigError, match=r"port is 'True', must be a whole number"):
        configure(["--config", str(file)])


def test_an_empty_variable_is_unset_but_its_name_must_be_known() -> None:
    assert configure([], {"PORT": "", "GLM53_K_OVL": "", "GLM53_CPU_TIER": ""}) == configure([])
    with pytest.raises(ConfigError, match="unknown environment variable GLM53_MODUS"):
        configure([], {"GLM53_MODUS": ""})


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="--model is empty, must be a path"):
        load_config(["--model="], {})


@pytest.mark.parametrize("entry", ORIGINAL_NAMES, ids=lambda entry: entry.name)
def test_an_original_name_does_what_the_table_says(entry: OriginalName) -> None:
    if not entry.option:
        assert entry.name in START_SCRIPT_ENV
        assert parts(configure([], {entry.name: "x"})) == parts(NOTHING_SET)
        return
    option = BY_NAME[entry.option]
    samples = {"int": "320", "float": "3.5", "str": "5", "path": "other"}
    text = option.choices[-1] if option.choices else samples[option.kind]
    if entry.name == "GLM53_CPU_TIER":
        text = "0"
    if entry.name.startswith("-"):
        config = configure([entry.name, text])
    else:
        config = load_config([] if option.name == "model" else MODEL, {entry.name: text}, num_cores=8)
    assert parts(config) != parts(NOTHING_SET)
    assert config.ignored == ()


def test_the_original_start_command_moves_over() -> None:
    """The command of the published image, variables and all."""
    words = "-m /models -cs 131072 --max-batch-size 8 -chunk_size 8192 -ambs 4 --host 0.0.0.0 --port 30000"
    environ = {
        "GLM53_MODE": "exact",
        "GLM53_CPU_TIER": "0",
        "GLM53_CT_CPUS": "auto",
        "GLM53_CT_THREADS": "0",
        "GLM53_CT_SWZ": "0",
        "GLM53_EC": "1",
        "GLM53_EC_RESERVE_GB": "1.0",
        "GLM53_EC_STAGE_GB": "2.6",
        "GLM53_EC_ELASTIC_GB": "10",
        "GLM53_K_HCFUSE": "0",
        "GLM53_TRITON_PIN": "/opt/pin.json",
        "PORT": "30000",
        "SERVED_NAME": "glm-5.3-flash",
    }
    config = load_config([*words.split(), "--served-name", "glm", "-rcs", "1"], environ, num_cores=24)
    engine = config.engine
    assert (engine.model_dir, engine.mode, engine.cache_tokens) == (Path("/models"), "exact", 131_072)
    assert (engine.max_streams, engine.chunk_tokens) == (4, 8192)
    assert (engine.offload.ct_threads, engine.offload.reserve_gib) == (None, 1.0)
    assert config.server.served_name == "glm"
    ignored = "\n".join(config.ignored)
    for name in ("GLM53_EC", "GLM53_K_HCFUSE", "GLM53_TRITON_PIN", "-rcs"):
        assert f"{name} = " in ignored
    assert set(config.ignored) <= set(describe(config))


def test_the_tier_switch_goes_before_the_mode_of_the_environment_and_after_the_flag() -> None:
    assert configure([], {"GLM53_MODE": "fast", "GLM53_CPU_TIER": "0"}).engine.mode == "exact"
    assert configure([], {"GLM53_MODE": "exact", "GLM53_CPU_TIER": "1"}).engine.mode == "fast"
    assert configure(["--mode", "fast"], {"GLM53_CPU_TIER": "0"}).engine.mode == "fast"
    with pytest.raises(ConfigError, match="GLM53_CPU_TIER is 'on', must be one of 0, 1"):
        configure([], {"GLM53_CPU_TIER": "on"})


def test_names_without_effect_change_nothing_and_are_told() -> None:
    for name in WITHOUT_EFFECT:
        config = configure([name, "1"]) if name.startswith("-") else configure([], {name: "1"})
        assert parts(config) == parts(NOTHING_SET)
        (line,) = config.ignored
        assert line.startswith(f"{name} = 1 (")
        assert WITHOUT_EFFECT[name] in line


def test_what_would_be_another_server_is_refused() -> None:
    for prefix, reason in REFUSED_PREFIXES.items():
        with pytest.raises(ConfigError) as caught:
            configure([], {f"{prefix}_X": "1"})
        assert str(caught.value) == f"{prefix}_X: {reason}; unset it"


def test_a_group_stands_once_in_the_help() -> None:
    lines = usage().splitlines()
    for group in grouped():
        assert lines.count(f"{group}:") == 1
    assert "  --config PATH" in lines


def test_the_shown_configuration_is_a_file_that_gives_the_same(tmp_path: Path) -> None:
    environ = {"PORT": "8080", "GLM53_API_KEY": "sesame", "GLM53_CORS_ORIGINS": 'a"b\\c\x7fé'}
    argv = [*MODEL, "--mode", "exact", "--target-gap-ms", "50"]
    text = show_config(argv, environ, 8, is_json=False)
    assert 'mode = "exact"  # command line --mode' in text
    assert "port = 8080  # environment PORT" in text
    assert "max_queue = 64  # default" in text
    assert "sesame" not in text
    assert "# api_key is set and not shown  # environment GLM53_API_KEY" in text
    file = tmp_path / "shown.toml"
    file.write_text(text)
    assert tomllib.loads(text)["cors_origins"] == 'a"b\\c\x7fé'
    again = load_config(["--config", str(file)], {"GLM53_API_KEY": "sesame"}, num_cores=8)
    assert parts(again) == parts(load_config(argv, environ, num_cores=8))


def test_the_model_that_serve_would_take_unasked_is_shown() -> None:
    assert 'model = "demo"  # default' in show_config([], {}, 8, is_json=False, default_model=Path("demo"))
    named = show_config([*MODEL], {}, 8, is_json=False, default_model=Path("demo"))
    assert '"demo"' not in named


def test_the_shown_json_has_every_option_and_no_secret() -> None:
    text = show_config(["--port", "1", "-rcs", "4"], {"GLM53_API_KEY": "sesame"}, 8, is_json=True)
    shown = json.loads(text)
    assert "sesame" not in text
    assert set(shown["options"]) == {option.name for option in OPTIONS}
    assert shown["options"]["port"] == {
        "value": 1,
        "source": "command line",
        "set_by": "--port",
        "flags": ["--port"],
        "variable": "PORT",
    }
    assert shown["options"]["model"]["value"] is None
    assert shown["options"]["api_key"]["value"] == "(hidden)"
    assert shown["ignored"] == ["-rcs = 4 (command line) is without effect: there is no such cache"]


def test_the_shown_configuration_refuses_what_serve_refuses() -> None:
    with pytest.raises(ConfigError, match="belong together"):
        show_config(["--tls-key", "k"], {}, 8, is_json=False)
