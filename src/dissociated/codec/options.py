"""How Arrow IPC is read and written: every field of the C++ `IpcReadOptions` and `IpcWriteOptions`.

libarrow applies what pyarrow lets one tell it. Depth limits, alignment and the least saving of compression are
applied here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import pyarrow as pa

from dissociated.errors import FormatError, OptionError

#: How deep types may nest: libarrow's own limit, which pyarrow has no way to raise.
MAX_DEPTH = 64

_ALIGNMENTS = (8, 16, 32, 64)
_CODECS = ("lz4", "lz4_frame", "zstd")

T = TypeVar("T", "ReadOptions", "WriteOptions")


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How messages are read. Raises OptionError for values that make no sense."""

    #: The deepest nesting of types that is accepted; a flat column has depth 1.
    max_recursion_depth: int = MAX_DEPTH
    #: Where libarrow allocates, as for decompressing; None is its default pool. It must outlive what is read. Flight
    #: knows no other pool: a read over grpc with one is refused.
    memory_pool: pa.MemoryPool | None = None
    #: Indices of the top-level fields to read; empty for all.
    included_fields: Sequence[int] = ()
    #: Whether bodies are decompressed by libarrow's threads.
    use_threads: bool = True
    #: Whether data of the other byte order is swapped to this machine's.
    ensure_native_endian: bool = True
    #: Whether buffers that lie less aligned than this are copied.
    ensure_alignment: pa.ipc.Alignment = pa.ipc.Alignment.Any
    #: How reads of a file are put together where they are done ahead; None is libarrow's default. Always lazy.
    pre_buffer_cache_options: pa.CacheOptions | None = None

    def __post_init__(self) -> None:
        _check_common(self)
        _check_type(self, "included_fields", Iterable)
        object.__setattr__(self, "included_fields", tuple(self.included_fields))
        if any(not _is_integer(index) or index < 0 for index in self.included_fields):
            raise OptionError(f"included_fields are indices of fields, from 0 on, not {self.included_fields}")
        _check_type(self, "ensure_alignment", pa.ipc.Alignment)
        if self.pre_buffer_cache_options is not None:
            _check_type(self, "pre_buffer_cache_options", pa.CacheOptions)

    def to_pyarrow(self) -> pa.ipc.IpcReadOptions:
        """The part that libarrow applies by itself."""
        return pa.ipc.IpcReadOptions(
            ensure_native_endian=self.ensure_native_endian,
            ensure_alignment=self.ensure_alignment,
            use_threads=self.use_threads,
            included_fields=[*self.included_fields],
        )

    def check_fields(self, schema: pa.Schema) -> None:
        """Raise OptionError where a field that is included is not in the whole `schema`."""
        for index in self.included_fields:
            if index >= len(schema):
                raise OptionError(f"there is no field {index} to include: the schema has {len(schema)}")

    def check_depth(self, schema: pa.Schema) -> None:
        """Raise FormatError where a field of `schema` nests too deep."""
        _check_depth(schema, self.max_recursion_depth)


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How messages are written. Raises OptionError for values that make no sense."""

    #: Whether arrays may have 2**31 elements or more, which some implementations cannot read.
    allow_64bit: bool = False
    #: The deepest nesting of types that is written; a flat column has depth 1.
    max_recursion_depth: int = MAX_DEPTH
    #: Buffers and metadata are padded to a multiple of so many bytes: 8, 16, 32 or 64.
    alignment: int = 8
    #: Whether messages begin with their length alone, as before 0.15.
    write_legacy_ipc_format: bool = False
    #: Where this library allocates while writing. pyarrow has no way to tell libarrow, which uses its default pool.
    memory_pool: pa.MemoryPool | None = None
    #: Compresses bodies: "lz4", "zstd", or a pyarrow.Codec of these with a level; None does not.
    codec: str | pa.Codec | None = None
    #: A buffer is compressed only where that saves at least this part of its size, from 0 to 1; None always does.
    min_space_savings: float | None = None
    #: Whether bodies are compressed by libarrow's threads.
    use_threads: bool = True
    #: Whether a dictionary that has grown is sent as what was added, rather than anew.
    emit_dictionary_deltas: bool = False
    #: Whether a table that is written to a file gets one dictionary for each column. Streams ignore it.
    unify_dictionaries: bool = False
    #: V5, or V4 for libraries before 1.0, which has no compression.
    metadata_version: pa.ipc.MetadataVersion = pa.ipc.MetadataVersion.V5

    def __post_init__(self) -> None:
        _check_common(self)
        if not isinstance(self.alignment, int) or self.alignment not in _ALIGNMENTS:
            raise OptionError(f"alignment is 8, 16, 32 or 64 bytes, not {self.alignment!r}")
        name = self.codec.name if isinstance(self.codec, pa.Codec) else self.codec
        if name is not None and name not in _CODECS:
            raise OptionError(f"Arrow IPC knows the codecs lz4 and zstd, not {name!r}")
        savings = self.min_space_savings
        if savings is not None and not ((_is_integer(savings) or isinstance(savings, float)) and 0 <= savings <= 1):
            raise OptionError(f"min_space_savings is a part of the size, from 0 to 1, not {savings!r}")
        _check_type(self, "metadata_version", pa.ipc.MetadataVersion)
        if self.metadata_version not in (pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5):
            raise OptionError(f"metadata is written in version V4 or V5, not {self.metadata_version.name}")
        if name is not None and self.metadata_version is pa.ipc.MetadataVersion.V4:
            # libarrow would write it, and read something else back
            raise OptionError("bodies can be compressed with metadata version V5 only")

    def to_pyarrow(self) -> pa.ipc.IpcWriteOptions:
        """The part that libarrow applies by itself."""
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
        """Raise FormatError where a field of `schema` nests too deep."""
        _check_depth(schema, self.max_recursion_depth)


def check_options(options: T | None, kind: type[T]) -> T:
    """`options`, or the defaults of this `kind` where there are none. Raises OptionError where they are of another."""
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise OptionError(f"options are a dissociated.{kind.__name__}, not {options!r}")
    return options


def _check_common(options: Any) -> None:
    for field in fields(options):
        if field.type == "bool":
            _check_type(options, field.name, bool)
    depth = options.max_recursion_depth
    if not _is_integer(depth) or not 1 <= depth <= MAX_DEPTH:
        raise OptionError(f"max_recursion_depth is from 1 to {MAX_DEPTH}, libarrow's own limit, not {depth}")
    if options.memory_pool is not None:
        _check_type(options, "memory_pool", pa.MemoryPool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_type(options: Any, name: str, wanted: type) -> None:
    value = getattr(options, name)
    if not isinstance(value, wanted):
        raise OptionError(f"{name} is a {wanted.__name__}, not {value!r}")


def _check_depth(schema: pa.Schema, limit: int) -> None:
    for field in schema:
        if (depth := _depth(field.type)) > limit:
            raise FormatError(f"the field {field.name!r} is nested {depth} deep; max_recursion_depth is {limit}")


def _depth(type_: pa.DataType) -> int:
    if isinstance(type_, pa.BaseExtensionType):
        return _depth(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return _depth(type_.value_type)
    return 1 + max((_depth(type_.field(index).type) for index in range(type_.num_fields)), default=0)
