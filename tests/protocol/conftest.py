"""Empty fixtures in place of the socket directories, because no test here opens a socket."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _sockets_of_the_run() -> None: ...


@pytest.fixture(autouse=True)
def _sockets_of_the_test() -> None: ...
