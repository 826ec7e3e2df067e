"""What runs in the process that has a tokenizer which is not known to work (see `WorkerBackend`).

It reads requests from stdin, one line of JSON each: the name of a method of `TokenizerServer` and its arguments. It
answers each on stdout with a HEADER and JSON. What takes too long ends the process by a signal.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cbatch.base.errors import ModelError, as_error
from cbatch.text.backend.base import TextStream, TokenizerFailed
from cbatch.text.backend.local import LocalBackend
from cbatch.text.backend.trial import try_part
from cbatch.text.backend.worker import FORGOTTEN, TOO_LARGE
from cbatch.text.loading import load_here
from cbatch.text.worker_process import HEADER

SECONDS_PER_MB = 2.0
"""More processor time for longer requests: ordinary tokenizers take half a second for a million characters."""

MAX_STREAMS = 1024


class TokenizerServer:
    """The tokenizer and the texts that it is making."""

    def __init__(self) -> None:
        self._streams: OrderedDict[int, tuple[TextStream, int]] = OrderedDict()
        """By number: a stream, and how many tokens it has."""

    def load(self, source: str, revision: str | None) -> dict[str, Any]:
        """What it says of itself; or `error`, a sentence."""
        try:
            tokenizer = self._tokenizer = load_here(source, revision)
        except ModelError as error:
            return {"error": str(error)}
        backend = self._backend = tokenizer.backend
        assert isinstance(backend, LocalBackend)
        added = backend.get_added_tokens_decoder()
        return {
            "bos_id": tokenizer.bos_id,
            "chat_template": tokenizer.chat_template,
            "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens.items()},
            "added": [[number, token.content, token.special] for number, token in added.items()],
            "decoder": str(backend.decoder),
        }

    def try_part(self, part: str) -> None:
        assert isinstance(self._backend, LocalBackend)
        try_part(part, self._backend, self._tokenizer.encode)

    def encode(self, text: str, add_special_tokens: bool) -> list[Any]:
        encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return [encoded.ids, encoded.offsets]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def push(self, number: int, context: Sequence[int], before: int, token_ids: Sequence[int]) -> str | None:
        """What tokens add to a stream that has so many before them; FORGOTTEN if there is none like that."""
        stream, length = self._streams.pop(number, (None, 0))
        if length != before or (stream is None and before):
            return FORGOTTEN
        stream = stream or self._backend.stream(context)
        text = stream.push(token_ids)
        self._streams[number] = stream, before + len(token_ids)
        if len(self._streams) > MAX_STREAMS:
            self._streams.popitem(last=False)
        return text

    def flush(self, number: int, before: int) -> str | None:
        """The end of the text of a stream."""
        stream, length = self._streams.pop(number, (None, 0))
        return FORGOTTEN if stream is None or length != before else stream.flush()

    def id_to_token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def to_str(self) -> str:
        return self._backend.to_str()


def answer_to(server: TokenizerServer, line: bytes) -> tuple[bool, str]:
    """Whether a request could be met, and its answer as JSON, or what went wrong."""
    try:
        method, arguments = json.loads(line)
        return True, json.dumps(getattr(server, method)(*arguments))
    except MemoryError:
        return False, TOO_LARGE
    except TokenizerFailed as failed:
        return False, failed.reason
    except BaseException as raised:  # whatever the library raises, which is a panic if it is no Exception
        return False, str(as_error(raised)) or type(raised).__name__


def main(cpu_seconds: int, memory: int) -> None:
    """cpu_seconds: for one request; memory: bytes of data"""
    import resource

    with suppress(OSError, ValueError):  # a system without these limits
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    server = TokenizerServer()
    for line in sys.stdin.buffer:
        # Its signal ends the process, whatever it is busy with.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds + SECONDS_PER_MB * len(line) / 1e6)
        worked, text = answer_to(server, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        data = text.encode("utf-8", "replace")
        sys.stdout.buffer.write(HEADER.pack(worked, len(data)) + data)
        sys.stdout.buffer.flush()
