"""Opens the replicas of a command, and tells the user what they have loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cbatch.cli.common.console import notice
from cbatch.cli.common.loading import check_model, print_notices, show_loaded
from cbatch.cli.common.replica_options import ReplicaOptions

if TYPE_CHECKING:
    from cbatch.base.config import EngineConfig
    from cbatch.replicas.connection import ReplicaLauncher
    from cbatch.replicas.driver import ReplicaDriver


@contextmanager
def open_replicas(
    options: ReplicaOptions, config: EngineConfig, *, quiet: bool, verbose: bool = False
) -> Iterator[ReplicaDriver]:
    """Starts replicas, waits until one of them has loaded its model, and prints on stderr what that is.

    Raises ConfigError or ModelError if the options cannot be met, and EngineError if no replica lives to load.
    """
    check_model(config)
    from cbatch.replicas.driver import TIMEOUT_S, ReplicaDriver

    print_notices(quiet=quiet)
    gc.freeze()  # imported modules stay
    gc.enable()
    launcher = make_launcher(options, config)
    with ReplicaDriver(launcher, config, timeout_s=options.replica_timeout or TIMEOUT_S) as driver:
        info = driver.info
        if not quiet:
            show_loaded(info.description, is_demo=config.model is None, verbose=verbose)
            notice(f"replicas: {launcher.num_replicas}; the first was ready after {info.load_s:.1f} s")
        yield driver


def make_launcher(options: ReplicaOptions, config: EngineConfig) -> ReplicaLauncher:
    """What starts the replicas. Raises ConfigError if there is no room for them, or no cluster."""
    if options.ray is not None:
        from cbatch.replicas.ray_cluster import RayLauncher

        return RayLauncher(options.ray, options.wanted, options.ray_resources)
    from cbatch.replicas.local import LocalLauncher, find_places

    return LocalLauncher(find_places(config, options.wanted))
