"""How long a worker waits for what, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.wire import POOL_LEASE_TERM


@dataclass(frozen=True, slots=True)
class Times:
    """The defaults are a worker's at home; a test has less patience.

    gather       that tokens gather before they are posted
    alive        of a silent model, after which a post without tokens goes out
    pop          between two pops that found nothing
    most         between two tries, once several have failed; also the longest that a pool's Retry-After is obeyed
    post         for the answer to a post, which is small and soon repeated
    answer       for any other answer of the pool's
    lease        that a post is tried for: after that its lease has gone, and with it whoever would take the post
    submit       that an answer is handed in for: it is the work of minutes
    fresh        that a local server which has answered is taken to be there, without another look
    busy         that a local server may say it has no room
    idle         that a local server may take to become idle once it was stopped
    look         between two looks whether it is
    give_back    for jobs to be given back when the worker ends
    """

    gather: float = 0.1
    alive: float = 0.5
    pop: float = 1.0
    most: float = 30.0
    post: float = 10.0
    answer: float = 30.0
    lease: float = float(POOL_LEASE_TERM)
    submit: float = 600.0
    fresh: float = 10.0
    busy: float = 30.0
    idle: float = 30.0
    look: float = 0.1
    give_back: float = 5.0
