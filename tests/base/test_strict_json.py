"""JSON from outside: values that every part of the library supports, or a ValueError."""

from __future__ import annotations

import pytest

from dissociated.base import strict_json


def test_what_is_usual_is_read() -> None:
    assert strict_json.loads(b'{"a": [1, -2.5, "\\u00e4\\ud83d\\ude00", null, true]}') == {
        "a": [1, -2.5, "ä😀", None, True]
    }
    assert strict_json.loads(b"[9223372036854775807, -9223372036854775808, 1e308]") == [2**63 - 1, -(2**63), 1e308]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        "[1]".encode("utf-16"),
        b"9223372036854775808",
        b"-9223372036854775809",
        b"9" * 10_000,
        b"1e309",
        b"-1e309",
        b"NaN",
        b"[Infinity]",
        b'"\\ud800"',
        b'{"\\udfff": 1}',
        *(b"[" * depth + b"]" * depth for depth in (60, 900, 100_000)),
    ],
)
def test_json_that_other_parsers_refuse_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        strict_json.loads(content)
