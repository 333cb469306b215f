from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from dissociated.transport import _ofi

SAY = "\nexcept dis.errors.TransportError as error:\n    print(error)\n"
SERVE = "dis.Server(['fabric:'], catalog=None)"


def said(script: str, **environment: str) -> str:
    """What a program that cannot use libfabric ends with: one line."""
    run = subprocess.run(
        [sys.executable, "-c", "import dissociated as dis\ntry:\n" + textwrap.indent(script, "    ") + SAY],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not run.returncode, run.stderr
    (line,) = run.stdout.splitlines()
    return line


@pytest.mark.parametrize("side", ["server", "client"])
@pytest.mark.parametrize(
    ("library", "sentence"),
    [
        (
            "/nowhere/libfabric.so.1",
            "fabric: needs libfabric, and there is none: pip install 'dissociated[fabric]'",
        ),
        ("libc.so.6", "libc.so.6 is no libfabric: let DISSOCIATED_FABRIC_LIBRARY name one"),
    ],
    ids=["no library", "no libfabric"],
)
def test_what_is_missing_is_said_in_one_sentence(side: str, library: str, sentence: str) -> None:
    script = SERVE if side == "server" else "dis.open_stream('fabric://127.0.0.1:1?want_data=1', b'')"
    assert sentence in said(script, DISSOCIATED_FABRIC_LIBRARY=library)


def test_a_library_that_is_too_old_is_refused() -> None:
    old = "from dissociated.transport import _ofi\n_ofi._OLDEST = (99, 0)\n"
    assert "is too old: install 99.0 or later, or pip install 'dissociated[fabric]'" in said(old + SERVE)


def test_a_library_with_other_structures_is_refused() -> None:
    other = "from dissociated.transport import _ofi\n_ofi._SIZES['struct fi_msg'] += 8\n"
    assert "has another layout of struct fi_msg than versions 1.17 to 2.5" in said(other + SERVE)


def test_without_cffi_it_is_said_what_to_install() -> None:
    assert said("import sys\nsys.modules['cffi'] = None\n" + SERVE) == (
        "fabric: needs cffi: pip install 'dissociated[fabric]'"
    )


def test_the_library_that_is_named_comes_before_the_systems_and_that_before_the_wheels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DISSOCIATED_FABRIC_LIBRARY", raising=False)
    assert list(_ofi._candidates()) == ["libfabric.so.1", *map(str, _ofi.wheel_libraries())]
    monkeypatch.setenv("DISSOCIATED_FABRIC_LIBRARY", "/opt/libfabric.so.1")
    assert list(_ofi._candidates()) == ["/opt/libfabric.so.1"]
