"""Operations of a program: their fields and the roles of these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform

from torch import Tensor

from cbatch.model.weight import Matrix, Weight

Kind = TypeVar("Kind", bound="type[Operation]")


def reads() -> Any:
    """A field that names the buffer, or the buffers, that the operation reads."""
    return field(metadata={"role": "reads"})


def writes(*, default: Any = MISSING) -> Any:
    """A field that names the buffer that the operation writes; if it has an `add` that is true, adds to."""
    return field(metadata={"role": "writes"}, default=default)


def updates(*, default: Any = MISSING) -> Any:
    """A field that names a buffer whose numbers the operation changes."""
    return field(metadata={"role": "updates"}, default=default)


def numbers_a(what: str, *, default: Any = MISSING) -> Any:
    """A field that is the number of a KV cache, of a recurrent state or of a rotary setting of the program."""
    return field(metadata={"role": what}, default=default)


class Operation(ABC):
    """A step of a program. See `docs/families.md` for how one is added.

    is_product: it multiplies what it reads with matrices
    keeps_sum:  what it writes is added to, so it is kept in float32
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]
    is_product: ClassVar[bool] = False
    assumed: ClassVar[str] = ""
    """A sentence on what an estimate of its cost does not know."""

    @property
    def keeps_sum(self) -> bool:
        return bool(getattr(self, "add", False))

    @property
    def multiplied(self) -> int:
        """Numbers of its matrices that every token is multiplied with."""
        return 0

    @abstractmethod
    def on_cpu(self, layout: Any) -> None:
        """Adds its instructions to a `CpuLayout`. Raises UnsupportedConfig for what its kernel does not support."""

    def on_shard(self, shards: Any) -> Callable[[], Sequence[Operation]]:
        """Tells `Shards` which columns are needed of what it reads; returns a `Made`."""
        made: Callable[[], Sequence[Operation]] = shards.alike(self)
        return made

    def on_device(self, plan: Any) -> Callable[[Any], None] | None:
        """The function that runs it in a step of a `DevicePlan`; None if there is nothing to do now.

        Most operations have `load` and `run` instead, which find their buffers by the roles of fields.
        """
        run: Callable[[Any], None] = plan.bound(self)
        return run

    def load(self, weights: Any) -> Any:
        """Its weights on a device, by `DeviceWeights`; None if it has none."""
        return None

    run: ClassVar[Callable[..., None]]
    """Runs it in a step of a `DevicePlan`, given that, what `load` gave, and tensors [T, columns] by the names of the
    fields that name their buffers."""

    target_width: ClassVar[Callable[..., int]]
    """Of the buffer that it writes, given a function from the names of buffers to their widths."""


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(reads, writes, updates, numbers_a, field))
def operation(kind: Kind) -> Kind:
    """Makes a class an operation."""
    made: Any = dataclass(frozen=True, slots=True, eq=False)(kind)
    found: Kind = made
    return found


def with_role(operation: Operation, *roles: str) -> Iterator[tuple[str, Any]]:
    """The fields with these roles, and what they are."""
    for each in fields(operation):
        if each.metadata.get("role") in roles:
            yield each.name, getattr(operation, each.name)


def constants(value: Any) -> Any:
    """The constants of a kernel: everything but numbers in tensors, the number of their rows, and names."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape[1:]
    if isinstance(value, Weight | Matrix):
        return None
    if isinstance(value, tuple):
        return tuple(map(constants, value))
    if is_dataclass(value):
        own = (each.name for each in fields(value) if "role" not in each.metadata)
        return type(value), *(constants(getattr(value, name)) for name in own)
    return value
