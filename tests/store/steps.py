"""Steps that are done to a node while its file system fails, and their expected results."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pyarrow as pa

import dissociated as dis
from dissociated.control.commit import Commit
from dissociated.errors import DissociatedError
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.helpers import commit_of
from support.injection import Fault, SQLiteFault

SCHEMA = pa.schema([("n", pa.int64())])
#: A step: name of the dataset, the mode or "drop", and the numbers to write.
Step: TypeAlias = tuple[str, str, list[int]]
#: Numbers by dataset name.
State: TypeAlias = dict[str, list[int]]

STEPS: Sequence[Step] = (
    ("a", "overwrite", [1]),
    ("a", "append", [2]),
    ("a", "overwrite", [3]),
    ("b", "overwrite", [4]),
    ("a", "drop", []),
)


def node(directory: Path, database: str = ":memory:", **options: Any) -> Node:
    """Return a node that keeps no replaced version."""
    return Node(Store(directory, **options), ["shm:"], database=database, retain=0.0)


def take(client: dis.Client, step: Step) -> None:
    name, mode, numbers = step
    if mode == "drop":
        client.drop(name)
    else:
        client.put(name, pa.table([pa.array(numbers, pa.int64())], SCHEMA), mode=mode)


def take_all(client: dis.Client, fault: Fault | SQLiteFault) -> State:
    """Take all steps but those whose dataset is missing, and return the state that was acknowledged.

    Fail if a step is refused before the fault has come.
    """
    state: State = {}
    for step in STEPS:
        if step[1] in ("append", "drop") and step[0] not in state:
            continue  # the step before it was rejected
        try:
            take(client, step)
        except DissociatedError:
            assert fault.came
        else:
            state = after(state, step)
    return state


def staged(store: Store, name: str, numbers: list[int], mode: Literal["overwrite", "append"] = "overwrite") -> Commit:
    """Write a segment, and return its commit with the next number."""
    key = secrets.token_hex(8)
    with store.writer(key, SCHEMA) as writer:
        writer.write(pa.record_batch([pa.array(numbers, pa.int64())], SCHEMA))
    number = 1 + max((one.number for one in store.named(name)), default=0)
    return commit_of(name, [key], mode=mode, key=key, number=number)


def take_in_store(store: Store, step: Step) -> None:
    """Apply a step to a store like a node does, but without a catalog: children take a tenth of the time."""
    name, mode, numbers = step
    if mode != "drop":
        version = store.commit(staged(store, name, numbers, "append" if mode == "append" else "overwrite"))
    store.remove(*(one for one in store.named(name) if mode == "drop" or one != version))


def after(state: State, step: Step) -> State:
    name, mode, numbers = step
    others = {other: found for other, found in state.items() if other != name}
    return others if mode == "drop" else {**others, name: [*(state[name] if mode == "append" else []), *numbers]}


def served(client: dis.Client) -> State:
    return {info.name: client.read(info.name).read_all()["n"].to_pylist() for info in client.list()}
