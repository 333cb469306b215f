"""The numbers that a column of integers or decimals can have, and those that Spark compares them with."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context, Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as types

_MAX_DIGITS = 38  # of Spark's decimals, to which it makes both sides
_EXACT = Context(prec=2 * _MAX_DIGITS)
_MAX_EXACT_FLOAT = 1 << 53  # below this, integers compare with a float as floats just as they do as decimals


class Uncertain(Exception):
    """Arrow cannot tell what Spark would."""


@dataclass(frozen=True)
class Grid:
    """All numbers from `least` to `most` that have at most `scale` digits after the point; None for integers."""

    least: Decimal
    most: Decimal
    scale: int | None

    @classmethod
    def of(cls, type_: pa.DataType) -> Grid | None:
        """That of a column; None where its values are no exact numbers."""
        if types.is_integer(type_):
            bits = type_.bit_width - types.is_signed_integer(type_)
            return cls(Decimal(-(1 << bits) if types.is_signed_integer(type_) else 0), Decimal((1 << bits) - 1), None)
        if types.is_decimal(type_) and 0 <= type_.scale <= type_.precision <= _MAX_DIGITS:
            most = Decimal(10**type_.precision - 1).scaleb(-type_.scale, _EXACT)
            return cls(-most, most, type_.scale)
        return None

    def number(self, value: Any) -> Decimal:
        """What a column is compared with, just as it is. Raises Uncertain where Spark rounds it, or it is no number."""
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
            raise Uncertain
        small_float = isinstance(value, float) and abs(value) < _MAX_EXACT_FLOAT
        if self.scale is None and not (small_float or isinstance(value, int | Decimal)):
            raise Uncertain
        found = Decimal(str(value))
        _, digits, exponent = found.as_tuple()
        if not isinstance(exponent, int):  # NaN, infinity
            raise Uncertain
        whole = max(len(digits) + exponent, self.most.adjusted() + 1)
        if whole + max(self.scale or 0, -exponent) > _MAX_DIGITS:
            raise Uncertain
        return found

    def floor(self, value: Decimal) -> Decimal:
        """The largest number here that is not above `value`."""
        return value.quantize(Decimal(1).scaleb(-(self.scale or 0)), ROUND_FLOOR, _EXACT)

    def has(self, value: Decimal) -> bool:
        """Whether the column can have this value."""
        return self.least <= value <= self.most and self.floor(value) == value

    def scalar(self, value: Decimal, type_: pa.DataType) -> pa.Scalar:
        """One that is here, for Arrow."""
        return pa.scalar(int(value) if self.scale is None else self.floor(value), type_)
