"""The stream to a process of the daemon's own: what it said before it ended is heard, whatever came in between."""

from __future__ import annotations

import socket

from hpkv_daemon.link import Link


def test_the_last_words_are_heard_also_after_something_could_not_be_said_any_more() -> None:
    ours, theirs = socket.socketpair()
    link, other = Link(ours), Link(theirs)
    other.send(["dying", 0, "why"])
    other.close()
    link.send(["ping", 0])
    assert link.flush()
    assert list(link.receive()) == [["dying", 0, "why"]]
    assert list(link.receive()) == []
    assert link.closed
    link.close()


def test_what_was_not_read_by_one_that_ended_is_no_reason_to_hear_less() -> None:
    ours, theirs = socket.socketpair()
    link, other = Link(ours), Link(theirs)
    link.send(["ping", 0])
    other.send(["dying", 0, "why"])
    other.close()
    link.send(["ping", 1])
    assert list(link.receive()) == [["dying", 0, "why"]]
    assert link.closed
    link.close()
