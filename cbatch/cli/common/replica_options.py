"""The options that put engines into processes of their own, as a record."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import click

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError

REPLICA_FIELDS = ("replicas", "ray", "ray_resources", "replica_timeout")
"""The names of these options."""


def parse_replicas(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    """Reads a number of at least 1, or `auto`."""
    if value is None or value == "auto":
        return value
    number = int(value) if re.fullmatch("[0-9]{1,6}", value) else 0
    if number < 1:
        raise click.BadParameter(f"{value!r} is neither a number of at least 1 nor auto.", ctx, parameter)
    return number


def parse_address(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Reads `auto` or `HOST:PORT`."""
    if value is None or value == "auto" or re.fullmatch(r"[^\s/]+:[0-9]{1,5}", value):
        return value
    raise click.BadParameter(f"{value!r} is neither HOST:PORT nor auto, the cluster of this machine.", ctx, parameter)


def parse_resources(ctx: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, float] | None:
    """Reads a JSON object of amounts by the names of resources."""
    if value is None:
        return None
    try:
        resources = json.loads(value)
    except (ValueError, RecursionError):
        resources = None
    if not isinstance(resources, dict) or not all(map(_is_amount, resources.values())):
        wanted = '\'{"num_cpus": 8, "num_gpus": 1}\''
        raise click.BadParameter(f"{value!r} is no JSON object of numbers, such as {wanted}.", ctx, parameter)
    return resources


def parse_timeout(ctx: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Refuses what is no length of time."""
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"{value:g} is no number of seconds above 0.", ctx, parameter)
    return value


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Where the rows of a batch are computed: in this process, unless `number` or `ray` is set.

    number:    of replicas; `auto`: as many as there is room for
    ray:       address of a Ray cluster that runs them; None: this machine
    resources: what each of them needs of the cluster; None: Ray's replicas say
    timeout_s: seconds after which a replica that gives no sign is started again; None: the driver's own
    """

    number: int | Literal["auto"] | None = None
    ray: str | None = None
    resources: Mapping[str, float] | None = None
    timeout_s: float | None = None

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> ReplicaOptions:
        """Makes the record from Click's values."""
        return cls(*(values[name] for name in REPLICA_FIELDS))

    @property
    def are_given(self) -> bool:
        """Whether engines are to run in processes of their own."""
        return self.number is not None or self.ray is not None

    @property
    def wanted(self) -> int | None:
        """The number of replicas; None for as many as there is room for."""
        return None if self.number == "auto" else self.number

    def check(self, engine: EngineConfig, trace: str | None = None) -> None:
        """Raises ConfigError for options that do not go together.

        engine: the configuration of each replica
        trace:  what --trace names
        """
        if self.resources is not None and self.ray is None:
            raise ConfigError("--ray-resources needs --ray.")
        if self.timeout_s is not None and not self.are_given:
            raise ConfigError("--replica-timeout needs --replicas or --ray.")
        option = "--replicas" if self.number is not None else "--ray"
        if trace is not None and self.are_given:
            raise ConfigError(f"--trace records the steps of an engine in this process; it does not go with {option}.")
        if engine.device_map != "none" and self.are_given:
            raise ConfigError(
                "--device-map auto spreads one model over all GPUs and the memory of a machine, so it does not go with "
                f"{option}, which shares them out."
            )
