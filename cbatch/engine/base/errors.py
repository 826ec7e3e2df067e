"""All errors that cbatch raises on purpose. Their messages are sentences for users.

CbatchError
├── ConfigError     options that contradict each other or cannot be met
├── ModelError      a model that cannot be loaded, or would be silently wrong here
├── EngineError     the engine failed while requests were running, or is closed
└── RequestError    one request that cannot be served; `code` names the kind
"""


class CbatchError(Exception):
    """Base of all errors of this package."""


class ConfigError(CbatchError):
    """An option or a combination of options that cannot be met."""


class ModelError(CbatchError):
    """A model that is missing, broken, or not supported."""


class EngineError(CbatchError):
    """The engine failed while requests were running, or is closed."""


class RequestError(CbatchError):
    """One request that cannot be served; other requests go on.

    `code` is one of the error codes of an output row, such as `prompt_too_long` or `invalid_row`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
