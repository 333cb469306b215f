"""Documented names at their old places, and under their old names, for one release."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar


def moved(old: str, *places: str, **names: str) -> Callable[[str], Any]:
    """The `__getattr__` of the module `old`, whose names are in `places` now. Says so with a DeprecationWarning.

    Those in `names` are called otherwise there: `moved(__name__, place, Old="New")`.
    """

    def find(name: str) -> Any:
        new = names.get(name, name)
        for place in () if name.startswith("_") else places:
            module = import_module(place)
            if hasattr(module, new):
                what = "it" if new == name else new
                warnings.warn(
                    f"{old}.{name} has moved: import {what} from {place}; the old place goes with the next release",
                    DeprecationWarning,
                    stacklevel=2,
                )
                return getattr(module, new)
        raise AttributeError(f"module {old!r} has no attribute {name!r}")

    return find


P = ParamSpec("P")
R = TypeVar("R")


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Parameters whose old names are taken, too, for one release: `renamed(old="new")`. Says so with a warning."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @wraps(call)
        def taking(*args: P.args, **kwargs: P.kwargs) -> R:
            for old, new in names.items():
                if old in kwargs:
                    _warn(f"the parameter {old} is called {new} now", 3)
                    kwargs[new] = kwargs.pop(old)
            return call(*args, **kwargs)

        return taking

    return decorate


def keyword_only(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Parameters that once had positions, in this order, behind those that still have one. Says so with a warning."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        kinds = [one.kind for one in signature(call).parameters.values()]
        positions = kinds.count(Parameter.POSITIONAL_OR_KEYWORD)

        @wraps(call)
        def taking(*args: P.args, **kwargs: P.kwargs) -> R:
            beyond = args[positions:]
            if not beyond or len(beyond) > len(names):
                return call(*args, **kwargs)
            known = dict(zip(names, beyond, strict=False))
            warnings.warn(
                f"{call.__name__} takes {', '.join(known)} by name: a position is good until the next release",
                DeprecationWarning,
                stacklevel=2,
            )
            forward: Callable[..., R] = call
            return forward(*args[:positions], **known, **kwargs)

        return taking

    return decorate


class Renamed:
    """The old name of an attribute, for one release. Who reads it, or sets it on an instance, is warned."""

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type) -> Any:
        _warn(f"{owner.__name__}.{self._old} is called {self._new} now", 3)
        return getattr(owner if instance is None else instance, self._new)

    def __set__(self, instance: object, value: object) -> None:
        _warn(f"{type(instance).__name__}.{self._old} is called {self._new} now", 3)
        setattr(instance, self._new, value)


def take_old_names(cls: type, **names: str) -> None:
    """In `__init_subclass__`: what a subclass says under an old name counts as said under the new one."""
    for old, new in names.items():
        if old in vars(cls):
            _warn(f"{cls.__name__}.{old} is called {new} now", 4)
            setattr(cls, new, vars(cls)[old])
            delattr(cls, old)


def _warn(what: str, stacklevel: int) -> None:
    warnings.warn(f"{what}; the old name goes with the next release", DeprecationWarning, stacklevel=stacklevel)
