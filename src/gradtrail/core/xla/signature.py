"""Why a function is compiled again, in words: how its arguments differ from those of the nearest earlier program."""

import functools
import inspect
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path

_AS_BEFORE = "its arguments are as before: the function was made anew or closes over other values, or a setting differs"
Signature = dict[str, dict[str, object]]  # argument, or array in it → property → value
_Static = Collection[str | int]  # names of static arguments, and positions of those in `*args`


@dataclass(frozen=True)
class _Value:
    """A static value, which JAX compares by type and `==`."""

    type: type
    value: Any

    def __str__(self) -> str:
        return repr(self.value)


class Signatures:
    """The signatures of compiled programs, by function; one that is made anew with the same code is the same."""

    def __init__(self) -> None:
        self._programs: dict[Any, list[Signature]] = defaultdict(list)

    def add(self, function: Any, args: Any, kwargs: Mapping[str, Any], static: _Static) -> tuple[str, str]:
        """Add a program; return its function's name, and how it differs from the nearest one before; empty if first."""
        python = _unwrapped(function)
        name, code = getattr(python, "__name__", type(python).__name__), getattr(python, "__code__", type(python))
        programs, new = self._programs[name, code], _signature(function, args, kwargs, static)
        nearest = min((_differences(new, earlier) for earlier in reversed(programs)), key=len, default=[""])
        programs.append(new)
        return name, "; ".join(nearest[:3] + [f"{len(nearest) - 3} more"] * (len(nearest) > 3) or [_AS_BEFORE])


def _unwrapped(function: Any) -> Any:
    function = inspect.unwrap(function)
    return _unwrapped(function.func) if isinstance(function, functools.partial) else function


def _signature(function: Any, args: Any, kwargs: Mapping[str, Any], static: _Static) -> Signature:
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
        arguments, names = bound.arguments, [*bound.signature.parameters]
        rest = [one.name for one in bound.signature.parameters.values() if one.kind is one.VAR_POSITIONAL]
    except (TypeError, ValueError):  # a function in C has none
        arguments, names, rest = {"args": args, **kwargs}, ["args", *kwargs], ["args"]

    def is_static(name: str, path: Any) -> bool:
        return name in static or (name in rest and names.index(name) + path[0].idx in static)

    return {
        f"argument {names.index(name) + 1} (`{name}{keystr(path)}`)": _properties(leaf, is_static(name, path))
        for name, value in arguments.items()
        for path, leaf in ([((), value)] if name in static else tree_leaves_with_path(value))
    }


def _properties(leaf: Any, is_static: bool) -> dict[str, object]:
    """Return what a program depends on of an array, abstract or concrete, of a number, or of a static value."""
    if is_static or not isinstance(leaf, jax.ShapeDtypeStruct | jax.typing.ArrayLike):
        return {"static value": _Value(type(leaf), leaf)}
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    sharding: Any = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (sharding,) = sharding.device_set
    device = str(sharding or "any")  # where JAX chooses
    return {"shape": str(aval.shape), "dtype": str(aval.dtype), "weak type": str(aval.weak_type), "device": device}


def _differences(now: Signature, before: Signature) -> list[str]:
    texts = [f"{name} is given, was left out" for name in now if name not in before]
    texts += [f"{name} is left out, was given" for name in before if name not in now]
    for name in (name for name in now if name in before):
        for key, value in now[name].items():
            if value != (old := before[name].get(key, "none")):
                texts.append(f"{name} has {key} {value!s:.60}, was {old!s:.60}")
    return texts
