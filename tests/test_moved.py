"""Documented names are at their old places, and have their old names, for one release, which says so."""

from __future__ import annotations

import importlib
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.ipc import CollectListener, DissociatedDecoder
from dissociated.memory.region import AddressSpace
from dissociated.node.node import Node
from dissociated.store.store import Store
from dissociated.transport.base import Listener
from dissociated.transport.inproc import InprocConnection, InprocTransport
from dissociated.transport.mailbox import Mailbox
from dissociated.transport.registry import transport


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


def test_a_class_that_is_called_otherwise() -> None:
    with pytest.warns(DeprecationWarning, match=r"import DatasetHandle from dissociated.catalog.handle"):
        from dissociated.catalog.dataset import Dataset
    with dis.Server(["inproc:"]) as server:
        server.publish("d", pa.table({"n": [1]}))
        with dis.connect(server.catalog_uri) as client:
            assert isinstance(client["d"], Dataset)


def test_what_is_nowhere() -> None:
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from dissociated.log import nothing  # noqa: F401


def test_parameters_have_their_old_names(tmp_path: Path) -> None:
    with (
        pytest.warns(DeprecationWarning, match="beat is called heartbeat_interval now"),
        Node(Store(tmp_path), [], beat=1.5) as node,  # type: ignore[call-arg]
    ):
        assert not node.server.connections
    with pytest.warns(DeprecationWarning, match="space is called address_space now"):
        DissociatedDecoder(CollectListener(), space=AddressSpace(), returns=SimpleQueue())  # type: ignore[call-arg]


def test_positions_that_mean_nothing_any_more() -> None:
    with dis.Server(["tcp:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("d", pa.table({"a": [1], "b": [2]}))
        with pytest.warns(DeprecationWarning, match="read takes transport, columns by name"):
            read = client.read("d", "grpc", ["b"])  # type: ignore[call-overload]
        assert read.read_all().to_pylist() == [{"b": 2}]
        with pytest.raises(TypeError, match="positional"):
            client.read("d", "grpc", ["b"], 1)  # type: ignore[call-overload]
        info = client.describe("d")
        with pytest.warns(DeprecationWarning, match="read_endpoint takes transport, columns by name"):
            read = client.read_endpoint(info, info.endpoints[0], "tcp", ["a"])  # type: ignore[call-arg]
        assert read.read_all().to_pylist() == [{"a": 1}]
        server.publish("t", pa.Tensor.from_numpy(np.arange(3)))
        with pytest.warns(DeprecationWarning, match="read_tensors takes transport by name"):
            (tensor,) = client.read_tensors("t", "tcp")  # type: ignore[call-arg]
        assert tensor.to_numpy().tolist() == [0, 1, 2]


def test_attributes_have_their_old_names() -> None:
    info = dis.DatasetInfo("d", pa.schema([]), 0, 0, (), lineage_id="a key")
    with pytest.warns(DeprecationWarning, match=r"DatasetInfo.began is called lineage_id now"):
        assert info.began == "a key"
    with pytest.warns(DeprecationWarning, match=r"nearness is called locality now"):
        assert transport("inproc").nearness == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("space", "address_space"),
        ("fetches", "supports_rma"),
        ("due", "request_deadline"),
        ("forked", "after_fork_in_child"),
        ("hung_up", "peer_closed"),
        ("farewell", "send_close_reason"),
        ("last_words", "flush_close_reason"),
        ("outlast", "linger"),
    ],
)
def test_a_connection_has_its_old_names(old: str, new: str) -> None:
    connection = InprocConnection(Mailbox(1), Mailbox(1))
    with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now"):
        assert getattr(connection, old) == getattr(connection, new)


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        (InprocConnection, "forked", "after_fork_in_child"),
        (InprocConnection, "hung_up", "peer_closed"),
        (InprocConnection, "last_words", "flush_close_reason"),
        (InprocConnection, "outlast", "linger"),
        (Listener, "forked", "after_fork_in_child"),
    ],
)
def test_a_method_of_a_user_may_have_its_old_name(kind: type, old: str, new: str) -> None:
    def method(self: object) -> None: ...

    with pytest.warns(DeprecationWarning, match=f"Users.{old} is called {new} now"):
        users = type("Users", (kind,), {old: method})
    assert getattr(users, new) is method


def test_a_transport_of_a_user_has_the_old_names() -> None:
    with pytest.warns(DeprecationWarning, match=r"Near.nearness is called locality now"):

        class Near(InprocTransport):
            nearness = 7

    assert Near().locality == 7
    with pytest.warns(DeprecationWarning, match=r"Fetching.fetches is called supports_rma now"):

        class Fetching(InprocConnection):
            fetches = True

    connection = Fetching(Mailbox(1), Mailbox(1))
    assert connection.supports_rma
    with pytest.warns(DeprecationWarning, match=r"Leaving.farewell is called send_close_reason now"):

        class Leaving(InprocConnection):
            def farewell(self, reason: str) -> None:
                self.interrupt()

    with pytest.warns(DeprecationWarning, match=r"hung_up is called peer_closed now"):
        assert connection.hung_up()
    Leaving(Mailbox(1), Mailbox(1)).send_close_reason("it has failed")
    with pytest.warns(DeprecationWarning, match=r"space is called address_space now"):
        assert connection.space is connection.address_space
    with pytest.warns(DeprecationWarning, match=r"fetches is called supports_rma now"):
        connection.fetches = False
    assert not connection.supports_rma
