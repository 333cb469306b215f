"""Names that were documented at other places can be imported from there for one release, which says so."""

from __future__ import annotations

import importlib

import pytest

import dissociated as dis


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("dissociated.log", "dissociated.monitoring.log", "configure"),
        ("dissociated.store.node", "dissociated.node.launch", "ensure"),
        ("dissociated.store.node", "dissociated.node.node", "Node"),
        ("dissociated.store.here", "dissociated.node.local", "stage_here"),
    ],
)
def test_an_old_place(old: str, new: str, name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"import it from {new}"):
        found = getattr(importlib.import_module(old), name)
    assert found is getattr(importlib.import_module(new), name)


def test_modules_that_are_rooms_now() -> None:
    with pytest.warns(DeprecationWarning, match="import it from dissociated.server.server"):
        from dissociated.server import Server
    with pytest.warns(DeprecationWarning, match="import it from dissociated.client.open"):
        from dissociated.client import open_stream
    assert (Server, open_stream) == (dis.Server, dis.open_stream)


def test_what_is_nowhere() -> None:
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from dissociated.log import nothing  # noqa: F401
