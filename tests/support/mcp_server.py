"""A small server of the Model Context Protocol, as a program: over stdio, or on a port that it writes to a file.

python mcp_server.py [FILE [PORT]]
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult

server = MCPServer("test", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds.

    Only whole numbers.
    """
    return str(a + b)


@server.tool(name="what fails")
def fails(why: str) -> str:
    """Fails."""
    raise ToolError(why)


@server.tool()
def picture() -> list[str | Image]:
    """A text and an image."""
    return ["Here it is.", Image(data=b"x", format="png")]


@server.tool()
def structured() -> CallToolResult:
    """No text."""
    return CallToolResult(content=[], structured_content={"é": 5})


@server.tool()
def long() -> str:
    """Much text."""
    return "x" * 100_000


@server.tool()
def variable(name: str) -> str:
    """A variable of its environment."""
    return os.environ.get(name, "none")


@server.tool()
def groups() -> str:
    """Its process, and the group of that."""
    return f"{os.getpid()} {os.getpgid(0)}"


@server.tool()
async def slow() -> str:
    """Takes long."""
    await asyncio.sleep(1000)
    return "done"


@server.tool()
def dies() -> str:
    """Ends the server in the middle of a call."""
    print("the last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def serve(port_file: Path, port: int) -> None:
    import uvicorn

    with socket.create_server(("127.0.0.1", port)) as listener:
        port_file.write_text(str(listener.getsockname()[1]))
        config = uvicorn.Config(server.streamable_http_app(), log_level="critical")
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run("stdio")
    else:
        serve(Path(sys.argv[1]), int(sys.argv[2]))
