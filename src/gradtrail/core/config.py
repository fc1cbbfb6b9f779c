"""Configs: frozen dataclasses whose bounds are stated beside their fields and checked when one is created."""

import dataclasses
import operator
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, dataclass_transform

MAX_GALLERY = 400  # images in a gallery
LARGEST = 10**9  # largest number in a config: JAX counts in int32

_Config = TypeVar("_Config")
_RELATIONS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


class ConfigError(ValueError):
    """Values that are valid one by one but do not fit together, the data or the machine; one line."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The interval of a number: `rate: Annotated[float, Bounds(above=0)]`. It also holds for each entry of a tuple."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError, one line that begins with `name`, if a number is out of bounds; None is not checked."""
        stated = {word: bound for word in _RELATIONS if (bound := getattr(self, word)) is not None}
        if value is not None and not all(_RELATIONS[word](value, bound) for word, bound in stated.items()):
            texts = [
                f"{word.replace('_', ' ')} {bound:{',' if isinstance(bound, int) else 'g'}}"
                for word, bound in stated.items()
            ]
            raise ValueError(f"{name} must be {' and '.join(texts)}, got {value!r}")


Positive = Annotated[float, Bounds(above=0, at_most=LARGEST)]
NotNegative = Annotated[float, Bounds(at_least=0, at_most=LARGEST)]
Share = Annotated[float, Bounds(at_least=0, below=1)]
PositiveShare = Annotated[float, Bounds(above=0, below=1)]
Fraction = Annotated[float, Bounds(at_least=0, at_most=1)]
PositiveFraction = Annotated[float, Bounds(above=0, at_most=1)]
Count = Annotated[int, Bounds(at_least=1, at_most=LARGEST)]
CountOrZero = Annotated[int, Bounds(at_least=0, at_most=LARGEST)]
GallerySize = Annotated[int, Bounds(at_least=1, at_most=MAX_GALLERY)]
Seed = Annotated[int, Bounds(at_least=0, below=2**32)]


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type[_Config]) -> type[_Config]:
    """Make a class a frozen dataclass that checks the bounds of its fields, then calls its method `check`, if any.

    Creating an instance raises ValueError, one line that begins with the name of the field.
    """

    def check_bounds(self: Any) -> None:
        for name, hint in typing.get_type_hints(cls, include_extras=True).items():
            value = getattr(self, name)
            for bounds in _bounds(hint):
                for entry in value if isinstance(value, tuple) else (value,):
                    bounds.check(name, entry)
        if hasattr(self, "check"):
            self.check()

    setattr(cls, "__post_init__", check_bounds)  # noqa: B010  # mypy knows no such attribute
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def _bounds(hint: Any) -> Iterator[Bounds]:
    """Yield the bounds within a type, such as `Positive | None` or `tuple[Share, ...]`."""
    yield from (entry for entry in getattr(hint, "__metadata__", ()) if isinstance(entry, Bounds))
    for part in typing.get_args(hint):
        yield from _bounds(part)
