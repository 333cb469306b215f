"""Strict parsing of JSON from outside: every part of this library can store, compute with and print the values."""

from __future__ import annotations

import json
from typing import Any, NoReturn

_INTEGERS = range(-(1 << 63), 1 << 63)
_MAX_DIGITS = 20  # digits of an integer, sign included
_MAX_NESTING = 50


def loads(content: bytes) -> Any:
    """Parse JSON in UTF-8.

    Raises:
        ValueError: The JSON is invalid, or has values that Python's parser accepts and others do not: integers of more
            than 64 bits, infinite numbers and NaN, halves of surrogate pairs, or deep nesting.
    """
    text = str(content, "utf-8")
    try:
        plain = _decoder.decode(text)
    except RecursionError:
        raise ValueError(f"JSON is nested deeper than {_MAX_NESTING} levels") from None
    if text.count("{") + text.count("[") >= _MAX_NESTING:
        _check_nesting(plain)
    if "\\u" in text:
        json.dumps(plain, ensure_ascii=False).encode()  # raises UnicodeEncodeError, a ValueError, for a lone surrogate
    return plain


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS or (number := int(digits)) not in _INTEGERS:
        raise ValueError("an integer has more than 64 bits")
    return number


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError("a number is too large")
    return number


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


_decoder = json.JSONDecoder(parse_int=_integer, parse_float=_finite, parse_constant=_refuse)


def _check_nesting(plain: Any) -> None:
    level = [plain]
    for _ in range(_MAX_NESTING):
        containers = [container for container in level if isinstance(container, dict | list)]
        if not containers:
            return
        level = [
            inner
            for container in containers
            for inner in (container.values() if isinstance(container, dict) else container)
        ]
    raise ValueError(f"JSON is nested deeper than {_MAX_NESTING} levels")
