"""A new segment in the stage of a node, as each of its writers opens it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dissociated.client.calls import CatalogClient
from dissociated.control.commit import Commit
from dissociated.store.files import Reserve
from dissociated.store.stage import StagePlace


@contextmanager
def staged_file(
    stage: StagePlace, segment: str, connect: Callable[[str], CatalogClient], commit: Commit
) -> Iterator[tuple[Path, Reserve | None]]:
    """Open a stage, and yield the arguments of a writer of the new segment: its path, and the call that reserves room.

    Args:
        stage: The stage, on this host.
        segment: The name of the segment.
        connect: Returns a client of the node with this URI. It is called if the room in the stage is limited; if it is
            not, the yielded call is None.
        commit: The commit of the segment.

    Raises:
        StoreError: The directory cannot be opened. See `StagePlace.open`.
    """
    if not stage.limited:
        with stage.open() as directory:
            yield directory / segment, None
        return
    with connect(stage.flight) as node, stage.open() as directory:
        yield directory / segment, partial(node.reserve, appends_to=commit.appends_to)
