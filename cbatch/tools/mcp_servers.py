"""Servers of the Model Context Protocol, whose tools a model may call: processes that are started here, or addresses.

The connections to all of them live on one thread with an event loop; calls come from any thread. A server that was
started stays until the program ends, for whoever names it again. If it has ended, the next call starts it again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import wait
from contextlib import AsyncExitStack, ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
from mcp.types import CONNECTION_CLOSED
from pydantic import ValidationError

from cbatch.base.errors import ConfigError, ToolError
from cbatch.tools import guard

TIMEOUT_S, POLL_S = 60.0, 0.05
"""For the start of a server, which may download itself first, and for a call, which looks so often for its end."""

LAST_LINES, LAST_BYTES = 3, 1000
"""How much of what a server writes to stderr is part of the reason of its end."""

logging.getLogger("mcp").addHandler(logging.NullHandler())  # else Python writes its warnings to stderr


def start_servers(path: Path, listed: Mapping[str, Any]) -> list[McpServer]:
    """The servers that a file lists. Raises ConfigError if one is wrong, or cannot be started."""
    used = [name for name, given in listed.items() if not (isinstance(given, dict) and given.get("disabled"))]
    servers = [_server(name, f"{path}, server {name}", json.dumps(listed[name])) for name in used]
    starting = [asyncio.run_coroutine_threadsafe(server.connected(), _loop()) for server in servers]
    for server, future in zip(servers, starting, strict=True):
        if future.exception() is not None:
            raise ConfigError(f"{server.title} cannot be started: {server.problem}.")
    return servers


class McpServer:
    """A server, and the connection to it.

    title:   says where it was named
    tools:   as it describes them
    problem: why it has ended; empty if it has not
    """

    def __init__(self, name: str, title: str, text: str) -> None:
        """`text`: its settings, in JSON. Raises ConfigError if they are wrong."""
        self.name, self.title, self.problem = name, title, ""
        self.tools: list[Any] = []
        self._life: Any = None
        self._over, self._said = asyncio.Event(), b""

        def read(match: re.Match[str]) -> str:
            variable, has_default, default = json.loads(f'"{match[1]}"').removeprefix("env:").partition(":-")
            if (value := os.environ.get(variable, default if has_default else None)) is None:
                raise ConfigError(f"{title}: there is no environment variable {variable}.")
            return json.dumps(value)[1:-1]

        given = json.loads(re.sub(r"\$\{([^}]*)\}", read, text))
        if not isinstance(given, dict) or not (given.get("command") or given.get("url")):
            raise ConfigError(f"{title} must be an object with a command or a url.")
        try:
            self._given, self._process = given, StdioServerParameters(**{"command": "", **given})
        except ValidationError as error:
            (first, *_) = error.errors()
            raise ConfigError(": ".join([title, *map(str, first["loc"]), first["msg"]]) + ".") from None

    def call(self, tool: str, arguments: dict[str, Any], cancelled: threading.Event) -> str:
        """The result of a tool, as text. Raises ToolError."""
        future = asyncio.run_coroutine_threadsafe(self._call(tool, arguments), _loop())
        deadline = time.monotonic() + TIMEOUT_S
        while not wait([future], POLL_S).done:
            if cancelled.is_set() or time.monotonic() > deadline:
                future.cancel()
                raise ToolError("cancelled." if cancelled.is_set() else f"no result within {TIMEOUT_S:g} s.")
        return future.result()

    # What follows runs on the loop's thread.

    async def connected(self) -> Any:
        """The client of the server, which is started if it does not run. Raises ToolError."""
        if self._over.is_set():
            await asyncio.wait([self._life])
        if self._life is None or self._life.done():
            self._over, self._ready = asyncio.Event(), asyncio.get_running_loop().create_future()
            self._life = asyncio.create_task(self._live())
        return await asyncio.shield(self._ready)

    async def _call(self, tool: str, arguments: dict[str, Any]) -> str:
        client, life = await self.connected(), self._life
        try:
            result = await client.call_tool(tool, arguments)
        except Exception as error:
            unknown = "Session terminated", "Server returned an error response"  # of an address that was started anew
            is_lost = getattr(error, "code", 0) == CONNECTION_CLOSED or str(error) in unknown
            if not (is_lost or life.done()):
                raise ToolError(_reason(error)) from error
            self._over.set()
            await asyncio.wait([life])
            raise ToolError(f"the server {self.name} has ended: {self.problem}.") from error
        if result.is_error:
            raise ToolError(_as_text(result))
        return _as_text(result)

    async def _live(self) -> None:
        """The life of the server, until it has ended."""
        self._said, reason = b"", ""
        # Some processes end at a first message that is not the old one; an address answers what it does not know.
        mode: Any = "legacy" if self._process.command else "auto"
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(TIMEOUT_S):
                    with ExitStack() as started:
                        client = Client(await self._transport(stack, started), mode=mode)
                        await stack.enter_async_context(client)
                    pages = [await client.list_tools()]
                    while (cursor := pages[-1].next_cursor) is not None:
                        pages.append(await client.list_tools(cursor=cursor))
                    self.tools = [tool for page in pages for tool in page.tools]
                self.problem = ""
                self._ready.set_result(client)
                await self._over.wait()
        except BaseException as error:
            reason = _reason(error)
        lines = ["".join(filter(str.isprintable, line)) for line in self._said.decode(errors="replace").splitlines()]
        words = " / ".join([line.strip() for line in lines if line.strip()][-LAST_LINES:])
        self.problem = ": ".join(filter(None, [reason, words])).rstrip(".") or "its connection was closed"
        if not self._ready.done():
            self._ready.set_exception(ToolError(f"the server {self.name} has ended: {self.problem}."))
            self._ready.exception()  # nobody need take it

    async def _transport(self, stack: AsyncExitStack, started: ExitStack) -> Any:
        """The streams that a client takes. `started`: is closed once the server has started"""
        url, headers = self._given.get("url", ""), self._given.get("headers")
        if self._process.command:
            words = ["-I", guard.__file__, self._process.command, *self._process.args]
            process = self._process.model_copy(update={"command": sys.executable, "args": words})
            read, write = os.pipe()
            stack.push_async_callback(asyncio.wait, [asyncio.create_task(self._hear(read))], timeout=1)
            return stdio_client(process, started.enter_context(os.fdopen(write, "w")))
        if self._given.get("type") == "sse":
            return sse_client(url, headers)
        client = await stack.enter_async_context(create_mcp_http_client(headers))
        return streamable_http_client(url, http_client=client)

    async def _hear(self, pipe: int) -> None:
        """Keeps the last of what the server writes to stderr, which ends with it."""
        stderr, over = asyncio.StreamReader(), self._over
        await _loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stderr), os.fdopen(pipe, "rb", 0))
        while data := await stderr.read(LAST_BYTES):
            self._said = (self._said + data)[-LAST_BYTES:]
        over.set()


_server = cache(McpServer)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="cbatch-mcp", daemon=True).start()
    return loop


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    text = " ".join(str(error).split())
    return text if isinstance(error, MCPError | OSError) else f"{type(error).__name__}: {text}"


def _as_text(result: Any) -> str:
    """The result as the model gets it: its text, or else its structured content; what is not text is named."""
    parts = []
    for each in result.content:
        resource = getattr(each, "resource", each)
        about = [str(getattr(resource, name)) for name in ("uri", "mime_type") if getattr(resource, name, None)]
        text = getattr(resource, "text", None)
        parts.append(f"[{each.type.replace('_', ' ')}: {', '.join(about)}]" if text is None else text)
    if result.structured_content is not None and all(each.type != "text" for each in result.content):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)
