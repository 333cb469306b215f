"""Arrow's golden streams and files: every way to read them yields the data of their descriptions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import dissociated as dis
from support.certificates import Certificates
from support.helpers import case, leaving_nothing
from support.machine import ARROW_TEST_DATA, media, missing

from .integration_json import Description, read_description
from .ways import DIRECT, WAYS, Arrived, medium, server, slow

FOLDER = ARROW_TEST_DATA / "arrow-ipc-stream" / "integration" if ARROW_TEST_DATA else Path()
GOLDEN = (
    sorted(path for path in FOLDER.rglob("*") if path.suffix in (".stream", ".arrow_file")) if ARROW_TEST_DATA else []
)

pytestmark = [pytest.mark.needs("golden files"), pytest.mark.usefixtures("trusted")]


#: Ways that are tested together, grouped by media that connect slowly.
GROUPS = {"quick": [way for way in WAYS if not slow(way)]}
GROUPS |= {scheme: [way for way in WAYS if medium(way) == scheme] for scheme in ("tls", "ucx", "fabric")}
FEWER = [path for path in GOLDEN if path.suffix == ".stream" and ("1.0.0" not in str(path) or "nested" in str(path))]
FEWER = FEWER[::8]
#: Ways that read every file: each path of the content through our code. All others read FEWER files, because the
#: content of a file does not matter to a medium.
THOROUGH = {*DIRECT, "published-shm-any", "published-tcp-packed", "live-shm-any", "apart-shm"}


@pytest.fixture(scope="module", params=media(GROUPS))
def group(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def running(group: str, trusted: Certificates) -> Iterator[dis.Server]:
    for library in ("ucx", "libfabric"):
        missing(library)  # these libraries keep descriptors open for good, which must not count as leaks of a group
    with leaving_nothing(), server(GROUPS[group]) as made:
        yield made


def description_of(path: Path) -> Path:
    return path.with_suffix(".json.gz")


def test_every_golden_file_has_a_description_and_the_other_way_round() -> None:
    assert GOLDEN, f"no golden streams below {FOLDER}: is it the directory `data` of apache/arrow-testing?"
    described = {path.with_suffix("").with_suffix("") for path in FOLDER.rglob("*.json.gz")}
    for suffix in (".stream", ".arrow_file"):
        assert {path.with_suffix("") for path in GOLDEN if path.suffix == suffix} == described


def test_what_arrives_is_what_the_description_says(running: dis.Server, group: str) -> None:
    for path in GOLDEN if group == "quick" else FEWER:
        described = read_description(description_of(path))
        for way in GROUPS[group] if path in FEWER else THOROUGH:
            with case((path, way)):
                check(WAYS[way](running, path), described, way)


def check(arrived: Arrived, described: Description, way: str) -> None:
    assert arrived.schema.equals(described.schema, check_metadata=True), way
    assert [batch.num_rows for batch, _ in arrived.batches] == [batch.num_rows for batch in described.batches], way
    for number, ((batch, custom), expected) in enumerate(zip(arrived.batches, described.batches, strict=True)):
        batch.validate()  # not in full: dates and decimals of golden files exceed their range
        assert batch.schema.equals(described.schema, check_metadata=True), (way, number)
        assert batch.equals(expected), (way, number)
        assert custom is None, (way, number)  # no golden file has metadata of single batches
