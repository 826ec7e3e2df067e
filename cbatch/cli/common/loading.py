"""Opens the engine of a command, or its replicas, and tells the user what was loaded."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from cbatch.base.errors import ModelNotFound
from cbatch.base.hub import check_hub_model
from cbatch.cli.common.console import notice
from cbatch.cli.common.local_models import suggest_models
from cbatch.cli.common.replica_options import ReplicaOptions
from cbatch.cli.common.stdout import without_library_output

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.base.config import EngineConfig
    from cbatch.replicas.connection import ReplicaLauncher
    from cbatch.replicas.driver import ReplicaDriver

DEMO_NOTICE = (
    "this is the bundled demo model, a toy of a few million parameters; "
    "name a real one with --model, for example --model Qwen/Qwen3-0.6B"
)


def open_engine(
    config: EngineConfig,
    *,
    quiet: bool,
    verbose: bool = False,
    shows_model: bool = True,
    in_chat: bool = False,
) -> Engine:
    """Loads an engine, and prints on stderr what it is and how much memory it takes.

    shows_model: whether it says what was loaded, unless `quiet`
    in_chat:     whether a chat has captured stdout and may give it back meanwhile

    Raises ModelNotFound, with models that may be meant, if there is no such model.
    """
    check_model(config)
    print_notices(quiet=quiet)
    from cbatch.api import Engine
    from cbatch.runtime.cpu import tune_process

    gc.freeze()  # imported modules stay
    gc.enable()
    with suggesting_models(config), nullcontext() if in_chat else without_library_output():
        engine = Engine(config)
    tune_process()
    if shows_model and not quiet:
        show_loaded(engine.core.describe(), is_demo=config.model is None, verbose=verbose)
    return engine


def check_model(config: EngineConfig) -> None:
    """Raises ModelNotFound if the model is a hub id that cannot be had. That takes no time but the network's."""
    if config.model is not None:
        with suggesting_models(config):
            check_hub_model(config.model, config.revision)


@contextmanager
def suggesting_models(config: EngineConfig) -> Iterator[None]:
    """Adds to a ModelNotFound the models of this machine that have a similar name."""
    try:
        yield
    except ModelNotFound as error:
        meant = suggest_models(config.model) if config.model is not None else []
        if not meant:
            raise
        raise ModelNotFound(f"{error} Did you mean {' or '.join(meant)}?") from error


def print_notices(*, quiet: bool) -> None:
    """Prints what the engine logs as notices, unless `quiet`."""

    class Notices(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notice(record.getMessage())

    logging.getLogger("cbatch").handlers = [logging.NullHandler() if quiet else Notices()]


def show_loaded(shown: Mapping[str, str], *, is_demo: bool, verbose: bool) -> None:
    """Prints what was loaded, from the description of an engine."""
    if is_demo:
        notice(DEMO_NOTICE)
    if keys := shown.get("not applied"):
        notice(f"the model's files ask for {keys}, which this version does not apply")
    notice(f"parameters: {shown['parameters']} in {shown['dtype']} on {shown['device']}")
    notice(f"KV cache: {shown['KV cache']}")
    if "states" in shown:
        notice(f"recurrent states: {shown['states']}")
    for name in ("model", "attention", "context", "batch") if verbose else ():
        notice(f"{name}: {shown[name]}")


@contextmanager
def open_replicas(
    options: ReplicaOptions, config: EngineConfig, *, quiet: bool, verbose: bool = False
) -> Iterator[ReplicaDriver]:
    """Starts replicas, waits until one of them has loaded its model, and prints on stderr what that is.

    Raises ConfigError or ModelError if the options cannot be met, and EngineError if no replica lives to load.
    """
    check_model(config)
    from cbatch.replicas.driver import ReplicaDriver

    print_notices(quiet=quiet)
    gc.freeze()  # imported modules stay
    gc.enable()
    launcher = make_launcher(options, config)
    with ReplicaDriver(launcher, config, timeout_s=options.replica_timeout) as driver:
        info = driver.info
        if not quiet:
            show_loaded(info.description, is_demo=config.model is None, verbose=verbose)
            notice(f"replicas: {launcher.num_replicas}; the first was ready after {driver.load_s:.1f} s")
        yield driver


def make_launcher(options: ReplicaOptions, config: EngineConfig) -> ReplicaLauncher:
    """The launcher of the replicas. Raises ConfigError if there is no room for them, or no cluster."""
    if options.ray is not None:
        from cbatch.replicas.ray_cluster import RayLauncher

        return RayLauncher(options.ray, options.wanted, options.ray_resources, num_gpus=config.min_gpus)
    from cbatch.replicas.local import LocalLauncher, find_places

    return LocalLauncher(find_places(config, options.wanted))
