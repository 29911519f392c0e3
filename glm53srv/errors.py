"""One tree of exceptions.

    Glm53Error
    |-- ConfigError        a flag, environment variable or file entry is wrong      exit code 2
    |-- CheckpointError    the model directory cannot be served                      exit code 3
    |-- MachineError       this machine lacks something (memory, instruction set)    exit code 4
    |-- DownloadError      the model could not be fetched                            exit code 6
    |-- EngineError        a step failed; the engine must be closed                  exit code 5
    |-- GrammarError       a constraint cannot be compiled; the API makes it a 400
    `-- RequestError       one request is refused; the server goes on                an HTTP answer
        |-- InvalidRequest, ContextLengthExceeded   400
        |-- AuthenticationFailed                    401
        |-- ModelNotFound                           404
        |-- BodyTooSlow                             408
        |-- BodyTooLarge                            413
        |-- QueueFull                               429, Retry-After
        |-- RequestFailed                           500
        |-- NotReady, QueueTimeout                  503, Retry-After
        `-- RequestTimeout                          504

The text of an error is one line that says what is wrong and what to change.
"""

from __future__ import annotations


class Glm53Error(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class ConfigError(Glm53Error):
    """A command line flag, environment variable or configuration file entry is wrong."""

    exit_code = 2


class CheckpointError(Glm53Error):
    """The model directory cannot be served; the text names the file and the tensor."""

    exit_code = 3


class MachineError(Glm53Error):
    """This machine lacks what the configuration asks for (memory, instruction set, device)."""

    exit_code = 4


class EngineError(Glm53Error):
    """A step failed. Only Engine.close() may follow."""

    exit_code = 5


class DownloadError(Glm53Error):
    """The model could not be fetched, or not whole; running the same command again goes on from there."""

    exit_code = 6


class GrammarError(Glm53Error):
    """A constraint cannot be compiled; the text is the compiler's reason, on one line."""


class RequestError(Glm53Error):
    """One request is refused or failed; the attributes are those of an OpenAI error object.

    status: HTTP status. type, code, param: fields of the error object.
    retry_after_s: whole seconds for a Retry-After header, or None.
    """

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """A field of the request is missing, of the wrong type, or out of range."""


class ContextLengthExceeded(RequestError):
    """The prompt leaves no room for a token. The wording is the one that agents match (facts: OpenAI)."""

    code = "context_length_exceeded"

    def __init__(self, *, limit_tokens: int, prompt_tokens: int, completion_tokens: int, param: str) -> None:
        place = "messages" if param == "messages" else "prompt"
        super().__init__(
            f"This model's maximum context length is {limit_tokens} tokens. However, you requested "
            f"{prompt_tokens + completion_tokens} tokens ({prompt_tokens} in the {place}, "
            f"{completion_tokens} in the completion). Please reduce the length of the {place}.",
            param=param,
        )


class AuthenticationFailed(RequestError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ModelNotFound(RequestError):
    """The request names a model that is not served."""

    status = 404
    code = "model_not_found"


class BodyTooSlow(RequestError):
    """The request body did not arrive in time."""

    status = 408
    code = "body_timeout"


class BodyTooLarge(RequestError):
    """The request body is larger than the server accepts."""

    status = 413


class QueueFull(RequestError):
    """All slots run and the queue has reached its bound."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class RequestFailed(RequestError):
    """The engine failed while this request was running."""

    status = 500
    type = "server_error"
    code = "engine_error"


class NotReady(RequestError):
    """The model is still loading, or the server is draining."""

    status = 503
    type = "unavailable_error"
    code = "not_ready"


class QueueTimeout(RequestError):
    """The request waited for a slot longer than the server lets it."""

    status = 503
    type = "unavailable_error"
    code = "queue_timeout"


class RequestTimeout(RequestError):
    """The request ran longer than the server lets it."""

    status = 504
    type = "timeout_error"
    code = "request_timeout"
