"""Renders a chat template once in a child process, so that one that never ends cannot hang the engine."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext, suppress

from cbatch.base.errors import ModelError
from cbatch.text import chat_template
from cbatch.text.template_renderer import known_weight

TIME_LIMIT = 5.0
"""Seconds. A real template takes a millisecond."""

MAX_CHARACTERS, MAX_TAGS = 1 << 20, 20_000
"""Of a template. Real ones have some ten thousand characters, and hundreds of tags."""


def template_check(template: str | None) -> AbstractContextManager[object]:
    """Tries a template while the body of the `with` block loads the weights, unless its work is known to be bounded.

    Raises ModelError if the template is too large, and from the block as TemplateSandbox does.
    """
    if template is None:
        return nullcontext()
    tags = template.count("{%") + template.count("{{")
    if len(template) > MAX_CHARACTERS or tags > MAX_TAGS:
        raise ModelError(
            f"The model's chat template is too large: {len(template):,} characters with {tags:,} tags. At most "
            f"{MAX_CHARACTERS:,} characters with {MAX_TAGS:,} tags are read."
        )
    return nullcontext() if known_weight(template) is not None else TemplateSandbox(template)


class TemplateSandbox:
    """Renders the template while the body of the `with` block loads the weights.

    Leaving the block raises ModelError if the template takes too long or too much memory. A template that raises is an
    error of the request that makes it raise, and a child that cannot run at all says nothing about the template.
    """

    def __init__(self, template: str, timeout: float = TIME_LIMIT) -> None:
        self._timeout = timeout
        # -P: a file in the working folder must not be imported as jinja2.
        command = [sys.executable, "-P", chat_template.__file__]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null)
        stdin, self._child.stdin = self._child.stdin, None
        assert stdin is not None
        with suppress(BrokenPipeError), stdin:  # the child may be unable to run
            stdin.write(template.encode("utf-8", "replace"))

    def __enter__(self) -> TemplateSandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._child:
            try:
                # Its output is empty and closes when it ends. Popen.wait polls only every 50 ms if it has a timeout.
                self._child.communicate(timeout=self._timeout if kind is None else 0)
            except subprocess.TimeoutExpired:
                if kind is None:
                    raise ModelError(f"The model's chat template does not end within {self._timeout:g} s.") from None
            finally:
                self._child.kill()
        if kind is None and self._child.returncode == chat_template.OUT_OF_MEMORY:
            raise ModelError("The model's chat template takes too much memory.")
