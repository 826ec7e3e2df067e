"""What runs in the process that renders chat templates which are not known to be bounded (see `template_worker`).

It reads pickled requests from stdin, and answers each on stdout with a HEADER and a text. A template that takes too
long ends the process by a signal; one that takes too much memory gets an answer, or ends it.
"""

from __future__ import annotations

import pickle
import signal
import sys
from contextlib import suppress
from typing import Any

from cbatch.text.chat_template import render_chat
from cbatch.text.worker_process import HEADER

MAX_ERROR_CHARACTERS = 500
TOO_LONG = "it writes too much"
TOO_LARGE = "it takes too much memory"


def answer_to(templates: list[str], request: tuple[Any, ...]) -> tuple[bool, str]:
    """Renders a conversation. Returns whether that worked, and the text or what went wrong.

    templates: those of earlier requests, to which a new one is added
    request:   a new template or None, the number of the template, the arguments of `render_chat` as a pickle, and the
               most characters that may come out
    """
    added, number, conversation, most = request
    if added is not None:
        templates.append(added)
    try:
        text = render_chat(templates[number], **pickle.loads(conversation))
    except MemoryError:
        return False, TOO_LARGE
    except Exception as error:  # a template is a program of the model's author and may raise anything
        return False, str(error)[:MAX_ERROR_CHARACTERS]
    return (True, text) if len(text) <= most else (False, TOO_LONG)


def main(cpu_seconds: int, memory: int) -> None:
    """cpu_seconds: for one conversation; memory: bytes of address space"""
    import resource

    with suppress(OSError, ValueError):  # a system without these limits
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    templates: list[str] = []
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            request = pickle.load(given)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # whose signal ends the process, whatever it is busy with
        worked, text = answer_to(templates, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        data = text.encode("utf-8", "surrogatepass")
        answers.write(HEADER.pack(worked, len(data)) + data)
        answers.flush()
