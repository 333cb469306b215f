"""Commits and versions: the forms in which they travel and lie on disk, and who assigns the number of a version."""

from __future__ import annotations

import base64
import json
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dissociated as dis
from dissociated.control.commit import StagedSegment
from dissociated.control.version import Part, Version
from dissociated.errors import CatalogError, DatasetNotFound, OptionError
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.nodes import table

SCHEMA = pa.schema([("n", pa.int64())])
#: The schema, serialized by Arrow.
SERIALIZED = bytes(SCHEMA.serialize())
ENCODED = base64.b64encode(SERIALIZED).decode()

names = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=8)
commits = st.builds(
    dis.Commit,
    names,
    st.lists(st.builds(StagedSegment, names, st.one_of(st.just(""), names)), max_size=3),
    st.just(SCHEMA),
    key=st.one_of(st.just(""), names),
    mode=st.sampled_from(["overwrite", "append"]),
    exists=st.sampled_from([None, False, True]),
    tags=st.dictionaries(names, names, max_size=2),
    ttl=st.one_of(st.none(), st.floats(1e-3, 1e10)),
    number=st.just(0),
)


@given(commits)
def test_a_commit_arrives_as_it_was_sent(commit: dis.Commit) -> None:
    assert dis.Commit.parse(json.loads(json.dumps(commit.to_json()))) == commit


def test_a_commit_has_the_form_that_other_programs_send_and_read() -> None:
    commit = dis.Commit(
        "d", [StagedSegment("a"), StagedSegment("b", "n")], SCHEMA, key="k", mode="append", tags={"t": "x"}, ttl=7.0
    )
    sent = {
        "name": "d",
        "segments": ["a", {"node": "n", "segment": "b"}],
        "append": True,
        "schema": ENCODED,
        "key": "k",
        "tags": {"t": "x"},
        "ttl": 7.0,
    }
    assert dis.Commit.parse(sent) == commit
    assert commit.to_json() == {**sent, "mode": "append"}
    condition = dis.Commit("d", schema=SCHEMA, exists=False)
    assert condition.to_json()["exists"] is False


@pytest.mark.parametrize("is_distributed", [False, True])
def test_a_commit_is_made_only_if_its_condition_holds(memory: Path, is_distributed: bool) -> None:
    """The condition holds at the commit, and does not count for a repeated call of a commit that was made."""
    with ExitStack() as stack:
        node = stack.enter_context(Node(Store(memory / "store")))
        if is_distributed:
            node = stack.enter_context(Node(Store(memory / "other"), catalog=node.uri))
        client = stack.enter_context(dis.connect(node.uri))

        def commit(key: str, exists: bool | None, mode: str = "overwrite") -> None:
            client.commit(dis.Commit("d", schema=SCHEMA, key=key, mode=mode, exists=exists))

        for mode in ("overwrite", "append"):
            with pytest.raises(DatasetNotFound, match="'d' does not exist any more, so nothing was replaced"):
                commit(f"early {mode}", True, mode)
        assert [*client.list()] == []
        commit("first", False)
        commit("first", False)
        for mode in ("overwrite", "append"):
            with pytest.raises(CatalogError, match="'d' has been created meanwhile, so nothing was written"):
                commit(f"late {mode}", False, mode)
        assert client.describe("d").version == 1
        commit("second", True)
        commit("third", None)
        assert client.describe("d").version == 3
        client.drop("d")
        commit("first", False)  # a repeated call: it was made
        assert [*client.list()] == []
        commit("fourth", False)
        assert client.describe("d").version == 4
        command = json.dumps({"name": "d", "exists": False}).encode()
        plain = stack.enter_context(flight.FlightClient(node.uri))
        with pytest.raises(pa.ArrowException, match="'d' has been created meanwhile"):
            plain.do_put(flight.FlightDescriptor.for_command(command), SCHEMA)[0].close()


def test_a_commit_without_a_schema_is_not_sent() -> None:
    with pytest.raises(OptionError, match="the commit of 'd' has no schema"):
        dis.Commit("d").to_json()


@pytest.mark.parametrize("missing", ["name", "segments", "append", "schema"])
def test_a_commit_that_lacks_a_value_is_refused(memory: Path, missing: str) -> None:
    body = dis.Commit("d", schema=SCHEMA).to_json()
    del body[missing]
    with Node(Store(memory)) as node, flight.FlightClient(node.uri) as plain, dis.connect(node.uri) as client:
        with pytest.raises(flight.FlightServerError, match="the body of the action 'commit' is invalid"):
            [*plain.do_action(flight.Action("commit", json.dumps(body).encode()))]
        assert list(client.list()) == []


def test_the_catalog_assigns_the_number_of_a_version_whatever_a_client_sends(memory: Path) -> None:
    with Node(Store(memory)) as node, flight.FlightClient(node.uri) as plain, dis.connect(node.uri) as client:
        for number in (1, 2):
            body = {**dis.Commit("d", schema=SCHEMA).to_json(), "version": 77, "catalog": 5}
            [*plain.do_action(flight.Action("commit", json.dumps(body).encode()))]
            assert client.describe("d").version == number
    with Store(memory) as store:
        assert {version.catalog for version in store.versions()} != {5}


#: A report of a version, as nodes have sent it since reports exist.
REPORT = {
    "part": {"id": "p", "node": "n", "ticket": "dGlja2V0", "rows": 3, "nbytes": 24, "number": 0, "serial": 9},
    "name": "d",
    "key": "k",
    "schema": ENCODED,
    "created": 5.0,
    "prepared": True,
    "whole": False,
    "tags": {"t": "x"},
    "ttl": 7.0,
    "before": ["j"],
    "version": 4,
    "catalog": 6,
}
VERSION = Version(
    "d",
    "k",
    SERIALIZED,
    5.0,
    (Part("p", "n", b"ticket", 3, 24, serial=9),),
    tags={"t": "x"},
    ttl=7.0,
    before=("j",),
    number=4,
    catalog=6,
    prepared=True,
    whole=False,
)


def test_a_report_of_a_version_has_the_form_that_other_catalogs_read() -> None:
    assert Version.parse(REPORT) == VERSION
    assert json.loads(json.dumps(VERSION.to_json())) == REPORT


@pytest.mark.parametrize(("name", "value"), [("parts", []), ("origin", 1)])
def test_a_report_with_an_unknown_value_is_refused(name: str, value: object) -> None:
    with pytest.raises(TypeError):
        Version.parse({**REPORT, name: value})


def test_a_manifest_has_the_form_that_was_written_before(memory: Path) -> None:
    with Store(memory) as store, store.writer("s", SCHEMA) as writer:
        writer.write(table(1, 2).to_batches()[0])
    with Store(memory) as store:
        version = store.commit(dis.Commit("d", [StagedSegment("s")], key="k", tags={"t": "x"}, ttl=7.0, number=4))
        (path,) = store.directory.glob("segments/*/manifest.json")
    manifest = json.loads(path.read_text())
    assert {name: manifest[name] for name in ("name", "key", "tags", "ttl", "rows", "version", "format")} == {
        "name": "d",
        "key": "k",
        "tags": {"t": "x"},
        "ttl": 7.0,
        "rows": 2,
        "version": 4,
        "format": 1,
    }
    assert (manifest["id"], manifest["number"], manifest["created"]) == (version.id, version.serial, version.created)
    assert manifest.keys() == {
        *("id", "number", "name", "key", "ticket", "created", "prepared", "whole", "tags", "ttl", "rows", "nbytes"),
        *("before", "staged", "schema", "version", "catalog", "format"),
    }
    with Store(memory) as store:
        assert store.versions() == [version]
