"""All errors that cbatch raises on purpose. Their messages are sentences for users."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten


class CbatchError(Exception):
    """Base of all errors of this package."""


class ConfigError(CbatchError):
    """Options that contradict each other or cannot be met."""


class ModelError(CbatchError):
    """A model that is missing, broken, not supported, or would be silently wrong here."""


class ModelNotFound(ModelError):
    """A model that is neither a folder, nor in the local cache of the hub, nor to be had from the hub."""


class EngineError(CbatchError):
    """The engine failed while requests were running, or is closed."""


class RunFailed(CbatchError):
    """A batch ended early: its input or its output failed, or it had too many errors. Finished rows are written."""


class ToolError(Exception):
    """A call of a tool without a result. The message tells the model why."""


class ReaderGone(Exception):
    """The reader of the output has closed it. (Click would turn a BrokenPipeError into exit code 1.)"""


class Interrupted(BaseException):
    """A signal asks the program to end. A BaseException, so that no library mistakes it for a failure of its own."""

    def __init__(self, signum: int, resume_hint: str = "") -> None:
        super().__init__(f"Interrupted.{resume_hint}")
        self.exit_code = 128 + signum


class RequestError(CbatchError):
    """One request that cannot be served; other requests go on.

    `code` is one of the error codes of an output row, such as `prompt_too_long` or `invalid_row`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str]]:
        return type(self), (self.code, str(self))  # so that it can be sent to another process


def invalid_row(message: str) -> RequestError:
    """The error of a request that asks for something wrong."""
    return RequestError("invalid_row", message)


class NativePanic(Exception):
    """Native code has panicked. The text says why, without a full stop."""


def as_error(raised: BaseException) -> Exception:
    """The raised object as an Exception, so that a panic is handled as any other error.

    Extensions in Rust each have a PanicException of their own, a BaseException that cannot be named here.
    Raises what asks to end, such as KeyboardInterrupt.
    """
    if isinstance(raised, Exception):
        return raised
    if isinstance(raised, (KeyboardInterrupt, SystemExit, GeneratorExit, Interrupted)):
        raise raised
    error = NativePanic(str(raised).rstrip(". ") or type(raised).__name__)
    error.__cause__ = raised
    return error


@contextmanager
def os_errors_as(kind: type[CbatchError], what: str) -> Iterator[None]:
    """Raises an error of the system as another kind of error, which says what cannot be done, and why."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {reason_of(error)}.") from error


def reason_of(error: BaseException) -> str:
    """The message of an error; of one of the system, without the number and the name of the file."""
    return str((isinstance(error, OSError) and error.strerror) or error)


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not blank; the kind of the error if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def in_short(error: BaseException) -> str:
    """The message of an error of a library or a driver, without a full stop, for use in a sentence.

    It begins with the kind of the error, except RuntimeError, which everything of torch and CUDA is.
    """
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    code = re.search(r"Error \d+: .*", line)
    text = shorten(code[0] if code else re.split(r"\. | - ", line)[0], 200).rstrip(". ")
    if not text:
        return type(error).__name__
    return text if isinstance(error, RuntimeError) else f"{type(error).__name__}: {text}"


def first_sentence(error: BaseException) -> str:
    """The first line of a library's error, and the second if that says what it is about, ended by a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = shorten(" ".join(lines[:2]) if lines[0].endswith(":") else lines[0], 300)
    if isinstance(error, LookupError | TypeError | AttributeError):  # whose messages are not for users
        line = f"{type(error).__name__}: {line}"
    return line if line.endswith(".") else line + "."
