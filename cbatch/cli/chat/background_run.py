"""`/run`: a batch on the chat's own engine, perhaps with replicas beside it; replies in the chat go first."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from cbatch.base.config import EngineConfig
from cbatch.base.errors import CbatchError, ConfigError, Interrupted, ReaderGone
from cbatch.base.option import options_of
from cbatch.cli.chat.session.files import as_path
from cbatch.cli.common.console import Details, ProgressState, notice
from cbatch.cli.common.exits import UserError
from cbatch.cli.common.loading import make_launcher
from cbatch.cli.common.options import make_options
from cbatch.cli.common.replica_options import ReplicaOptions
from cbatch.cli.run.command import open_input, open_output, run, stats_file
from cbatch.cli.run.options import RunOptions

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.batch.driver import BatchDriver
    from cbatch.replicas.connection import ReplicaLauncher
    from cbatch.replicas.driver import ReplicaDriver
    from cbatch.replicas.local import Place


class BatchEngines:
    """Gives a chat what computes its batches.

    The chat's own engine is one of the replicas, and serves replies as well. The others start with the first batch, and
    live until the chat ends.

    config: of the chat's own engine: with its share of the machine
    """

    def __init__(self, config: EngineConfig, options: ReplicaOptions | None = None) -> None:
        """Raises ConfigError if the machine has no room for so many replicas. Call it before torch is imported."""
        self.config = config
        # Nobody waits for the next token of a row, so the others need no short steps.
        self._shared_config = replace(config, target_step_ms=None) if config.target_step_ms == "auto" else config
        self._options = options or ReplicaOptions()
        self._others: list[Place] = []
        self._driver: ReplicaDriver | None = None
        if self._options.are_given and self._options.ray is None:
            from cbatch.replicas.local import find_places

            own, *self._others = find_places(config, self._options.wanted)
            self.config = own.applied_to(config)
            os.environ |= own.environment
            if own.cores:
                os.sched_setaffinity(0, own.cores)  # threads that are started from now on have the same

    def driver(self, engine: Engine) -> BatchDriver:
        """The driver of a batch. The first one starts the other replicas, as does one after they could not be started.

        Raises ConfigError if they cannot be started.
        """
        from cbatch.batch.engine_driver import EngineDriver
        from cbatch.replicas.driver import ReplicaDriver
        from cbatch.replicas.replica import EngineLauncher

        if not self._options.are_given:
            return EngineDriver(engine.thread)
        if self._driver is not None and self._driver.has_failed:
            self._driver.close()
            self._driver = None
        if self._driver is None:
            launcher = EngineLauncher(engine, self.launch_others())
            timeout_s = self._options.replica_timeout
            self._driver = ReplicaDriver(launcher, self._shared_config, timeout_s=timeout_s)
        return self._driver

    def launch_others(self) -> ReplicaLauncher | None:
        """The launcher of the other replicas; None if there are none."""
        options = self._options
        if options.wanted == 1:
            return None
        if options.ray is None:
            from cbatch.replicas.local import LocalLauncher

            return LocalLauncher(self._others)
        return make_launcher(replace(options, replicas=options.wanted and options.wanted - 1), self.config)

    def close(self) -> None:
        """Ends the other replicas. The chat's own engine stays as it is."""
        if self._driver is not None:
            self._driver.close()


CLOSE_SECONDS = 10.0
"""How long leaving the chat waits for a batch to write its finished rows."""


class BackgroundRun:
    """Runs one batch at a time, on a thread of its own, and reports on stderr."""

    def __init__(self, engines: BatchEngines | None = None) -> None:
        """`engines`: what computes the batches; None: the chat's own engine alone."""
        self._engines = engines or BatchEngines(EngineConfig())
        self._thread = threading.Thread()
        self._interrupt: Callable[[int], None] | None = None
        self._is_stopping = False
        self.progress: list[str] = []
        """How far the batch is, for the status bar, the most important part first; empty if there is none."""

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self, engine: Engine, command_line: str) -> None:
        """Starts a batch with the options of `cbatch run`.

        Raises UserError if they are wrong, there is no such input, or a batch is running already.
        """
        if self.is_running:
            raise UserError("A batch is running already; /run stop ends it.")
        options = parse_run_options(command_line)
        try:
            options.check_usage()
        except ConfigError as error:
            raise UserError(f"/run: {error}") from error
        if not Path(options.input).exists():
            raise UserError(f"/run: there is no file {options.input}.")
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, args=(engine, options), name="cbatch-run", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Interrupts the batch; --resume continues it later."""
        self._is_stopping = True
        if (interrupt := self._interrupt) is not None:
            interrupt(signal.SIGINT)

    def close(self) -> None:
        """Stops the batch, waits a while for it to end, and ends the replicas."""
        if self.is_running:
            notice("waiting for the batch to write its finished rows; Ctrl-C leaves at once")
            self.stop()
            self._thread.join(CLOSE_SECONDS)
        self._engines.close()

    def _run(self, engine: Engine, options: RunOptions) -> None:
        from cbatch.cli.run.batch_run import run_batch
        from cbatch.cli.run.stats import RunStats

        name, stats = f"/run {options.input}", RunStats()
        try:
            with (
                stats_file(options, stats),
                closing(open_input(options)) as source,
                open_output(options, source) as output,
            ):
                notice(f"{name} writes to {options.output}; replies in the chat go first")
                driver = self._engines.driver(engine)
                run_batch(driver, options, source, output, stats, progress=self._display, while_running=self._running)
            notice(f"{name} is done; the output is in {options.output}")
        except ReaderGone:
            notice(f"{name}: the reader of {options.output} went away.")
        except (Interrupted, CbatchError) as error:
            notice(f"{name}: {error}")
        except BaseException as error:  # a bug ends the batch with a sentence, but not the chat
            reason = isinstance(error, OSError) and error.strerror
            notice(f"{name}: {reason or repr(error)}; finished rows are on disk.")
        finally:
            self.progress = []

    @contextmanager
    def _running(self, interrupt: Callable[[int], None]) -> Iterator[None]:
        self._interrupt = interrupt
        if self._is_stopping:
            interrupt(signal.SIGINT)
        try:
            yield
        finally:
            self._interrupt = None

    @contextmanager
    def _display(self, total: int | None, state: ProgressState, details: Details) -> Iterator[Callable[[], None]]:
        """Writes to `progress` how far the batch is. There is no room for details."""

        def tick() -> None:
            done, text = state()
            self.progress = [f"run {done:,}/{total:,}" if total else f"run {done:,}", *text.split(", ")]

        tick()
        yield tick


def parse_run_options(command_line: str) -> RunOptions:
    """Reads the options of `cbatch run` from what was typed. Raises UserError if they make no sense here."""
    try:
        words = [str(as_path(word)) if word.startswith("~") else word for word in shlex.split(command_line)]
        context = run.make_context("run", words, auto_envvar_prefix="CBATCH_RUN")
    except ValueError as error:
        raise UserError(f"/run: {error}.") from error
    except click.exceptions.Exit as error:  # --help has no screen to print on
        raise UserError("/run FILE -o OUT takes the options of cbatch run; cbatch run --help lists them.") from error
    except click.ClickException as error:
        raise UserError(f"/run: {error.format_message()}") from error
    options = make_options(RunOptions, context.params)
    if "-" in (options.input, options.output):
        raise UserError("/run needs an input file and an output file: /run FILE -o OUT.")
    for name in (options.input, options.output):
        if Path(name).exists() and not Path(name).is_file():  # a pipe could block for ever
            raise UserError(f"/run reads and writes regular files; {name} is not one.")
    if options.stats == "-":
        raise UserError("/run: --stats needs the name of a file here.")
    if options.check:
        raise UserError("--check only works in the shell: cbatch run FILE --check.")
    for name in (*options_of(EngineConfig), *options_of(ReplicaOptions)):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UserError(f"--{name.replace('_', '-')} cannot be changed here: the engine is running already.")
    return options
