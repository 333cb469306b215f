"""Options of reading and writing Arrow IPC: every field of the C++ `IpcReadOptions` and `IpcWriteOptions`.

libarrow applies the options that pyarrow exposes. Depth limits, alignment and the least saving of compression are
applied by this library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import pyarrow as pa

from dissociated.codec.nesting import nested_types
from dissociated.errors import FormatError, OptionError

#: The deepest nesting of types: libarrow's own limit, which pyarrow cannot raise.
MAX_DEPTH = 64

_ALIGNMENTS = (8, 16, 32, 64)
_CODECS = ("lz4", "lz4_frame", "zstd")

T = TypeVar("T", "ReadOptions", "WriteOptions")


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of reading messages. Raises OptionError for invalid values.

    Example:
        ```python
        import dissociated as dis

        options = dis.ReadOptions(included_fields=[0, 1])
        reader = client.read("flights", options=options)
        ```
    """

    #: The deepest nesting of types that is accepted; a flat column has depth 1.
    max_recursion_depth: int = MAX_DEPTH
    #: The pool in which libarrow allocates, such as for decompression; None is its default pool. The pool must outlive
    #: all data read. Flight supports no other pool: a read over grpc with this option is refused.
    memory_pool: pa.MemoryPool | None = None
    #: Indices of the top-level fields to read; empty for all.
    included_fields: Sequence[int] = ()
    #: Whether bodies are decompressed by libarrow's threads.
    use_threads: bool = True
    #: Whether data of the other byte order is swapped to this machine's.
    ensure_native_endian: bool = True
    #: The least alignment of buffers. Buffers with a smaller alignment are copied.
    ensure_alignment: pa.ipc.Alignment = pa.ipc.Alignment.Any
    #: How reads of a file are combined when they are done ahead; None is libarrow's default. Always lazy.
    pre_buffer_cache_options: pa.CacheOptions | None = None

    def __post_init__(self) -> None:
        _check_common(self)
        _check_type(self, "included_fields", Iterable)
        object.__setattr__(self, "included_fields", tuple(self.included_fields))
        if any(not _is_integer(index) or index < 0 for index in self.included_fields):
            raise OptionError(f"included_fields is {self.included_fields!r}; it must be indices of fields, from 0 on")
        _check_type(self, "ensure_alignment", pa.ipc.Alignment)
        if self.pre_buffer_cache_options is not None:
            _check_type(self, "pre_buffer_cache_options", pa.CacheOptions)

    def with_fields(self, indices: Sequence[int]) -> ReadOptions:
        """Return these options with other `included_fields`."""
        return self if tuple(indices) == self.included_fields else replace(self, included_fields=indices)

    def to_pyarrow(self) -> pa.ipc.IpcReadOptions:
        """Return the options that libarrow applies."""
        return pa.ipc.IpcReadOptions(
            ensure_native_endian=self.ensure_native_endian,
            ensure_alignment=self.ensure_alignment,
            use_threads=self.use_threads,
            included_fields=[*self.included_fields],
        )

    def check_fields(self, schema: pa.Schema) -> None:
        """Raise OptionError if `included_fields` has an index that the whole `schema` lacks."""
        for index in self.included_fields:
            if index >= len(schema):
                raise OptionError(f"field {index} does not exist: the schema has {len(schema)} fields")

    def check_depth(self, schema: pa.Schema) -> None:
        """Raise FormatError if a field of `schema` nests too deep."""
        _check_depth(schema, self.max_recursion_depth)


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Options of writing messages. Raises OptionError for invalid values.

    Example:
        ```python
        import dissociated as dis

        server.publish("small", table, options=dis.WriteOptions(codec="zstd"))
        ```
    """

    #: Whether arrays may have 2**31 elements or more, which some implementations cannot read.
    allow_64bit: bool = False
    #: The deepest nesting of types that is written; a flat column has depth 1.
    max_recursion_depth: int = MAX_DEPTH
    #: Buffers and metadata are padded to a multiple of this number of bytes: 8, 16, 32 or 64.
    alignment: int = 8
    #: Whether messages begin with only their length, the format of Arrow before 0.15.
    write_legacy_ipc_format: bool = False
    #: The pool in which this library allocates while writing. libarrow uses its default pool: pyarrow cannot change it.
    memory_pool: pa.MemoryPool | None = None
    #: Compression of bodies: "lz4", "zstd", or a pyarrow.Codec of these with a level; None for no compression.
    codec: str | pa.Codec | None = None
    #: The least part of its size, from 0 to 1, that compression must save of a buffer; None compresses all buffers.
    min_space_savings: float | None = None
    #: Whether bodies are compressed by libarrow's threads.
    use_threads: bool = True
    #: Whether only the new values of a dictionary that has grown are sent, rather than the whole dictionary.
    emit_dictionary_deltas: bool = False
    #: Whether a table that is written to a file gets a single dictionary per column. Streams ignore it.
    unify_dictionaries: bool = False
    #: V5, or V4 for libraries before 1.0, which has no compression.
    metadata_version: pa.ipc.MetadataVersion = pa.ipc.MetadataVersion.V5

    def __post_init__(self) -> None:
        _check_common(self)
        if not isinstance(self.alignment, int) or self.alignment not in _ALIGNMENTS:
            raise OptionError(f"alignment is {self.alignment!r}; it must be 8, 16, 32 or 64 bytes")
        name = self.codec.name if isinstance(self.codec, pa.Codec) else self.codec
        if name is not None and name not in _CODECS:
            raise OptionError(f"the codec {name!r} is unknown: Arrow IPC has lz4 and zstd")
        savings = self.min_space_savings
        if savings is not None and not ((_is_integer(savings) or isinstance(savings, float)) and 0 <= savings <= 1):
            raise OptionError(f"min_space_savings is {savings!r}; it must be from 0 to 1")
        _check_type(self, "metadata_version", pa.ipc.MetadataVersion)
        if self.metadata_version not in (pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5):
            raise OptionError(f"metadata_version is {self.metadata_version.name}; only V4 and V5 can be written")
        if name is not None and self.metadata_version is pa.ipc.MetadataVersion.V4:
            # libarrow would write such bodies, and read other values back.
            raise OptionError("compression needs metadata version V5")

    def to_pyarrow(self) -> pa.ipc.IpcWriteOptions:
        """Return the options that libarrow applies."""
        return pa.ipc.IpcWriteOptions(
            metadata_version=self.metadata_version,
            allow_64bit=self.allow_64bit,
            use_legacy_format=self.write_legacy_ipc_format,
            compression="lz4" if self.codec == "lz4_frame" else self.codec,
            use_threads=self.use_threads,
            emit_dictionary_deltas=self.emit_dictionary_deltas,
            unify_dictionaries=self.unify_dictionaries,
        )

    def check_depth(self, schema: pa.Schema) -> None:
        """Raise FormatError if a field of `schema` nests too deep."""
        _check_depth(schema, self.max_recursion_depth)


def check_options(options: T | None, kind: type[T]) -> T:
    """Return `options`, or the defaults of this `kind` for None. Raises OptionError for another type."""
    if options is None:
        default: T = _DEFAULTS[kind]
        return default
    if not isinstance(options, kind):
        raise OptionError(f"{options!r} is not a dissociated.{kind.__name__}")
    return options


def _check_common(options: Any) -> None:
    for field in fields(options):
        if field.type == "bool":
            _check_type(options, field.name, bool)
    depth = options.max_recursion_depth
    if not _is_integer(depth) or not 1 <= depth <= MAX_DEPTH:
        raise OptionError(f"max_recursion_depth is {depth!r}; it must be from 1 to {MAX_DEPTH}, the limit of libarrow")
    if options.memory_pool is not None:
        _check_type(options, "memory_pool", pa.MemoryPool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_type(options: Any, name: str, expected: type) -> None:
    value = getattr(options, name)
    if not isinstance(value, expected):
        raise OptionError(f"{name} is {value!r}; it must be a {expected.__name__}")


def _check_depth(schema: pa.Schema, limit: int) -> None:
    for field in schema:
        if (depth := _depth(field.type)) > limit:
            raise FormatError(f"field {field.name!r} is nested {depth} levels deep; max_recursion_depth is {limit}")


def _depth(type_: pa.DataType) -> int:
    if type(type_) is pa.DataType:  # pyarrow has subclasses for types that have parameters or other types in them
        return 1
    return max(depth for _, depth in nested_types(type_))


_DEFAULTS: dict[type, Any] = {kind: kind() for kind in (ReadOptions, WriteOptions)}
