"""Renders chat templates in a process of its own, whose time, memory and output are bounded for each conversation."""

from __future__ import annotations

import pickle
import select
import signal
import subprocess
import threading
import weakref
from contextlib import suppress
from typing import IO, Any

from cbatch.engine.base.child_command import child_command
from cbatch.engine.text.template_child import HEADER, TOO_LARGE

CPU_SECONDS = 5
"""For one conversation. A real template takes a millisecond."""

WALL_SECONDS = 60
"""For a process that hangs without computing."""

MEMORY = 2 << 30
"""Bytes of address space."""

MOST_CHARACTERS = 1 << 20
"""That come out of an empty conversation; of others so many more, and GROWTH times the bytes of the conversation."""

GROWTH = 8


class TemplateFailed(Exception):
    """A template did not render a conversation. The text says why, without a full stop."""


class TemplateWorker:
    """The process, which the first conversation starts and which stays for the next ones. Thread-safe."""

    def __init__(self, cpu_seconds: int = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._known: list[str] = []
        """Templates that the process has."""

    def render(self, template: str, arguments: dict[str, Any]) -> str:
        """A conversation in the model's format. Raises TemplateFailed, and OSError if no process can be started.

        arguments: those of `render_chat`
        """
        with self._lock:
            child = self._child if self._child is not None and self._child.poll() is None else self._start()
            is_new = template not in self._known
            if is_new:
                self._known.append(template)
            conversation = pickle.dumps(arguments)
            most = MOST_CHARACTERS + GROWTH * len(conversation)
            request = template if is_new else None, self._known.index(template), conversation, most
            answer = _ask(child, pickle.dumps(request), 4 * most)
            if answer is None:
                _kill(child)
                self._child = None
                raise TemplateFailed(self._reason(child.returncode))
        worked, text = answer
        if not worked:
            raise TemplateFailed(text)
        return text

    def _reason(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return f"it does not end within {self._cpu_seconds} s"
        return f"{TOO_LARGE}, or breaks the interpreter (its process ended with {status})"

    def _start(self) -> subprocess.Popen[bytes]:
        # In a session of its own, so that Ctrl-C reaches only the parent, which shuts down in an orderly way.
        child = subprocess.Popen(
            child_command("cbatch.engine.text.template_child", self._cpu_seconds, MEMORY),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        weakref.finalize(self, _kill, child)
        self._child, self._known = child, []
        return child


def _ask(child: subprocess.Popen[bytes], request: bytes, most: int) -> tuple[bool, str] | None:
    """Whether a text was rendered, and the text; None if the process ended, hangs, or says more than so many bytes."""
    assert child.stdin is not None and child.stdout is not None
    with suppress(BrokenPipeError):
        child.stdin.write(request)
        child.stdin.flush()
    waiting = select.poll()
    waiting.register(child.stdout, select.POLLIN)
    if not waiting.poll(1000 * WALL_SECONDS):
        return None
    header = _read(child.stdout, HEADER.size)
    if header is None:
        return None
    worked, size = HEADER.unpack(header)
    data = _read(child.stdout, size) if size <= most else None
    return None if data is None else (worked, data.decode("utf-8", "surrogatepass"))


def _read(file: IO[bytes], size: int) -> bytes | None:
    """So many bytes, or None if there are not so many."""
    data = file.read(size)
    return data if len(data) == size else None


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(BrokenPipeError), child:  # the pipe may hold data that was not written yet
        child.kill()
