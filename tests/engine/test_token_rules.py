"""Grammars bind exactly what they should: after reasoning, up to the end, through preemption."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from glm53srv.engine.base import SampledToken
from glm53srv.engine.grammar import GrammarCompiler
from glm53srv.engine.sampler import SamplerBank
from glm53srv.errors import GrammarError
from glm53srv.request import Constraint, OpenReasoning, SamplingParams
from tests.builders import make_start

BYTES = 256
EOS, EOS_TOO, THINK_END, TOOL_CALL = BYTES, BYTES + 1, BYTES + 2, BYTES + 3
NUM_IDS = BYTES + 4
VOCAB = NUM_IDS + 5  # the head has rows without a token
ABC = Constraint("regex", "ab+c")
REASONING = OpenReasoning(THINK_END, (TOOL_CALL,))


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    """One token per byte, then four control tokens."""
    controls = [b"<eos>", b"<eos2>", b"</think>", b"<tool_call>"]
    tokens = [bytes([byte]) for byte in range(BYTES)] + controls
    return GrammarCompiler(tokens, range(BYTES, NUM_IDS), (EOS, EOS_TOO), lambda text: list(text.encode()))


def bank_of(grammars: GrammarCompiler) -> SamplerBank:
    return SamplerBank(VOCAB, (EOS, EOS_TOO), NUM_IDS, grammars)


def logits(*peaks: int) -> NDArray[np.float32]:
    """One row whose largest ids are `peaks`, in this order; the others follow in id order."""
    row = -np.arange(VOCAB, dtype=np.float32)
    for rank, token_id in enumerate(peaks):
        row[token_id] = 1000.0 - rank
    return row[None]


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)  # type: ignore[arg-type]  # passed on as given


def draw(bank: SamplerBank, *peaks: int) -> SampledToken:
    return bank.sample([0], logits(*peaks))[0]


def draw_text(bank: SamplerBank, wish: str) -> str:
    """Draw one token per character, each wished for first."""
    return "".join(chr(draw(bank, ord(char)).token_id) for char in wish)


def test_only_words_of_the_grammar_come_out(grammars: GrammarCompiler) -> None:
    bank = bank_of(grammars)
    bank.start(0, make_start(greedy(constraint=ABC)))
    assert draw(bank, ord("z"), ord("c"), EOS, ord("b"), ord("a")).token_id == ord("a")
    assert draw(bank, EOS, ord("c"), ord("b")).token_id == ord("b")
    assert draw(bank, EOS, ord("c"), ord("b")).token_id == ord("c")


def test_end_ids_come_where_the_grammar_may_stop_and_nothing_else_after_its_end(
    grammars: GrammarCompiler,
) -> None:
    bank = bank_of(grammars)
    bank.start(0, make_start(greedy(constraint=ABC)))
    assert draw_text(bank, "abc") == "abc"
    assert draw(bank, ord("a"), EOS_TOO, EOS).token_id == EOS_TOO
    assert draw(bank, ord("a"), EOS).token_id == EOS  # asked on, as with ignore_eos


def test_ids_without_a_token_never_come_out(grammars: GrammarCompiler) -> None:
    bank = bank_of(grammars)
    bank.start(0, make_start(greedy(constraint=Constraint("regex", "(.|\n)*"))))
    assert draw(bank, VOCAB - 1, NUM_IDS, ord("x")).token_id == ord("x")


def test_a_control_token_is_no_text(grammars: GrammarCompiler) -> None:
    bank = bank_of(grammars)
    bank.start(0, make_start(greedy(constraint=Constraint("regex", "<tool_call>x"))))
    assert draw(bank, TOOL_CALL, ord("<")).token_id == ord("<")


def test_a_lark_grammar_can_name_a_control_token(grammars: GrammarCompiler) -> None:
    bank = bank_of(grammars)
    bank.start(0, make_start(greedy(constraint=Constraint("lark", f'start: <[{TOOL_CALL}]> "x"'))))
    assert draw(bank, ord("<"), ord("x"), TOOL_CALL).token_id == TOOL_CALL
    assert draw(bank, TOOL_CALL, ord("x")).token_id == ord("x")


def test_reasoning_is_free_but_ends_with_its_token_alone(grammars: GrammarCompiler) -> None:
    bank = bank_of(grammars)
    bank.start(0, make_start(greedy(constraint=ABC, reasoning=REASONING)))
    assert draw_text(bank, "zc{") == "zc{"
    assert draw(bank, EOS, TOOL_CALL, EOS_TOO, ord("q")).token_id == ord("q")
    assert draw(bank, THINK_END).token_id == THINK_END
    assert draw(bank, ord("q"), ord("a")).token_id == ord("a")


def test_reasoning_without_constraint_or_budget_changes_nothing(grammars: GrammarCompiler) -> None:
    bank = bank_of(grammars)
    bank.start(0, make_start(greedy(reasoning=REASONING)))
    assert [draw(bank, token).token_id for token in (ord("q"), TOOL_CALL, EOS)] == [ord("q"), TOOL_CALL, EOS]


def test_a_spent_budget_forces_the_end_of_reasoning_once(grammars: GrammarCompiler) -> None:
    bank = bank_of(grammars)
    rules = OpenReasoning(THINK_END, (TOOL_CALL,), budget_tokens=2)
    bank.start(0, make_start(greedy(reasoning=rules)))
    wished = [draw(bank, ord("q")).token_id for _ in range(4)]
    assert wished == [ord("q"), ord("q"), THINK_END, ord("q")]


def test_a_budget_never_cuts_a_call_that_began_in_reasoning(grammars: GrammarCompiler) -> None:
    bank = bank_of(grammars)
    rules = OpenReasoning(THINK_END, (TOOL_CALL,), budget_tokens=2)
    bank.start(0, make_start(greedy(reasoning=rules)))
    wishes = [ord("q"), TOOL_CALL, ord("f"), ord("f")]
    assert [draw(bank, wish).token_id for wish in wishes] == wishes


@pytest.mark.parametrize("num_out", range(6))
def test_a_preempted_sequence_goes_on_where_it_was(grammars: GrammarCompiler, num_out: int) -> None:
    wishes = [ord("q"), THINK_END, ord("a"), ord("b"), ord("c"), EOS]
    params = greedy(constraint=ABC, reasoning=REASONING)
    again = bank_of(grammars)
    again.start(0, make_start(params, output_ids=wishes[:num_out]))
    assert [draw(again, EOS, wish).token_id for wish in wishes[num_out:]] == wishes[num_out:]


def test_slots_do_not_share_a_matcher(grammars: GrammarCompiler) -> None:
    bank = bank_of(grammars)
    for slot in (0, 1):
        bank.start(slot, make_start(greedy(constraint=ABC)))
    bank.sample([0], logits(ord("a")))
    both = bank.sample([0, 1], np.concatenate([logits(ord("a"), ord("b"))] * 2))
    assert [token.token_id for token in both] == [ord("b"), ord("a")]


def test_min_tokens_gives_way_where_only_end_ids_are_left(grammars: GrammarCompiler) -> None:
    bank = bank_of(grammars)
    bank.start(0, make_start(greedy(constraint=ABC, min_tokens=10)))
    draw_text(bank, "abc")
    assert draw(bank, ord("a"), EOS).token_id == EOS


def test_a_grammar_with_a_dead_end_is_an_error_of_its_sequence_alone(grammars: GrammarCompiler) -> None:
    bank = bank_of(grammars)
    bank.start(0, make_start(greedy(constraint=ABC)))
    bank.start(1, make_start(greedy()))
    rows = np.concatenate([logits(ord("a")), logits(ord("z"))])
    rows[0, ord("a")] = -np.inf  # the model itself excludes the one way on
    failed, other = bank.sample([0, 1], rows)
    assert failed.error is not None
    assert "no token" in failed.error
    assert (other.error, other.token_id) == (None, ord("z"))


def test_log_probabilities_are_those_of_what_is_left(grammars: GrammarCompiler) -> None:
    bank = bank_of(grammars)
    bank.start(0, make_start(greedy(constraint=ABC, num_logprobs=2)))
    token = draw(bank, ord("z"))
    assert token.logprobs is not None
    assert token.logprobs.logprob == 0.0
    assert token.logprobs.top[0] == (ord("a"), 0.0)


def test_random_draws_are_json_of_the_schema(grammars: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": "[ \n]{0,2}"},
    }
    constraint = Constraint("json_schema", json.dumps(schema))
    rng = np.random.default_rng(5)
    for seed in range(20):
        bank = bank_of(grammars)
        bank.start(0, make_start(SamplingParams(constraint=constraint), seed=seed))
        out = bytearray()
        while (
            token := bank.sample([0], rng.standard_normal((1, VOCAB), dtype=np.float32))[0]
        ).token_id < BYTES:
            out.append(token.token_id)
        value = json.loads(out)
        assert set(value) == {"n", "ok"}
        assert 0 <= value["n"] <= 99


@pytest.mark.parametrize(
    ("constraint", "needle"),
    [
        (Constraint("regex", "(abc"), "unclosed group"),
        (Constraint("lark", "start: foo"), "unknown name"),
        (Constraint("json_schema", '{"type": "strin"}'), "Invalid type: strin"),
        (Constraint("json_schema", '{"not": {}}'), "not"),
        (Constraint("json_schema", "{"), ""),
        (Constraint("llguidance", 'start: "a"'), ""),
    ],
)
def test_a_wrong_grammar_has_a_reason_on_one_line(
    grammars: GrammarCompiler, constraint: Constraint, needle: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        grammars.check(constraint)
    assert needle in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 500
