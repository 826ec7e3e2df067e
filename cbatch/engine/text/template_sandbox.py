"""Renders a chat template once in a child process, so that one that never ends cannot hang the engine."""

from __future__ import annotations

import selectors
import subprocess
import sys

from cbatch.engine.base.errors import ModelError

TIME_LIMIT = 5.0
"""Seconds. A real template takes a millisecond."""

_OUT_OF_MEMORY = 77

# The child only checks time and memory. A template that raises is an error of the request that makes it raise, and a
# child that cannot run at all says nothing about the template.
_CHILD = f"""
import datetime, resource, sys

def refuse(message):
    raise ValueError(message)

try:
    resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
except (OSError, ValueError):
    pass
from jinja2.sandbox import ImmutableSandboxedEnvironment
messages = [dict(role=role, content="hello") for role in ("user", "assistant", "user")]
schema = dict(type="object", properties=dict(place=dict(type="string", description="where")), required=["place"])
tool = dict(type="function", function=dict(name="look", description="looks", parameters=schema))
call = dict(id="abcdefghi", type="function", function=dict(name="look", arguments=dict(place="here")))
called = [
    dict(role="user", content="hello"),
    dict(role="assistant", content="", tool_calls=[call]),
    dict(role="tool", name="look", tool_call_id="abcdefghi", content="a table"),
]
try:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals.update(raise_exception=refuse, strftime_now=datetime.datetime.now().strftime)
    template = environment.from_string(sys.stdin.read())
    for given in (dict(messages=messages), dict(messages=called, tools=[tool])):
        try:
            template.render(**given, add_generation_prompt=True)
        except MemoryError:
            raise
        except Exception:
            pass
except MemoryError:
    sys.exit({_OUT_OF_MEMORY})
except Exception:
    pass
"""


class TemplateSandbox:
    """Renders the template while the body of the `with` block loads the weights.

    Leaving the block raises ModelError if the template takes too long or too much memory.
    """

    def __init__(self, template: str, timeout: float = TIME_LIMIT) -> None:
        self._timeout = timeout
        # -P: a file in the working folder must not be imported as jinja2.
        command = [sys.executable, "-P", "-c", _CHILD]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null)
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(template.encode("utf-8", "replace"))
            self._child.stdin.close()
        except BrokenPipeError:
            pass  # the child could not run

    def __enter__(self) -> TemplateSandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        has_ended = False
        try:
            has_ended = self._wait(self._timeout if kind is None else 0)
        finally:
            if not has_ended:
                self._child.kill()
            code = self._child.wait()
        if kind is not None:
            return
        if not has_ended:
            raise ModelError(f"The model's chat template does not end within {self._timeout:g} s.")
        if code == _OUT_OF_MEMORY:
            raise ModelError("The model's chat template takes too much memory.")

    def _wait(self, seconds: float) -> bool:
        """Whether the child ends within this time. Its output, which is empty, closes when it ends."""
        # Popen.wait with a timeout polls only every 50 ms, which is as long as the child takes.
        with self._child.stdout as output, selectors.DefaultSelector() as selector:  # type: ignore[union-attr]
            selector.register(output, selectors.EVENT_READ)
            return bool(selector.select(seconds))
