"""The model as the API sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from glm53srv.api.tokenizer import Tokenizer
from glm53srv.request import SamplingParams

if TYPE_CHECKING:  # numpy: not before the port is open
    from glm53srv.engine.grammar import GrammarCompiler

OWNER = "glm53srv"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against and answered with; made once the model is loaded.

    name: the id that requests give and answers carry. created: Unix seconds. context_tokens: the longest
    sequence that can really be served, not the trained one. defaults: sampling for requests that say
    nothing, from the checkpoint's generation_config.json. is_random: the weights are noise. is_demo: the
    small trained model that comes with the server. path: the checkpoint's directory. model_type,
    architectures: from its config.json. grammars: compiles constraints, the same that the engine has; None:
    there can be none.
    """

    name: str
    created: int
    tokenizer: Tokenizer
    context_tokens: int
    defaults: SamplingParams = field(default_factory=SamplingParams)
    is_random: bool = False
    is_demo: bool = False
    path: str = ""
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    grammars: GrammarCompiler | None = None

    @property
    def caveat(self) -> str | None:
        """One sentence on what may not be expected of this model; None for one to be taken at its word."""
        if self.is_random:
            return f"the weights of {self.name} are random: it speaks nonsense, by design"
        if self.is_demo:
            return f"{self.name} is a small demo: it knows a closed world of facts, sums and tools, no more"
        return None
