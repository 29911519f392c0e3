"""Reference panels: the texts they are made of, the making, and the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm53srv.__main__ import main
from glm53srv.api.tokenizer import Tokenizer
from glm53srv.engine.fake import FakeEngine
from glm53srv.errors import ConfigError
from glm53srv.panel import FORMAT, TOP, EngineReference, load_panel, parse_texts
from glm53srv.panel_texts import PanelText, default_texts, read_texts
from tests.builders import EOS_ID, make_limits


def test_all_positions_but_the_last_are_scored_unless_named() -> None:
    (text,) = parse_texts([{"name": "x", "ids": [5, 6, 7]}])

    assert text.positions == (0, 1)


@pytest.mark.parametrize("positions", [[], [-1], [3]])
def test_positions_outside_the_text_are_refused(positions: list[int]) -> None:
    with pytest.raises(ConfigError, match="text 0: positions"):
        parse_texts([{"ids": [5, 6, 7], "positions": positions}])


def test_a_panel_is_read_back(tmp_path: Path) -> None:
    entry: dict[str, object] = {"name": "x", "ids": [5, 6], "positions": [0], "top_ids": [[6, 4]]}
    entry["top_logprobs"] = [[-0.1, -3.0]]
    path = tmp_path / "panel.json"
    path.write_text(json.dumps({"format": FORMAT, "entries": [entry]}), encoding="utf-8")

    (read,) = load_panel(path)

    assert read.ids == (5, 6)
    assert read.top_logprobs == ((-0.1, -3.0),)


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"format": "else"}', encoding="utf-8")

    with pytest.raises(ConfigError, match="no panel file"):
        load_panel(path)


class ScriptedReference(EngineReference):
    """A reference over the fake engine, which answers as it is told."""

    def __init__(self, script: list[int]) -> None:
        limits = make_limits(max_chunk_tokens=64)
        super().__init__(FakeEngine(limits, scripts={"sequence-0": script}), "fake")


def chat_text(ids: tuple[int, ...]) -> PanelText:
    return PanelText("chat", ids, tuple(range(len(ids))), {"messages": []}, len(ids))


def test_a_chat_is_continued_to_the_end_of_the_turn_and_every_place_scored() -> None:
    text = ScriptedReference([7, 8, 9]).answer(chat_text((2, 3, 4)), 10)

    assert text.ids == (2, 3, 4, 7, 8, 9, EOS_ID)
    assert text.positions == (0, 1, 2, 3, 4, 5)  # nothing comes after the end
    assert text.num_prompt == 3


def test_an_answer_is_cut_at_its_limit() -> None:
    text = ScriptedReference([7, 8, 9]).answer(chat_text((2, 3, 4)), 2)

    assert text.ids == (2, 3, 4, 7, 8)
    assert text.positions == (0, 1, 2, 3)


def test_scored_positions_are_those_asked_for() -> None:
    every = ScriptedReference([]).score(PanelText("x", (2, 3, 4, 5), (0, 1, 2, 3)), 40)
    some = ScriptedReference([]).score(PanelText("x", (2, 3, 4, 5), (1, 3)), 40)

    assert some.top_ids == (every.top_ids[1], every.top_ids[3])
    assert len(every.top_ids[0]) == TOP
    assert list(every.top_logprobs[0]) == sorted(every.top_logprobs[0], reverse=True)


def test_an_id_beyond_the_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="id 39 is none of the model's 30"):
        ScriptedReference([]).score(PanelText("x", (2, 39), (0,)), 30)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "panel what"),
        (["make"], "needs --out"),
        (["make", "--out", "x", "--reference", "guess"], "must be one of engine, exllamav3"),
        (["make", "--out", "x", "--answer-tokens", "-1"], "must be a whole number"),
        (["make", "--out", "x"], "no model"),
    ],
)
def test_a_wrong_command_is_named(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["panel", *words]) == ConfigError.exit_code
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("x", "not JSON"),
        ("{}", "must be a list"),
        ('[{"name": "a"}]', "ids"),
        ('[{"name": "a", "ids": [1]}]', "positions must lie"),
        ('[{"name": "a", "chat": {"messages": []}}]', "a: messages must be a non-empty list"),
        ('[{"name": "a", "chat": {"messages": [{"role": "user", "content": "x"}], "tools": 7}}]', "tools"),
    ],
)
def test_wrong_texts_are_named(content: str, reason: str, random_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "texts.json"
    path.write_text(content)

    with pytest.raises(ConfigError, match=reason):
        read_texts(path, Tokenizer.load(random_model_dir))


def test_texts_of_a_file_become_a_panel(random_model_dir: Path, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "reasoning_effort": "low"}
    texts = [{"name": "ids", "ids": [300, 301, 302], "positions": [1]}, {"name": "chat", "chat": chat}]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    words = ["--texts", str(tmp_path / "texts.json"), "--out", str(tmp_path / "deep" / "panel.json")]

    assert main(["panel", "make", "--model", str(random_model_dir), *words, "--answer-tokens", "3"]) == 0

    ids, asked = load_panel(tmp_path / "deep" / "panel.json")
    assert (ids.positions, len(ids.top_ids[0]), ids.chat) == ((1,), TOP, None)
    assert asked.chat == chat
    assert len(asked.ids) == asked.num_prompt + 3
    spelled = Tokenizer.load(random_model_dir).decode_bytes(asked.ids[: asked.num_prompt]).decode()
    assert spelled == "[gMASK]<sop><|system|>Reasoning Effort: Low<|user|>Hello<|assistant|><think>"


def test_the_chats_of_this_package_reach_every_part_of_the_template(random_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(random_model_dir)
    spelled = [tokenizer.decode_bytes(text.ids).decode() for text in default_texts(tokenizer)]

    for part in (
        "<tools>",
        "<|system|>You are",
        "Effort: Low",
        "<think></think>",
        "<|assistant|>",
        "请用中文",
    ):
        assert any(part in text for text in spelled), part
