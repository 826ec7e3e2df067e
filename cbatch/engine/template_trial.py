"""Tries a chat template in a child process, so that one that never ends cannot hang the engine."""

from __future__ import annotations

import subprocess
import sys

from cbatch.engine.errors import ModelError

TIME_LIMIT = 5.0
"""Seconds; a real template takes a millisecond."""

# Only time and memory are judged here: a template that raises is an error of the row that makes it raise.
_CHILD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from jinja2.sandbox import ImmutableSandboxedEnvironment
messages = [{"role": role, "content": "hello"} for role in ("user", "assistant", "user")]
try:
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    environment.from_string(sys.stdin.read()).render(messages=messages, add_generation_prompt=True)
except MemoryError:
    sys.exit(1)
except Exception:
    pass
"""


class TemplateTrial:
    """A rendering of the template that runs beside the loading of the weights."""

    def __init__(self, template: str) -> None:
        command = [sys.executable, "-I", "-c", _CHILD]
        null = subprocess.DEVNULL
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=null, stderr=null)
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(template.encode("utf-8", "replace"))
            self._child.stdin.close()
        except BrokenPipeError:
            pass  # the child died; its exit code says so

    def finish(self, timeout: float = TIME_LIMIT) -> None:
        """Waits for the end. Raises ModelError where the template takes too long or too much memory."""
        try:
            code = self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            raise ModelError(f"Its chat template does not end within {timeout:g} s; it will not be used.") from None
        if code != 0:
            raise ModelError("Its chat template takes too much memory; it will not be used.")
