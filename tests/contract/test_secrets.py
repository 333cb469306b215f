"""The text of a source's exception stays in the server's log, over every transport. tests/catalog covers Flight."""

from __future__ import annotations

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import DissociatedError
from support.helpers import case
from support.secret_sources import BATCH, ERRORS, SOURCES, check

from .conftest import QUICK, Route


@pytest.mark.parametrize("live", [False, True], ids=["read anew", "live"])
def test_the_text_of_a_source_s_exception_stays_in_the_log(
    direct: Route, caplog: pytest.LogCaptureFixture, live: bool
) -> None:
    cases = [("after a batch", error) for error in ERRORS]
    cases += [] if live else [(source, error) for source in SOURCES for error in ("ValueError", "ArrowInvalid")]
    if direct.way.medium not in QUICK:  # they pass on the same message, and connect slowly
        cases = cases[:1]
    for source, error in cases:
        with case((source, error)):
            made = SOURCES[source](ERRORS[error])
            direct.servers[0].publish("data", made, live=dis.Live() if live else None)
            check(caplog, direct.open)


def test_what_this_library_says_of_a_source_is_told(quick: Route) -> None:
    quick.publish(lambda: iter([BATCH, pa.record_batch({"m": [1]})]))
    with pytest.raises(DissociatedError, match="the record batches have different schemas"):
        quick.open().read_all()
