"""The model as the API sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from glm53srv.api.tokenizer import Tokenizer
from glm53srv.request import SamplingParams

OWNER = "glm53srv"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against and answered with; made once the model is loaded.

    name: the id that requests give and answers carry. created: Unix seconds. context_tokens: the longest
    sequence that can really be served, not the trained one. defaults: sampling for requests that say
    nothing, from the checkpoint's generation_config.json. is_random: the weights are noise.
    """

    name: str
    created: int
    tokenizer: Tokenizer
    context_tokens: int
    defaults: SamplingParams = field(default_factory=SamplingParams)
    is_random: bool = False
