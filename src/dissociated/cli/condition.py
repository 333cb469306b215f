"""Conditions in the syntax of SQL: dep_delay > 60 and (dest = 'IAH' or dest is null).

    condition   = conjunction ("or" conjunction)*
    conjunction = negation ("and" negation)*
    negation    = "not" negation | "(" condition ")" | column comparison | value operator column
    comparison  = operator value | ["not"] "in" "(" value ("," value)* ")" | ["not"] "between" value "and" value
                | ["not"] "like" text | "is" ["not"] "null"
    operator    = "=" | "!=" | "<>" | "<" | "<=" | ">" | ">="
    column      = name ("." name)*, where a name is letters, digits and _, or anything in "…"
    value       = number | 'text' | "true" | "false"

Times and dates are texts in ISO 8601. `dissociated.codec.filter.conditions` defines the meaning of comparisons.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from functools import reduce
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from dissociated.codec.filter.conditions import Condition
from dissociated.errors import OptionError

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))
      | '(?P<text>(?:[^']|'')*)'
      | "(?P<quoted>(?:[^"]|"")+)"
      | (?P<word>[^\W\d]\w*)
      | (?P<sign><=|>=|<>|!=|==|[=<>(),.])
      | (?P<end>$)
    )""",
    re.VERBOSE,
)
_SIGNS = {"=": "=", "==": "=", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_KEYWORDS = {"and", "or", "not", "in", "is", "null", "like", "between", "true", "false"}
_MAX_DEPTH = 50  # nested parentheses and "not"


def parse_condition(written: str, schema: pa.Schema) -> pc.Expression:
    """Parse a condition into a filter for rows of `schema`. Raises OptionError and ColumnNotFound."""
    return _ConditionParser(written, schema).parse()


class _ConditionParser:
    def __init__(self, written: str, schema: pa.Schema) -> None:
        self._written = written
        self._schema = schema
        self._at = self._next_at = 0
        self._depth = 0
        self._kind, self._token = "", ""
        self._advance()

    def parse(self) -> pc.Expression:
        condition = self._any_of()
        return condition if self._kind == "end" else self._fail("the end")

    def _any_of(self) -> pc.Expression:
        return self._join(self._all_of, "or", pc.or_kleene)

    def _all_of(self) -> pc.Expression:
        return self._join(self._negation, "and", pc.and_kleene)

    def _join(self, part: Callable[[], pc.Expression], word: str, join: Callable[..., pc.Expression]) -> pc.Expression:
        parts = [part()]
        while self._take(word):
            parts.append(part())
        return reduce(join, parts)

    def _negation(self) -> pc.Expression:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise OptionError(f"the condition is nested deeper than {_MAX_DEPTH} levels")
        if self._take("not"):
            condition = pc.invert(self._negation())
        elif self._take("("):
            condition = self._any_of()
            self._expect(")")
        else:
            condition = self._comparison()
        self._depth -= 1
        return condition

    def _comparison(self) -> pc.Expression:
        if self._is_value:
            value, operator = self._value(), self._sign()
            return self._condition(self._column(), _MIRRORED.get(operator, operator), value)
        column = self._column()
        if self._take("is"):
            operator = "is not null" if self._take("not") else "is null"
            self._expect("null")
            return self._condition(column, operator)
        negated = self._take("not")
        condition = self._keyword_comparison(column, negated)
        return pc.invert(condition) if negated else condition

    def _keyword_comparison(self, column: list[str], negated: bool) -> pc.Expression:
        if self._take("in"):
            self._expect("(")
            values = [self._value()]
            while self._take(","):
                values.append(self._value())
            self._expect(")")
            return self._condition(column, "in", values)
        if self._take("between"):
            least = self._value()
            self._expect("and")
            return pc.and_kleene(self._condition(column, ">=", least), self._condition(column, "<=", self._value()))
        if self._take("like"):
            return self._condition(column, *self._pattern())
        if negated:
            self._fail("in, between or like")
        return self._condition(column, self._sign(), self._value())

    def _condition(self, column: list[str], operator: str, *value: Any) -> pc.Expression:
        return Condition.parse([column, operator, *value]).expression(self._schema)

    def _pattern(self) -> tuple[str, str]:
        pattern = self._value()
        if isinstance(pattern, str):
            inner = pattern.strip("%")
            begins, ends = pattern.endswith("%"), pattern.startswith("%")
            if not any(sign in inner for sign in "%_\\"):
                return (
                    "contains" if begins and ends else "starts with" if begins else "ends with" if ends else "="
                ), inner
        raise OptionError(f"the pattern {pattern!r} of like is not supported: use 'x%', '%x' or '%x%'")

    def _column(self) -> list[str]:
        path = [self._name()]
        while self._take("."):
            path.append(self._name())
        return path

    def _name(self) -> str:
        if self._kind != "quoted" and (self._kind != "word" or self._token.lower() in _KEYWORDS):
            self._fail("the name of a column")
        name = self._token
        self._advance()
        return name

    def _sign(self) -> str:
        if self._kind != "sign" or self._token not in _SIGNS:
            self._fail("=, !=, <, <=, >, >=, in, between, like or is")
        sign = _SIGNS[self._token]
        self._advance()
        return sign

    @property
    def _is_value(self) -> bool:
        is_boolean = self._kind == "word" and self._token.lower() in ("true", "false")
        return is_boolean or self._kind in ("number", "text")

    def _value(self) -> Any:
        kind, token = self._kind, self._token
        if not self._is_value:
            self._fail("a value: a number, a 'text', true or false" + (" (write is null)" if token == "null" else ""))
        self._advance()
        if kind == "text":
            return token
        return _number(token) if kind == "number" else token.lower() == "true"

    def _take(self, token: str) -> bool:
        """Return whether `token` comes next, and skip it if it does."""
        is_next = self._kind in ("word", "sign") and self._token.lower() == token
        if is_next:
            self._advance()
        return is_next

    def _expect(self, token: str) -> None:
        if not self._take(token):
            self._fail(repr(token))

    def _advance(self) -> None:
        self._at = self._next_at
        match = _TOKEN.match(self._written, self._at)
        if match is None:
            self._kind = ""
            open_quote = self._written[self._at :].lstrip()[0] in "'\""
            self._fail("a closing quote" if open_quote else "a name, a value or a comparison")
        self._kind, self._next_at = str(match.lastgroup), match.end()
        quote = {"text": "'", "quoted": '"'}.get(self._kind, "")
        self._token = match[self._kind].replace(quote * 2, quote) if quote else match[self._kind]

    def _fail(self, expected: str) -> NoReturn:
        remainder = self._written[self._at :].strip()
        place = f"at {remainder!r}" if remainder else "at its end"
        raise OptionError(f"the condition {self._written!r} is invalid {place}: expected {expected}")


def _number(token: str) -> int | float | Decimal:
    """Parse a number without losing digits, whatever the type of the column: to a Decimal if no float is exact."""
    exact = Decimal(token)
    if "." not in token and "e" not in token.lower():
        return int(exact)
    return float(token) if Decimal(repr(float(token))) == exact else exact
