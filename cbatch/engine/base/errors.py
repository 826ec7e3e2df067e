"""All errors that cbatch raises on purpose. Their messages are sentences for users."""


class CbatchError(Exception):
    """Base of all errors of this package."""


class ConfigError(CbatchError):
    """Options that contradict each other or cannot be met."""


class ModelError(CbatchError):
    """A model that is missing, broken, not supported, or would be silently wrong here."""


class EngineError(CbatchError):
    """The engine failed while requests were running, or is closed."""


class RequestError(CbatchError):
    """One request that cannot be served; other requests go on.

    `code` is one of the error codes of an output row, such as `prompt_too_long` or `invalid_row`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
