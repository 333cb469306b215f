from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dissociated.errors import DissociatedError, UriError
from dissociated.uri import Uri

UINT64_MAX = 18446744073709551615

GOLDEN = [
    ("tcp://example.org:4711?want_data=7", Uri("tcp", "example.org", 4711, want_data=7)),
    ("tcp://[2001:db8::1]:4711?want_data=7", Uri("tcp", "2001:db8::1", 4711, want_data=7)),
    ("fabric://10.0.0.1?want_data=0", Uri("fabric", "10.0.0.1", want_data=0)),
    (
        "shm:///run/user/1000/dissociated/x.sock?want_data=1&free_data=2",
        Uri("shm", path="/run/user/1000/dissociated/x.sock", want_data=1, free_data=2),
    ),
    (
        "ucx://127.0.0.1:31337?want_data=18446741783881759408",  # the metadata server of the reference
        Uri("ucx", "127.0.0.1", 31337, want_data=0xFFFFFDEADBA0BAB0),
    ),
    (
        "ucx://h:1?want_data=18446744073709551615&free_data=0&remote_handle=%2B%2F8%3D",
        Uri("ucx", "h", 1, want_data=UINT64_MAX, free_data=0, remote_handle=b"\xfb\xff"),
    ),
    ("cuda+ipc:?want_data=5&remote_handle=", Uri("cuda+ipc", want_data=5, remote_handle=b"")),
    ("inproc:name", Uri("inproc", path="name")),
    (
        "tcp://h:1?want_data=3&stream=bodies&note=a%20b%26c",
        Uri("tcp", "h", 1, want_data=3, parameters={"stream": "bodies", "note": "a b&c"}),
    ),
    ("shm:///with%20space/%C3%A9%3F?want_data=1", Uri("shm", path="/with space/é?", want_data=1)),
]


@pytest.mark.parametrize(("text", "uri"), GOLDEN)
def test_golden(text: str, uri: Uri) -> None:
    assert Uri.parse(text) == uri
    assert str(uri) == text


def test_want_data_is_decimal_as_the_reference_writes_it() -> None:
    assert Uri.parse("ucx://h:1?want_data=15302358252208").want_data == 0x00000DEADBA0BAB0


@pytest.mark.parametrize(
    "encoded",
    [
        "%2B%2F8%3D",  # percent-encoded, as we write URIs
        "+/8=",  # from other writers: a plus in a query means a space
        "-_8=",
        "-_8",
        "%2B/8",
    ],
)
def test_remote_handle_is_read_in_both_base64_alphabets_with_or_without_padding(encoded: str) -> None:
    assert Uri.parse(f"ucx://h:1?remote_handle={encoded}").remote_handle == b"\xfb\xff"


@pytest.mark.parametrize("encoded", ["A", "AAAAA", "%C3%A9", "é", "A*==", "=AAA", "AA=A", "%00", "AAAA%0A"])
def test_a_remote_handle_that_is_no_base64_is_refused(encoded: str) -> None:
    with pytest.raises(UriError, match="remote_handle"):
        Uri.parse(f"ucx://h:1?remote_handle={encoded}")


@pytest.mark.parametrize("name", ["want_data", "free_data"])
@pytest.mark.parametrize(
    "value", ["", "-1", "+1", "%201", "1.0", "0x10", "1_0", "18446744073709551616", "9" * 5000, "٣", "²"]
)
def test_a_tag_outside_uint64_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(UriError, match=name):
        Uri.parse(f"tcp://h:1?{name}={value}")


@pytest.mark.parametrize("name", ["want_data", "free_data"])
@pytest.mark.parametrize("value", [-1, UINT64_MAX + 1])
def test_a_tag_outside_uint64_cannot_be_made(name: str, value: int) -> None:
    tags: dict[str, Any] = {name: value}
    with pytest.raises(UriError, match=name):
        Uri("tcp", "h", 1, **tags)


@pytest.mark.parametrize("name", ["want_data", "free_data", "remote_handle", "stream"])
def test_a_repeated_parameter_is_refused(name: str) -> None:
    with pytest.raises(UriError, match=f"{name} more than once"):
        Uri.parse(f"tcp://h:1?{name}=1&want_data=1&{name}=1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no scheme",
        "//host:1?want_data=1",
        "/path",
        "1tcp://h",
        "tcp://h:port",
        "tcp://h:65536",
        "tcp://h:-1",
        "tcp://[::1",
        "tcp://::1]:5",
        "tcp://h:1?want_data",
        "tcp://h:1?want_data=1&&free_data=2",
        "shm:///\ud800",
    ],
)
def test_an_invalid_uri_is_refused(text: str) -> None:
    with pytest.raises(UriError):
        Uri.parse(text)


@pytest.mark.parametrize("scheme", ["", "TCP", "1tcp", "tcp:", "tcp\n", "é"])
def test_a_scheme_is_checked_where_a_uri_is_made(scheme: str) -> None:
    with pytest.raises(UriError, match="scheme"):
        Uri(scheme)


def test_a_path_after_a_host_starts_with_a_slash() -> None:
    with pytest.raises(UriError, match="slash"):
        Uri("tcp", "host", path="path")


def test_scheme_and_host_are_the_same_in_any_case() -> None:
    assert Uri.parse("TCP://Example.ORG:1?want_data=1") == Uri("tcp", "example.org", 1, want_data=1)


def test_want_data_is_required_only_to_request_a_stream() -> None:
    assert Uri.parse("tcp://h:1?want_data=0").require_want_data() == 0
    with pytest.raises(UriError, match=r"tcp://h:1' has no want_data"):
        Uri.parse("tcp://h:1").require_want_data()
    with pytest.raises(UriError, match=r"'grpc://h:1' is the URI of a catalog"):
        Uri.parse("grpc://h:1").require_want_data()


def test_uri_errors_are_ours_and_value_errors() -> None:
    assert issubclass(UriError, DissociatedError)
    assert issubclass(UriError, ValueError)


def test_with_parameters_adds_and_replaces_and_leaves_the_original() -> None:
    uri = Uri.parse("tcp://h:1?want_data=3&a=1&b=2")
    assert str(uri.with_parameters(b="3", c="x y")) == "tcp://h:1?want_data=3&a=1&b=3&c=x%20y"
    assert str(uri) == "tcp://h:1?want_data=3&a=1&b=2"


def test_a_uri_is_a_value() -> None:
    uri = Uri.parse("tcp://h:1?want_data=3&stream=bodies")
    assert uri == Uri.parse(str(uri))
    assert hash(uri) == hash(Uri.parse(str(uri)))
    assert uri != uri.with_parameters(stream="metadata")
    with pytest.raises(TypeError):
        uri.parameters["stream"] = "metadata"  # type: ignore[index]  # read-only


uint64 = st.integers(0, UINT64_MAX)
schemes = st.from_regex(r"[a-z][a-z0-9+.-]*", fullmatch=True)
hosts = st.from_regex(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", fullmatch=True) | st.ip_addresses(v=6).map(str)
own_names = st.text().filter(lambda name: name not in {"want_data", "free_data", "remote_handle"})
common = {
    "scheme": schemes,
    "want_data": st.none() | uint64,
    "free_data": st.none() | uint64,
    "remote_handle": st.none() | st.binary(),
    "parameters": st.dictionaries(own_names, st.text()),
}
uris = st.builds(
    Uri,
    host=hosts,
    port=st.none() | st.integers(0, 65535),
    path=st.just("") | st.text().map(lambda text: "/" + text),
    **common,
) | st.builds(Uri, path=st.text(), **common)


@given(uris)
def test_round_trip(uri: Uri) -> None:
    text = str(uri)
    assert text.isascii()
    assert Uri.parse(text) == uri


fragments = st.sampled_from(
    [
        "tcp:",
        "//",
        "[",
        "]",
        "::1",
        "@",
        ":",
        "?",
        "&",
        "=",
        "#",
        "%",
        "%ff",
        "%2F",
        "want_data=",
        "remote_handle=",
    ]
)
almost_uris = st.lists(fragments | st.text(st.characters(), max_size=3)).map("".join)


@given(almost_uris | almost_uris.map("tcp:".__add__))
@example("tcp://h/\ud800")
@example("ucx:?remote_handle=é")
def test_any_text_is_refused_as_a_uri_error_or_stable(text: str) -> None:
    try:
        uri = Uri.parse(text)
    except UriError:
        return
    assert Uri.parse(str(uri)) == uri
