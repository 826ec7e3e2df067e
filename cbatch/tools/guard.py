"""Runs a server of tools, and ends it, with all that it has started, once the process that started this one has ended.

    python guard.py COMMAND ...

That process reads the stderr of this one: a pipe that nobody reads tells of its end. Imports nothing of this project.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time


def wait_for_end() -> None:
    poll = select.poll()
    poll.register(2, 0)
    poll.poll()
    time.sleep(2)  # its stdin has ended, too, and it may end by itself
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)  # it is for the server
    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        code = subprocess.call(sys.argv[1:])
        words = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
    except OSError as error:
        words = f"{error.strerror}: {sys.argv[1]}"
    os.write(2, f"\n{words}\n".encode())
    os.killpg(0, signal.SIGKILL)  # also what the server has left behind, which holds its stdout
