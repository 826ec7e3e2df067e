"""Decoders of pictures for processes of tests."""

from __future__ import annotations

import os
import signal

import psutil

from cbatch.media.child import PictureServer


class Broken:
    """A decoder with flaws."""

    def decode(self, data: bytes, path: str) -> tuple[int, int]:
        while data == b"slow":
            pass
        if data == b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if data == b"large":
            bytearray(2**31)
        return PictureServer().decode(data, path)


class Fragmented:
    """A decoder that frees a large block behind which a small one stays."""

    def __init__(self) -> None:
        self.server = PictureServer()

    def sizes(self) -> list[int]:
        process, kept = psutil.Process(), list[bytes]()
        before = process.memory_info().rss
        for size in (2**24 + 2**20, 2**24):  # glibc takes the second one from its heap, unless it is told otherwise
            large = b"x" * size
            kept += [b"x" * 2**14 for _ in range(64)]
            del large
        return [before, process.memory_info().rss]
