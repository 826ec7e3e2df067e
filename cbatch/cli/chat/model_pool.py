"""The models of a chat: the one that it began with, and others that were loaded beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from cbatch.cli.chat.engine_client import EngineClient
from cbatch.cli.common.exits import UserError

if TYPE_CHECKING:
    from cbatch.api import Engine

OpenModel = Callable[[str], "Engine"]
"""Loads a model by its hub id or folder, with the chat's other options."""


class ModelPool:
    """A client for each model. Models are loaded in the background; what is asked of them meanwhile waits."""

    def __init__(self, client: EngineClient, name: str, open_model: OpenModel | None = None) -> None:
        """
        client:     of the model that the chat began with
        name:       its hub id or folder; empty for the bundled one
        open_model: loads others; None allows none
        """
        self.default = client
        self.name = name
        self._open_model = open_model
        self._clients: dict[str, EngineClient] = {}

    @property
    def clients(self) -> list[EngineClient]:
        return [self.default, *self._clients.values()]

    @property
    def names(self) -> list[str]:
        """All models that are loaded or being loaded; the first is the chat's own."""
        return [self.name, *self._clients]

    def client(self, name: str) -> EngineClient:
        """What replies with a model. An empty name, or that of a model that is gone, stands for the chat's own."""
        return self._clients.get(name, self.default)

    def has(self, name: str) -> bool:
        return name in ("", self.name) or name in self._clients

    def load(self, name: str, on_open: Callable[[str, BaseException | None], None]) -> None:
        """Begins to load a model.

        on_open: called on the front end's thread with the name, and with what kept it from opening, if anything did

        Raises UserError if no other model can be loaded here.
        """
        if self._open_model is None:
            raise UserError("Another model can be loaded in a terminal only.")

        def on_open_here(error: BaseException | None) -> None:
            if error is not None and self._clients.pop(name, None) is not None:
                on_open(name, error)
            elif name in self._clients:
                on_open(name, None)

        self._clients[name] = self.default.beside(partial(self._open_model, name), on_open_here)

    def unload(self, name: str) -> None:
        """Closes a model. Raises UserError if it is not there, or the chat's own."""
        if name not in self._clients:
            what = "is the chat's own model" if self.has(name) else "is not loaded"
            raise UserError(f"{name or 'This'} {what}.")
        self._clients.pop(name).unload()

    def close(self) -> None:
        for client in self.clients:
            client.close()
