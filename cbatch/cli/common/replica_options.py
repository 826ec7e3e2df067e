"""The options that put engines into processes of their own, as a record."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from cbatch.base.config import EngineConfig, parse_count
from cbatch.base.errors import ConfigError
from cbatch.base.option import option, parse_json


def _parse_address(text: str) -> str:
    if text != "auto" and not re.fullmatch(r"[^\s/]+:[0-9]{1,5}", text):
        raise ValueError(f"{text!r} is neither HOST:PORT nor auto, the cluster of this machine.")
    return text


def _parse_resources(text: str) -> dict[str, float]:
    resources = parse_json(text)
    if not isinstance(resources, dict) or not all(
        type(amount) in (int, float) and 0 <= amount < math.inf for amount in resources.values()
    ):
        wanted = '\'{"num_cpus": 8, "num_gpus": 1}\''
        raise ValueError(f"{text!r} is no JSON object of numbers, such as {wanted}.")
    return resources


_option = partial(option, group="Replicas")


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Where the rows of a batch are computed: in this process, unless `replicas` or `ray` is set."""

    replicas: int | Literal["auto"] | None = _option(
        None,
        "Run batches on N engines in processes of their own; auto: one for each GPU, or each NUMA node.",
        metavar="N|auto",
        parse=lambda text: parse_count(text, "auto"),
    )
    ray: str | None = _option(
        None, "Run them on a Ray cluster (needs cbatch[ray]).", metavar="auto|HOST:PORT", parse=_parse_address
    )
    ray_resources: Mapping[str, float] | None = _option(
        None,
        "What each of them needs of the cluster, such as '{\"num_gpus\": 1}'.",
        metavar="JSON",
        parse=_parse_resources,
        shown="a GPU, or a node's CPUs",
    )
    replica_timeout: float | None = _option(
        None,
        "Start a replica again that gives no sign for so long.",
        metavar="SECONDS",
        low=0,
        above=True,
        shown="300",
    )

    @property
    def are_given(self) -> bool:
        """Whether engines are to run in processes of their own."""
        return self.replicas is not None or self.ray is not None

    @property
    def wanted(self) -> int | None:
        """The number of replicas; None for as many as there is room for."""
        return None if self.replicas == "auto" else self.replicas

    def check(self, engine: EngineConfig) -> None:
        """Raises ConfigError for options that do not go together.  engine: the configuration of each replica"""
        if self.ray_resources is not None and self.ray is None:
            raise ConfigError("--ray-resources needs --ray.")
        if self.replica_timeout is not None and not self.are_given:
            raise ConfigError("--replica-timeout needs --replicas or --ray.")
        option = "--replicas" if self.replicas is not None else "--ray"
        if engine.device_map != "none" and self.are_given:
            raise ConfigError(
                "--device-map auto spreads one model over all GPUs and the memory of a machine, so it does not go with "
                f"{option}, which shares them out."
            )
