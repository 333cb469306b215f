"""Encoding of filters for the network: an expression of Substrait, written by pyarrow and read as untrusted bytes.

Only harmless expressions are accepted: comparisons and logic of columns and plain values, limited in number and depth.
An expression whose meaning Substrait would change is not encoded at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from dissociated.codec.filter import protobuf
from dissociated.codec.filter.protobuf import BYTES, FIXED32, FIXED64, NUMBER, ONE_OF, TEXT, Grammar
from dissociated.codec.filter.row_filter import RowFilter, expression_text
from dissociated.codec.reader import check_field_names
from dissociated.errors import FormatError

#: The largest size of an expression, in bytes.
MAX_SIZE = 1 << 14
_MAX_FILTER_DEPTH = 16
_MAX_NODES = 512
_MAX_NESTED = 10  # levels of an expression to encode: each level doubles the extensions that pyarrow writes

#: The names of functions in Substrait.
_COMPARISONS = {"equal", "not_equal", "lt", "lte", "gt", "gte"}
_OF_COLUMNS = {*_COMPARISONS, "is_null", "is_not_null", "is_nan"}
_FUNCTIONS = {*_OF_COLUMNS, "and", "or", "not"}
#: pyarrow's name of the test for a set of values, which the receiver of Substrait turns into comparisons.
_SET = "is_in"
#: pyarrow's names of functions that keep their meaning in Substrait.
_PRINTED_FUNCTIONS = {"invert", "is_null", "is_valid", "is_nan", "if_else", _SET}
_CALL = re.compile(r"(\w+)\(")

# Numbers of the fields of Substrait's messages.
_ORIGINS, _EXTENSIONS, _EXPRESSIONS, _SCHEMA, _VERSION = 1, 2, 3, 4, 7
_LITERAL, _SELECTION, _FUNCTION, _IF, _SINGULAR_OR_LIST = 1, 2, 3, 6, 8

# The messages of Substrait that a filter may consist of, with the range of each parameter that libarrow trusts.
#
# libarrow ends the process for a decimal of precision 0 or above 38, and reads beyond its memory for a null of a
# fixed-size binary type of negative length. It takes types in the schema, as the result of a function, and in a null.
# The numbers are those of substrait's `extended_expression.proto`, `algebra.proto` and `type.proto`.
_DECIMAL_DIGITS = 38
_MAX_WIDTH = 1 << 16  # bytes of a value of a fixed-size binary type: libarrow allocates them for each null
_PRECISION = range(1, _DECIMAL_DIGITS + 1)
_SCALE = range(_DECIMAL_DIGITS + 1)
_WIDTH = range(_MAX_WIDTH + 1)
_SUBSECOND = range(10)  # digits below a second
_NULLABILITY = range(3)
_VARIATION = range(1)  # variations of types have no meaning to libarrow
_REFERENCE = range(1 << 31)
_PLAIN: dict[int, range] = {1: _VARIATION, 2: _NULLABILITY}

_GRAMMAR: Grammar = {
    "ExtendedExpression": {
        1: "*ExtensionUri",
        2: "*ExtensionDeclaration",
        3: "*ExpressionReference",
        4: "NamedStruct",
        7: "Version",
    },
    "ExtensionUri": {1: _REFERENCE, 2: TEXT},
    "ExtensionDeclaration": {ONE_OF: {1: "Extension", 3: "Extension"}},
    "Extension": {1: _REFERENCE, 2: _REFERENCE, 3: TEXT},
    "Version": {1: NUMBER, 2: NUMBER, 3: NUMBER, 4: TEXT, 5: TEXT},
    "NamedStruct": {1: "*text", 2: "Struct"},
    "ExpressionReference": {1: "Expression", 3: "*text"},
    "Expression": {
        ONE_OF: {1: "Literal", 2: "FieldReference", 3: "ScalarFunction", 6: "IfThen", 8: "SingularOrList"},
    },
    "ScalarFunction": {1: _REFERENCE, 3: "Type", 4: "*FunctionArgument"},
    "FunctionArgument": {3: "Expression"},
    "IfThen": {1: "*IfClause", 2: "Expression"},
    "IfClause": {1: "Expression", 2: "Expression"},
    "SingularOrList": {1: "Expression", 2: "*Expression"},
    "FieldReference": {1: "ReferenceSegment", 4: "RootReference"},
    "RootReference": {},
    "ReferenceSegment": {ONE_OF: {2: "StructField"}},
    "StructField": {1: _REFERENCE, 2: "ReferenceSegment"},
    "Literal": {
        ONE_OF: {
            **dict.fromkeys((1, 2, 3, 5, 7), NUMBER),  # a boolean, and integers of 8 to 64 bits
            10: FIXED32,
            11: FIXED64,
            12: TEXT,
            **dict.fromkeys((13, 23), BYTES),  # binary, and fixed-size binary
            **dict.fromkeys((14, 16, 17, 27), NUMBER),  # a timestamp, date, time, and timestamp with a zone
            24: "DecimalValue",
            29: "Type",  # null
            33: "UserDefinedValue",
        },
        50: range(2),
        51: _VARIATION,
    },
    "DecimalValue": {1: BYTES, 2: _PRECISION, 3: _SCALE},
    "UserDefinedValue": {1: _REFERENCE, 2: "Any"},
    "Any": {1: TEXT, 2: BYTES},
    "Type": {
        ONE_OF: {
            **dict.fromkeys((1, 2, 3, 5, 7, 10, 11, 12, 13, 14, 16, 17, 29), "Plain"),
            23: "FixedBinary",
            24: "Decimal",
            25: "Struct",
            27: "List",
            28: "Map",
            30: "UserDefined",
            33: "PrecisionTimestamp",
            34: "PrecisionTimestamp",
        },
    },
    "Plain": _PLAIN,
    "FixedBinary": {1: _WIDTH, 2: _VARIATION, 3: _NULLABILITY},
    "Decimal": {1: _SCALE, 2: _PRECISION, 3: _VARIATION, 4: _NULLABILITY},
    "Struct": {1: "*Type", 2: _VARIATION, 3: _NULLABILITY},
    "List": {1: "Type", 2: _VARIATION, 3: _NULLABILITY},
    "Map": {1: "Type", 2: "Type", 3: _VARIATION, 4: _NULLABILITY},
    "UserDefined": {1: _REFERENCE, 2: _VARIATION, 3: _NULLABILITY},
    "PrecisionTimestamp": {1: _SUBSECOND, 2: _VARIATION, 3: _NULLABILITY},
}


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function with these arguments."""

    name: str
    arguments: tuple[FilterNode, ...]


@dataclass(frozen=True)
class ColumnRef:
    """A top-level column of the schema that comes with the expression, or a `nested` field of it."""

    number: int
    nested: bool = False


@dataclass(frozen=True)
class Value:
    """A value, in the form of an expression of pyarrow."""

    expression: pc.Expression


FilterNode: TypeAlias = FunctionCall | ColumnRef | Value


@dataclass(frozen=True)
class ReceivedFilter:
    """An expression over batches of `schema`, for libarrow and in the form of a tree."""

    expression: pc.Expression
    schema: pa.Schema
    tree: FilterNode

    def bind(self, schema: pa.Schema) -> tuple[RowFilter, tuple[int, ...]]:
        """Return the filter for batches with only its columns, in its order, and their positions in `schema`.

        Raises:
            FormatError: `schema` lacks a column of the filter, or has it more than once or with another type.
        """
        numbers = []
        for field in self.schema:
            indices = schema.get_all_field_indices(field.name)
            if len(indices) != 1 or not _alike(schema.field(indices[0]).type, field.type):
                raise FormatError(f"the filter has a column {field.name!r} that does not exist, or has another type")
            numbers += indices
        rows = RowFilter(self.expression, tuple(range(len(numbers))), tuple(self.schema.types))
        return rows, tuple(numbers)


def encode_filter(rows: RowFilter, schema: pa.Schema) -> bytes | None:
    """Encode a filter of batches of this schema; None if its meaning would change, or it would be too long."""
    both = _encode(rows, schema)
    return None if both is None else both[0]


def filter_tree(rows: RowFilter, schema: pa.Schema) -> FilterNode | None:
    """Return the tree of a filter of batches of this schema, whose columns have the numbers of `rows.columns`.

    None if `encode_filter` returns None.
    """
    both = _encode(rows, schema)
    return None if both is None else both[1].tree


def _encode(rows: RowFilter, schema: pa.Schema) -> tuple[bytes, ReceivedFilter] | None:
    filter_schema = pa.schema([schema.field(number) for number in rows.columns])
    text = expression_text(rows.expression)
    if not text or _changes_moments(text, filter_schema.types):
        return None
    functions = {*_CALL.findall(text)}
    if not functions <= _PRINTED_FUNCTIONS or "nan_is_null=true" in text or _depth(text) > _MAX_NESTED:
        return None
    try:
        encoded = _compact(bytes(_substrait().serialize_expressions([rows.expression], ["passes"], filter_schema)))
        received = parse_filter(encoded)
        received.bind(schema)
        if _SET in functions:
            _check_sets(received)
    except (pa.ArrowException, FormatError, ValueError):
        return None
    return encoded, received


def _changes_moments(text: str, columns: Sequence[pa.DataType]) -> bool:
    """Return whether a timestamp in the filter may lose precision.

    pyarrow serializes seconds and milliseconds as microseconds. It prints a timestamp beyond their range as a number,
    and does not print all values of a set.
    """
    coarse = any(pa.types.is_timestamp(type_) and type_.unit in ("s", "ms") for type_ in columns)
    return coarse and ("<value out of range" in text or f"{_SET}(" in text)


def _check_sets(received: ReceivedFilter) -> None:
    """Raise FormatError if comparisons in place of sets of values would pass other rows.

    A comparison is null for some rows for which a test for a set is false. This makes no difference to `and`, to `or`
    and to the choice of rows, but to all other functions.
    """

    def check(node: FilterNode) -> None:
        match node:
            case FunctionCall("and" | "or", arguments):
                for argument in arguments:
                    check(argument)
            case FunctionCall("if_else", (_, then, _)):
                check(then)
            case FunctionCall("equal", (ColumnRef(number, nested), Value(value))):
                if nested or _is_null(value) or pa.types.is_floating(received.schema.field(number).type):
                    raise FormatError(
                        "the set of values of the filter has a null, or is of floats, which sets compare differently"
                    )
            case FunctionCall(name, parts) if name in _OF_COLUMNS and not any(
                isinstance(argument, FunctionCall) for argument in parts
            ):
                pass  # no set is part of this call
            case _:
                raise FormatError(
                    "the filter uses the result of a set test, which is not the same for nulls, for more than "
                    "choosing rows"
                )

    check(received.tree)
    if "cast(" in str(received.expression):
        raise FormatError("the filter compares a column with values of another type, which requires a conversion")


def parse_filter(encoded: bytes) -> ReceivedFilter:
    """Parse a filter from outside.

    libarrow relies on many parameters of such a message without checking them, so it sees only messages that were
    checked here.

    Raises:
        FormatError: The bytes are not a filter, or the filter is not accepted.
    """
    if len(encoded) > MAX_SIZE:
        raise FormatError(f"the filter has {len(encoded)} bytes; at most {MAX_SIZE} are accepted")
    protobuf.check_message(encoded, "ExtendedExpression", _GRAMMAR)
    parser = _Parser(encoded)
    tree = parser.tree()
    if parser.value_schema is not None:
        _check_nulls(tree, parser.value_schema)
    try:
        bound_expressions = _substrait().deserialize_expressions(encoded)
        ((_, expression),) = bound_expressions.expressions.items()
        schema = check_field_names(bound_expressions.schema)
    except (pa.ArrowException, ValueError) as error:
        raise FormatError(f"libarrow cannot read the filter: {error}") from None
    return ReceivedFilter(expression, schema, tree)


def _check_nulls(node: FilterNode, schema: pa.Schema) -> None:
    """Raise FormatError for a null that is not compared with a column of its own type, unless it is a boolean.

    To convert a null of the types large_string and large_binary, libarrow would read beyond its memory.
    """
    match node:
        case Value(value) if _is_null(value) and str(value) != f"null[{pa.bool_()}]":
            raise FormatError("the filter has a null in a place that has no type")
        case FunctionCall(name, (ColumnRef(number, False), Value(value))) if name in _COMPARISONS and _is_null(value):
            if number >= len(schema) or str(value) != f"null[{schema.field(number).type}]":
                raise FormatError("the filter compares a column with a null of another type")
        case FunctionCall(_, arguments):
            for argument in arguments:
                _check_nulls(argument, schema)


def _substrait() -> Any:
    try:
        import pyarrow.substrait as substrait
    except ImportError:
        raise FormatError("this build of pyarrow lacks Substrait") from None
    return substrait


def _depth(text: str) -> int:
    """Return the deepest nesting of parentheses in a text."""
    steps = ((character == "(") - (character == ")") for character in text)
    return max(accumulate(steps), default=0)


def _compact(encoded: bytes) -> bytes:
    """Return the expression with each used extension declared once, and without unused extensions."""
    fields = [*protobuf.fields(encoded)]
    used_origins = set()  # by types and functions
    for declaration in protobuf.messages(fields, _EXTENSIONS):
        used_origins |= {
            protobuf.number(reference, 1) for kind in (1, 3) for reference in protobuf.messages(declaration, kind)
        }
    compacted: list[bytes] = []
    for number, value in fields:
        if isinstance(value, int) or (
            number == _ORIGINS and protobuf.number([*protobuf.fields(value)], 1) not in used_origins
        ):
            continue
        compacted.append(protobuf.encode_field(number, bytes(value)))
    return b"".join(dict.fromkeys(compacted))  # each field once, in order


class _Parser:
    """A parser of the protobuf messages of an expression."""

    def __init__(self, encoded: bytes) -> None:
        self._whole = [*protobuf.fields(encoded)]
        self._nodes = 0
        self._functions: dict[int, str] = {}
        #: The schema that libarrow has read with a value; None for a filter without values.
        self.value_schema: pa.Schema | None = None
        for declared in protobuf.messages(self._whole, _EXTENSIONS):
            for function in protobuf.messages(declared, 3):
                name = b"".join(bytes(value) for number, value in function if number == 3 and _is_bytes(value)).decode(
                    errors="replace"
                )
                if name not in _FUNCTIONS:
                    raise FormatError(f"the filter has the function {name!r}, which servers do not compute")
                anchor = protobuf.number(function, 2)
                if anchor in self._functions:
                    raise FormatError(f"the filter has two functions with the number {anchor}")
                self._functions[anchor] = name

    def tree(self) -> FilterNode:
        expressions = protobuf.messages(self._whole, _EXPRESSIONS)
        roots = [root for expression in expressions for root in protobuf.messages(expression, 1)]
        if len(roots) != 1:
            raise FormatError(f"the filter has {len(roots)} expressions instead of one")
        return self._node(roots[0], 0)

    def _node(self, fields: protobuf.Fields, depth: int) -> FilterNode:
        self._nodes += 1
        if depth > _MAX_FILTER_DEPTH or self._nodes > _MAX_NODES:
            raise FormatError(
                f"the filter has more than {_MAX_NODES} parts, or is nested deeper than {_MAX_FILTER_DEPTH} levels"
            )
        if len(fields) != 1 or not _is_bytes(fields[0][1]):
            raise FormatError("the filter cannot be read")
        number, content = fields[0]
        assert not isinstance(content, int)
        inner = [*protobuf.fields(content)]
        if number == _FUNCTION:
            name = self._functions.get(protobuf.number(inner, 1))
            if name is None:
                raise FormatError("the filter has a function without a name")
            arguments = [value for argument in protobuf.messages(inner, 4) for value in protobuf.messages(argument, 3)]
            return FunctionCall(name, tuple(self._node(part, depth + 1) for part in arguments))
        if number == _SINGULAR_OR_LIST:
            match self._parts(inner, depth):
                case [ColumnRef() as column, _, *_] as set_test if all(
                    isinstance(part, Value) for part in set_test[1:]
                ):
                    return FunctionCall("or", tuple(FunctionCall("equal", (column, part)) for part in set_test[1:]))
            raise FormatError("the filter has a set test whose arguments are not a column and values")
        if number == _IF:
            clauses = protobuf.messages(inner, 1)
            parts = (
                *(part for clause in clauses for part in self._parts(clause, depth)),
                *self._parts(inner, depth, 2),
            )
            match parts:
                case (FunctionCall("is_not_null", (ColumnRef(),)), _, Value(value)) if _is_null(value):
                    return FunctionCall("if_else", parts)
            raise FormatError("the filter tests a null in a way that servers do not compute")
        if number == _SELECTION:
            return _column(inner)
        if number == _LITERAL:
            return Value(self._value(bytes(content)))
        raise FormatError("the filter has a kind of expression that servers do not compute")

    def _parts(self, fields: protobuf.Fields, depth: int, *numbers: int) -> list[FilterNode]:
        """Return the expressions in the fields with these numbers, in the order of the numbers."""
        return [
            self._node(expression, depth + 1)
            for number in numbers or (1, 2)
            for expression in protobuf.messages(fields, number)
        ]

    def _value(self, literal: bytes) -> pc.Expression:
        """Let libarrow read a literal, in an expression of its own."""
        alone = protobuf.encode_field(
            _EXPRESSIONS,
            protobuf.encode_field(1, protobuf.encode_field(_LITERAL, literal)) + protobuf.encode_field(3, b"value"),
        )
        context = [(number, value) for number, value in self._whole if number != _EXPRESSIONS and _is_bytes(value)]
        message = alone + b"".join(protobuf.encode_field(number, bytes(value)) for number, value in context)
        try:
            bound_expressions = _substrait().deserialize_expressions(message)
            ((_, expression),) = bound_expressions.expressions.items()
            self.value_schema = bound_expressions.schema
        except (pa.ArrowException, ValueError) as error:
            raise FormatError(f"libarrow cannot read a value of the filter: {error}") from None
        return expression


def _is_null(value: pc.Expression) -> bool:
    return str(value).startswith("null[")


def _column(reference: protobuf.Fields) -> ColumnRef:
    for direct in protobuf.messages(reference, 1):
        for struct in protobuf.messages(direct, 2):
            return ColumnRef(protobuf.number(struct, 1), nested=any(number == 2 for number, _ in struct))
    raise FormatError("the filter has a column that cannot be read")


def _alike(first: pa.DataType, second: pa.DataType) -> bool:
    """Return whether values of two types compare alike. The zones of timestamps do not matter: Substrait has none."""
    if pa.types.is_timestamp(first) and pa.types.is_timestamp(second):
        return first.unit == second.unit and (first.tz is None) is (second.tz is None)
    return bool(first == second)


def _is_bytes(value: protobuf.FieldValue) -> bool:
    return not isinstance(value, int)
