"""The exit codes of a command, and the exceptions that lead to them."""

from __future__ import annotations

from cbatch.engine import CbatchError

EXIT_USAGE, EXIT_FATAL, EXIT_PIPE = 2, 3, 141


class UserError(CbatchError):
    """What the user typed cannot be done. The message says why, in a sentence for the terminal."""


class RunFailed(CbatchError):
    """A run ended early. Finished rows are written."""


class ReaderGone(Exception):
    """The reader of the output has closed it. (Click would turn a BrokenPipeError into exit code 1.)"""


class Interrupted(BaseException):
    """A signal asks the command to end. A BaseException, so that no library mistakes it for a failure of its own."""

    def __init__(self, signum: int, resume_hint: str = "") -> None:
        super().__init__(f"Interrupted.{resume_hint}")
        self.exit_code = 128 + signum
