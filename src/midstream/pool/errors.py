"""Every refusal of the pool, one class each.

    PoolError
    ├── for all: PoolUnavailable · InvalidAPIKey · BadPoolRequest (its leaves: what a field may not hold)
    ├── for requesters: UnknownRequest · TooManyPrompts
    ├── for workers: InvalidJob (NoLease) · WrongCredentials (WrongKey) · DuplicateGeneration · ProgressOutOfSequence
    │                ProgressTooLarge
    └── for operators, at the start: PoolUnusable

`rc` is stable and public: existing workers and clients act on it, and on the status; on `message` too in one case (see
DuplicateGeneration).  `facts` stand beside both in the body: `{"message": …, "rc": …, **facts}`.  An own tree and not
`midstream.errors`: these bodies and codes are another protocol's (PROTOCOL.md, "Pool").
"""

from __future__ import annotations

from typing import Any, ClassVar


class PoolError(Exception):
    """Base of all.  `status` is the HTTP status; `message` is for people; `retry_after` is in seconds, where waiting
    helps.
    """

    rc: ClassVar[str] = "InternalServerError"
    status: ClassVar[int] = 500
    text: ClassVar[str] = "the pool failed"
    retry_after: ClassVar[int | None] = None

    def __init__(self, message: str = "", **facts: Any) -> None:
        self.message = message or self.text
        self.facts = facts
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """What is sent."""
        return {"message": self.message, "rc": self.rc, **self.facts}


class PoolUnavailable(PoolError):
    """The database or the lease store does not answer; the same request may be sent again."""

    rc = "StoreUnavailable"
    status = 503
    text = "the pool's store does not answer; try again"
    retry_after = 1


class PoolUnusable(PoolError):
    """At start: the database cannot be reached, is not the pool's, or a newer version's.  The text is for operators."""


class InvalidAPIKey(PoolError):
    """No such key."""

    rc = "InvalidAPIKey"
    status = 401
    text = "no user has this API key"


class BadPoolRequest(PoolError):
    """A body or a field is not what the route takes."""

    rc = "BadRequest"
    status = 400
    text = "the request is not what this route takes"


class MissingPrompt(BadPoolRequest):
    """Nothing to generate from."""

    rc = "MissingPrompt"
    text = "give a prompt"


class TokenOverflow(BadPoolRequest):
    """`max_length` above `max_context_length`."""

    rc = "TokenOverflow"
    text = "max_length must not be more than max_context_length"


class MissingFullSamplerOrder(BadPoolRequest):
    """A `sampler_order` that leaves samplers out."""

    rc = "MissingFullSamplerOrder"
    text = "sampler_order must name all seven samplers"


class TooManyStopSequences(BadPoolRequest):
    """More stop sequences than a worker is asked to watch for."""

    rc = "TooManyStopSequences"
    text = "give at most 128 stop sequences"


class ExcessiveStopSequence(BadPoolRequest):
    """A stop sequence that is too long."""

    rc = "ExcessiveStopSequence"
    text = "a stop sequence must not be over 2000 characters"


class NulByteInPayload(BadPoolRequest):
    """A NUL character, which PostgreSQL cannot store."""

    rc = "NulByteInPayload"
    text = "the payload holds a NUL byte"


class UnknownRequest(PoolError):
    """No request of this id, or no longer."""

    rc = "RequestNotFound"
    status = 404
    text = "no such request, or it is gone"


class TooManyPrompts(PoolError):
    """The owner waits for as many generations as one may.  Facts: `limit`."""

    rc = "TooManyPrompts"
    status = 429
    text = "you wait for too many generations already"
    retry_after = 5


class InvalidJob(PoolError):
    """A generation that is not leased any more, or never was: existing workers drop the job at this."""

    rc = "InvalidJobID"
    status = 404
    text = "no such job is leased to a worker; it may have run out or been cancelled"


class NoLease(InvalidJob):
    """A post for a generation without a lease."""


class WrongCredentials(PoolError):
    """The generation is another owner's."""

    rc = "WrongCredentials"
    status = 403
    text = "this job is not leased to a worker of this key"


class WrongKey(WrongCredentials):
    """A post with another key than the one the lease was granted to."""


class DuplicateGeneration(PoolError):
    """A second submit.  An existing worker repeats anything for ever that does not say "already submitted"."""

    rc = "DuplicateGen"
    status = 400
    text = "this generation was already submitted"


class ProgressOutOfSequence(PoolError):
    """Not the next batch, or the last one's number with other content.  Facts: `expected`."""

    rc = "ChatProgressOutOfSequence"
    status = 409

    def __init__(self, expected: int) -> None:
        super().__init__(f"the next batch has seq {expected}", expected=expected)
        self.expected = expected


class ProgressTooLarge(PoolError):
    """More batches or bytes than the job may have.  The lease is renewed all the same: the reply can still come."""

    rc = "ChatProgressTooLarge"
    status = 413
    text = "the job's progress is over its bounds; go on and submit the reply"
