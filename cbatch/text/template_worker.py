"""Renders chat templates in a process of its own, whose time, memory and output are bounded for each conversation."""

from __future__ import annotations

import pickle
import threading
from typing import Any

from cbatch.text.template_child import TOO_LARGE
from cbatch.text.worker_process import MEMORY, WorkerProcess

CPU_SECONDS = 2
"""For one conversation. A real template takes a millisecond."""

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
        self._process: WorkerProcess | None = None
        self._known: list[str] = []
        """Templates that the process has."""

    def render(self, template: str, arguments: dict[str, Any]) -> str:
        """A conversation in the model's format. Raises TemplateFailed, and OSError if no process can be started.

        arguments: those of `render_chat`
        """
        with self._lock:
            process = self._process
            if process is None or not process.is_running():
                process = self._start()
            is_new = template not in self._known
            if is_new:
                self._known.append(template)
            conversation = pickle.dumps(arguments)
            most = MOST_CHARACTERS + GROWTH * len(conversation)
            request = template if is_new else None, self._known.index(template), conversation, most
            answer = process.ask(pickle.dumps(request), 4 * most)
            if answer is None:
                self._process = None
                raise TemplateFailed(process.end(self._cpu_seconds, TOO_LARGE))
        worked, data = answer
        text = data.decode("utf-8", "surrogatepass")
        if not worked:
            raise TemplateFailed(text)
        return text

    def _start(self) -> WorkerProcess:
        self._process = WorkerProcess("cbatch.text.template_child", self._cpu_seconds, MEMORY)
        self._known = []
        return self._process
