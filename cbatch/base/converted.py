"""Fields of dataclasses that take more types than they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

Given = TypeVar("Given", contravariant=True)
Held = TypeVar("Held", covariant=True)


class Converted(Generic[Given, Held]):
    """Annotates a field that may be given as one type and is converted to another in `__post_init__`.

    Type checkers read a descriptor: `Given` is what the constructor takes, `Held` is what the attribute is. At run time
    there is none, so the field is as quick as any other. Its default must be typed as Any (`NO_ITEMS`, `NOTHING`).
    """

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type) -> Held: ...

        def __set__(self, instance: object, value: Given) -> None: ...


NO_ITEMS: Any = ()
NOTHING: Any = None
