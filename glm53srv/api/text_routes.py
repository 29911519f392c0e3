"""/tokenize and /detokenize: text to ids and back, without generating."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from glm53srv.api.asgi import read_body, send_json
from glm53srv.api.chat_template import render_chat
from glm53srv.api.openai_wire import check_model
from glm53srv.api.raw_prompts import parse_prompts
from glm53srv.api.routes import ApiContext
from glm53srv.api.schema import parse_chat_prompt
from glm53srv.api.served import ServedModel
from glm53srv.api.wire import Fields, invalid, parse_body

Translate = Callable[[bytearray, ServedModel], dict[str, Any]]


class TextEndpoint:
    """An endpoint that needs the tokenizer only; long texts are handled on a text thread."""

    def __init__(self, context: ApiContext, translate: Translate) -> None:
        self._context = context
        self._translate = translate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._context.max_body_bytes)
        model = self._context.state.require_running().model
        await send_json(send, 200, await self._context.call(len(body), self._translate, body, model))


def tokenize(body: bytearray, model: ServedModel) -> dict[str, Any]:
    """Encode `prompt` (llama.cpp's name: `content`), a string or a list of them, or `messages`.

    In a prompt the spelling of a control token stands for the token; nothing is ever added, so
    add_special_tokens changes nothing. Messages are rendered as a chat completion renders them. Raises
    RequestError.
    """
    fields = Fields(parse_body(body))
    check_model(fields.string("model"), model)
    fields.boolean("add_special_tokens", True)
    given = [name for name in ("prompt", "content", "messages") if fields.has(name)]
    if len(given) != 1:
        raise fields.error("prompt", "or messages must be given, one of the two")
    (name,) = given
    if name == "messages":
        messages, tools, options = parse_chat_prompt(fields)
        ids: Any = list(model.tokenizer.encode(render_chat(messages, tools, options).segments))
        num_ids = len(ids)
    elif fields.raw(name) == "":
        ids, num_ids = [], 0
    else:
        prompts, is_list = parse_prompts(fields, name)
        texts = [text if isinstance(text, str) else None for _, text in prompts]
        encoded = [_encode(text, name, model) for text in texts]
        ids, num_ids = (encoded, sum(map(len, encoded))) if is_list else (encoded[0], len(encoded[0]))
    count = [len(part) for part in ids] if ids and isinstance(ids[0], list) else num_ids
    answer = {"tokens": ids, "count": count, "max_model_len": model.context_tokens}
    if fields.boolean("return_token_strs", False):
        answer["token_strs"] = _each(ids, lambda token_id: _spell(token_id, model))
    if fields.boolean("with_pieces", False):  # llama.cpp
        answer["tokens"] = _each(ids, lambda token_id: {"id": token_id, "piece": _piece(token_id, model)})
    return answer


def detokenize(body: bytearray, model: ServedModel) -> dict[str, Any]:
    """Decode `tokens`, ids or a list of lists of them; bytes that are no UTF-8 become U+FFFD.

    The text comes under SGLang's, vLLM's and llama.cpp's name. Raises RequestError.
    """
    fields = Fields(parse_body(body))
    check_model(fields.string("model"), model)
    skip = fields.boolean("skip_special_tokens", True)
    tokens = fields.raw("tokens")
    if not isinstance(tokens, list):
        raise fields.error("tokens", "must be a list of token ids, or a list of such lists")
    if not tokens:
        text: str | list[str] = ""
    else:
        prompts, is_list = parse_prompts(fields, "tokens")
        texts = [_decode(path, ids, model, skip) for path, ids in prompts]
        text = texts if is_list else texts[0]
    return {"text": text, "prompt": text, "content": text}


def _encode(text: str | None, name: str, model: ServedModel) -> list[int]:
    if text is None:
        raise invalid(name, "must be a string or a list of strings")
    return model.tokenizer.encode_with_controls(text)


def _decode(path: str, ids: str | tuple[int, ...], model: ServedModel, skip: bool) -> str:
    tokenizer = model.tokenizer
    if isinstance(ids, str) or min(ids) < 0 or max(ids) >= tokenizer.num_ids:
        raise invalid(path, f"must be token ids between 0 and {tokenizer.num_ids - 1}")
    return tokenizer.decode_bytes(ids, skip_special_tokens=skip).decode(errors="replace")


def _each(ids: Any, spell: Callable[[int], Any]) -> Any:
    return [_each(entry, spell) if isinstance(entry, list) else spell(entry) for entry in ids]


def _spell(token_id: int, model: ServedModel) -> str:
    return model.tokenizer.token_bytes(token_id).decode(errors="replace")


def _piece(token_id: int, model: ServedModel) -> str | list[int]:
    """Give text, or the bytes of a token that is no text by itself."""
    data = model.tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
