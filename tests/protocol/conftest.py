"""Nothing here has sockets, and so no directory for them."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _sockets_of_the_run() -> None: ...


@pytest.fixture(autouse=True)
def _sockets_of_the_test() -> None: ...
