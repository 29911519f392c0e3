"""Four sources, one winner, and every wrong name or value is one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm53srv.config import Config, DownloadConfig, default_threads, describe, load_config
from glm53srv.errors import ConfigError
from glm53srv.options import OPTIONS, usage

MODEL = ["--model", "some/dir"]


def test_defaults_are_resolved() -> None:
    config = load_config(MODEL, {})
    assert config.engine.model_dir == Path("some/dir")
    assert config.server.port == 30000
    assert config.engine.threads >= 1
    assert config.sources == {"model": "command line"}


def test_command_line_beats_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("port = 1\nmax_queue = 2\nmax_streams = 3\n")
    environ = {"GLM53_CONFIG": str(file), "GLM53_MAX_QUEUE": "20", "PORT": "10"}
    config = load_config([*MODEL, "--port", "100"], environ)
    assert (config.server.port, config.scheduler.max_queue, config.engine.max_streams) == (100, 20, 3)
    assert config.sources["port"] == "command line"
    assert config.sources["max_queue"] == "environment"
    assert config.sources["max_streams"] == "file"


def test_last_flag_wins_also_under_its_other_name() -> None:
    config = load_config([*MODEL, "--max-batch-size", "2", "-ambs", "3", "--port=1", "--port=2"], {})
    assert (config.engine.max_streams, config.server.port) == (3, 2)


def test_an_empty_variable_is_an_unset_one() -> None:
    assert load_config(MODEL, {"PORT": ""}).server.port == 30000


def test_foreign_variables_are_left_alone() -> None:
    load_config(MODEL, {"HOME": "/root", "GLM_OTHER": "x"})


def test_variables_of_the_start_script_are_known_and_change_nothing() -> None:
    config = load_config(MODEL, {"GLM53_ROOT": "/opt/glm53srv", "GLM53_ARGS": "--port 1"})
    assert config.sources == {"model": "command line"}


def test_a_model_is_fetched_only_from_a_named_repository() -> None:
    assert load_config(MODEL, {}).download == DownloadConfig(repo=None, revision=None, is_allowed=True)
    environ = {"GLM53_MODEL_REPO": "a/b", "GLM53_MODEL_REVISION": "v1", "GLM53_MODEL_DOWNLOAD": "0"}
    assert load_config(MODEL, environ).download == DownloadConfig("a/b", "v1", is_allowed=False)


@pytest.mark.parametrize(
    ("argv", "environ", "needle"),
    [
        ([*MODEL, "--prot", "1"], {}, "unknown option '--prot', did you mean --port?"),
        ([*MODEL, "stray"], {}, "unknown argument 'stray'"),
        ([*MODEL, "--port"], {}, "--port needs a value"),
        ([*MODEL, "--port", "eighty"], {}, "--port is 'eighty', must be a whole number"),
        ([*MODEL, "--port", "65536"], {}, "must be at most 65535"),
        ([*MODEL, "--target-gap-ms", "nan"], {}, "must be a finite number"),
        ([*MODEL, "--max-streams", "0"], {}, "must be at least 1"),
        ([*MODEL, "--mode", "quick"], {}, "must be one of fast, exact"),
        (
            MODEL,
            {"GLM53_MODUS": "fast"},
            "unknown environment variable GLM53_MODUS, did you mean GLM53_MODE?",
        ),
        (MODEL, {"PORT": "x"}, "PORT is 'x', must be a whole number"),
        (MODEL, {"GLM53_CONFIG": "/nonexistent.toml"}, "/nonexistent.toml: cannot be read"),
        ([*MODEL, "--tls-cert", "c"], {}, "--tls-cert and --tls-key belong together"),
        (MODEL, {"GLM53_TLS_KEY": "k"}, "--tls-cert and --tls-key belong together"),
        (MODEL, {"GLM53_API_KEY": " , "}, "GLM53_API_KEY holds no key"),
        (MODEL, {"GLM53_API_KEY": "a,b c"}, "only visible ASCII"),
        ([*MODEL, "--queue-timeout-s", "0"], {}, "must be at least 0.001"),
        ([], {}, "no model; give --model DIR or set GLM53_MODEL_DIR"),
    ],
)
def test_wrong_input_is_one_line_that_names_it(argv: list[str], environ: dict[str, str], needle: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(argv, environ)
    assert needle in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("prot = 1", "unknown key 'prot', did you mean port?"),
        ("port = [1]", "port must be a single value"),
        ("port = ", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, needle: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(MODEL, {"GLM53_CONFIG": str(file)})
    assert needle in str(caught.value)
    assert str(file) in str(caught.value)


def test_names_flags_and_variables_are_unique() -> None:
    names = [option.name for option in OPTIONS]
    flags = [flag for option in OPTIONS for flag in option.flags]
    variables = [option.env for option in OPTIONS]
    for group in (names, flags, variables):
        assert len(group) == len(set(group))


def test_every_option_reaches_the_config() -> None:
    """An option that resolve() forgets would be silently ignored."""
    samples = {"int": "300", "float": "7", "str": "t", "path": "d"}
    companions = {"tls_cert": ["--tls-key", "k"], "tls_key": ["--tls-cert", "c"]}
    plain = load_config(MODEL, {})
    for option in OPTIONS:
        text = option.choices[-1] if option.choices else samples[option.kind]
        if option.maximum is not None and option.kind in ("int", "float"):
            text = str(min(type(option.maximum)(text), option.maximum))
        changed = load_config([*MODEL, *companions.get(option.name, []), option.flags[0], text], {})
        assert _values(changed) != _values(plain), option.name


def test_usage_names_every_flag_and_variable() -> None:
    text = usage()
    for option in OPTIONS:
        assert option.env in text
        assert all(flag in text for flag in option.flags)


def test_describe_names_value_and_source() -> None:
    lines = describe(load_config(MODEL, {"PORT": "8080", "GLM53_TARGET_GAP_MS": "50"}))
    assert "port = 8080 (environment)" in lines
    assert "target_gap_ms = 50.0 (environment)" in lines


def test_lists_are_split_at_commas() -> None:
    environ = {"GLM53_API_KEY": "a, b,,c", "GLM53_CORS_ORIGINS": "https://x, https://y"}
    server = load_config(MODEL, environ).server
    assert server.api_keys == ("a", "b", "c")
    assert server.cors_origins == ("https://x", "https://y")


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('api_key = "sesame"\n')
    for argv, environ in (
        (["--api-key", "sesame"], {}),
        ([], {"GLM53_API_KEY": "sesame"}),
        ([], {"GLM53_CONFIG": str(file)}),
    ):
        config = load_config([*MODEL, *argv], environ)
        assert config.server.api_keys == ("sesame",)
        assert "sesame" not in f"{config!r} {describe(config)} {config.values}"
        assert "api_key = (hidden)" in " ".join(describe(config))


def test_two_cores_stay_free_on_larger_machines() -> None:
    assert [default_threads(n) for n in (1, 2, 4, 8, 16)] == [1, 2, 4, 6, 14]


def _values(config: Config) -> tuple[object, object, object, object]:
    return config.engine, config.scheduler, config.server, config.download


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HOME": "/home/me"}, "/home/me/.cache/glm53srv"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/var/cache"}, "/var/cache/glm53srv"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "relative"}, "/home/me/.cache/glm53srv"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": ""}, "/home/me/.cache/glm53srv"),
        ({"HOME": "/home/me", "GLM53_TUNING_DIR": "/here"}, "/here"),
        ({}, None),
    ],
)
def test_timed_choices_are_kept_among_the_users_caches(environ: dict[str, str], folder: str | None) -> None:
    expected = None if folder is None else Path(folder)
    assert load_config(MODEL, environ).engine.tuning_dir == expected
