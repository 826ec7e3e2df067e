"""Chats on a real engine without a screen."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from cbatch.api import Engine
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.engine_client import EngineClient
from cbatch.cli.chat.session.session import Reply, Session
from tests.support.faults import TIMEOUT_S, wait_until


class ChatHarness:
    """Makes controllers on one engine, and runs their callbacks as a front end does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.client = EngineClient(lambda: engine)
        self._callbacks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_open = False
        self.client.start(self._callbacks.put, lambda error: setattr(self, "_is_open", True))
        self.until(lambda: self._is_open)

    def make(self, **options: Any) -> ChatController:
        return ChatController(self.client, **options)

    def until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._callbacks.get(timeout=TIMEOUT_S)()

    def settle(self, controller: ChatController) -> None:
        self.until(lambda: not any(session.is_busy for session in controller.sessions))

    def ask(self, controller: ChatController, text: str, session: Session | None = None) -> str:
        session = session or controller.current
        controller.send(session, text)
        self.settle(controller)
        return reply_of(session).text

    def wait_idle(self) -> None:
        wait_until(lambda: not (stats := self.engine.stats()).num_running and not stats.num_waiting, TIMEOUT_S)


def reply_of(session: Session) -> Reply:
    assert session.last is not None and session.last.reply is not None
    return session.last.reply
