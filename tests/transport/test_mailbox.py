from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dissociated.errors import ConnectionClosed, DeadlineExceeded, RemoteError
from dissociated.transport.mailbox import Mailbox
from support.helpers import PATIENCE

SOON = 0.01  # seconds in which nothing may happen


def test_items_come_in_order() -> None:
    box: Mailbox[str] = Mailbox(100)
    for item in "abc":
        box.put(item, 30, SOON)
    assert len(box) == 3
    assert [box.get(SOON) for _ in "abc"] == ["a", "b", "c"]


def test_all_items_can_be_taken_at_once() -> None:
    box: Mailbox[str] = Mailbox(100)
    for item in "ab":
        box.put(item, 50, SOON)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(box.put, "c", 100, PATIENCE)
        assert box.get_all(PATIENCE) == ["a", "b"]
        waiting.result(PATIENCE)
    box.close(RemoteError("the reason"))
    assert box.get_all(SOON) == ["c"]
    with pytest.raises(RemoteError, match="the reason"):
        box.get_all(SOON)


def test_a_full_box_waits_until_there_is_room_again() -> None:
    box: Mailbox[str] = Mailbox(100)
    box.put("first", 60, SOON)
    with pytest.raises(DeadlineExceeded, match="took nothing"):
        box.put("second", 41, SOON)
    box.put("exact", 40, SOON)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(box.put, "second", 60, PATIENCE)
        assert box.get(PATIENCE) == "first"
        waiting.result(PATIENCE)
    assert [box.get(SOON), box.get(SOON)] == ["exact", "second"]


def test_an_item_larger_than_the_box_goes_in_alone() -> None:
    box: Mailbox[str] = Mailbox(100)
    box.put("large", 1000, SOON)
    with pytest.raises(DeadlineExceeded):
        box.put("small", 0, SOON)
    assert box.get(SOON) == "large"
    box.put("small", 0, SOON)
    assert box.get(SOON) == "small"


def test_an_empty_box_waits_for_an_item() -> None:
    box: Mailbox[str] = Mailbox(100)
    with pytest.raises(DeadlineExceeded, match="was silent"):
        box.get(SOON)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(box.get, PATIENCE)
        box.put("late", 1, SOON)
        assert waiting.result(PATIENCE) == "late"


def test_a_closed_box_gives_what_it_has_and_takes_no_more() -> None:
    box: Mailbox[str] = Mailbox(100)
    box.put("last", 1, SOON)
    box.close()
    with pytest.raises(ConnectionClosed):
        box.put("more", 1, SOON)
    assert [box.get(SOON), box.get(SOON), box.get(SOON)] == ["last", None, None]


def test_an_error_comes_after_what_is_there_and_stays() -> None:
    box: Mailbox[str] = Mailbox(100)
    box.put("last", 1, SOON)
    box.close(RemoteError("the reason"))
    box.close(RemoteError("a later one"))
    assert box.get(SOON) == "last"
    for _ in range(2):
        with pytest.raises(RemoteError, match="the reason"):
            box.get(SOON)


@pytest.mark.parametrize("full", [False, True])
def test_closing_wakes_whoever_waits(full: bool) -> None:
    box: Mailbox[str] = Mailbox(1)
    if full:
        box.put("x", 1, SOON)
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        if full:
            with pytest.raises(ConnectionClosed):
                box.put("y", 1, None)
        else:
            assert box.get(PATIENCE) is None

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert begun.wait(PATIENCE)
        box.close()
        waiting.result(PATIENCE)
