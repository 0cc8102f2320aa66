"""The names of a store's keys, and how a stream's numbers come back from it.

    P:{T}:stream:ID     hash     what a stream is, and its numbers
    P:{T}:log:ID        stream   its records: an entry holds one batch, its id is the seq of the batch's last record
    P:{T}:fold:ID       string   what is kept of dropped records, as JSON
    P:{T}:holds:ID      hash     process -> the lowest position of its readers, and until when that counts
    P:{T}:owner:OWNER   zset     an owner's streams by when they were created
    P:{T}:open          hash     open stream -> the process that writes it
    P:{T}:ended         zset     ended streams by when they expire
    P:{T}:bytes         string   what the streams of this tag hold together
    P:{T}:lease:PROCESS string   there while the process is alive (on one server under tag 0 only)
    P:{T}:wake          channel  who changed which stream
    P:{T}:wake:PROCESS  channel  who did something to which stream that this process writes
    P:name:NAME         string   the stream a name is bound to; `?ID` while it is reserved

P is the prefix and T one of 64 hash tags, found from the stream's id.  All keys of a stream carry one tag: a cluster
then keeps them on one server, where one script can change them together and publish to the channel of the same tag.
Every key expires by itself, some time after the last stream it is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import orjson

from midstream.errors import StoreLost
from midstream.records import StreamMeta, StreamState
from midstream.wire import Status

SHARDS = 64


def shard_of(stream_id: str) -> int:
    """The number of a stream's hash tag and of its channel."""
    return crc32(stream_id.encode()) % SHARDS


class StreamKeys(NamedTuple):
    """What every script about one stream is given, in this order."""

    stream: bytes
    log: bytes
    total: bytes
    fold: bytes
    holds: bytes
    owned: bytes
    open: bytes
    ended: bytes


class Space:
    """The keys under one prefix.  `clustered`: keys of different tags may lie on different servers."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode()
        self.clustered = False

    def _key(self, shard: int, kind: bytes, rest: str = "") -> bytes:
        tail = b":" + rest.encode() if rest else b""
        return b"%b:{%d}:%b%b" % (self.prefix, shard, kind, tail)

    def of_stream(self, stream_id: str, owner: str) -> StreamKeys:
        shard = shard_of(stream_id)
        return StreamKeys(
            stream=self.numbers(stream_id),
            log=self.log(stream_id),
            total=self.total(shard),
            fold=self._key(shard, b"fold", stream_id),
            holds=self._key(shard, b"holds", stream_id),
            owned=self.owned(shard, owner),
            open=self.open(shard),
            ended=self.ended(shard),
        )

    def numbers(self, stream_id: str) -> bytes:
        return self._key(shard_of(stream_id), b"stream", stream_id)

    def log(self, stream_id: str) -> bytes:
        return self._key(shard_of(stream_id), b"log", stream_id)

    def owned(self, shard: int, owner: str) -> bytes:
        return self._key(shard, b"owner", owner)

    def open(self, shard: int) -> bytes:
        return self._key(shard, b"open")

    def ended(self, shard: int) -> bytes:
        return self._key(shard, b"ended")

    def total(self, shard: int) -> bytes:
        return self._key(shard, b"bytes")

    def channel(self, shard: int) -> bytes:
        return self._key(shard, b"wake")

    def mailbox(self, shard: int, process: str) -> bytes:
        """The channel on which a process hears what others do to streams that it writes."""
        return self._key(shard, b"wake", process)

    def shard_of_channel(self, channel: bytes) -> int:
        """Also of a mailbox."""
        return int(channel[len(self.prefix) + 2 : channel.rindex(b"}")])

    def name(self, name: str) -> bytes:
        return b"%b:name:%b" % (self.prefix, name.encode())

    def lease_shards(self) -> range:
        """A script may ask for a process's lease only where its own keys are: on a cluster there is one per tag."""
        return range(SHARDS) if self.clustered else range(1)

    def lease(self, shard: int, process: str) -> bytes:
        return self._key(shard if self.clustered else 0, b"lease", process)


# The fields of a stream's hash that change, in the order in which `Numbers` has them.
FIELDS = (
    "status",
    "epoch",
    "highest",
    "oldest",
    "acked",
    "trimmed",
    "bytes",
    "fold",
    "access",
    "ended",
    "writer",
    "run",
)
FIXED = ("meta", "request")


class Numbers(NamedTuple):
    """What a stream's hash holds that changes.  `held` is the bytes of its records and `fold` those of its fold; `run`
    is the server's run id when the writer last knew that nothing was lost.
    """

    status: Status
    epoch: int
    highest: int
    oldest: int
    acked: int
    trimmed: int
    held: int
    fold: int
    access: float
    ended: float | None
    writer: str
    run: str

    @classmethod
    def of(cls, told: Sequence[Any]) -> Numbers:
        """From the values of FIELDS.  Raises StoreLost when one is missing or is no number."""
        try:
            status, epoch, highest, oldest, acked, trimmed, held, fold, access, ended, writer, run = told
            return cls(
                status.decode(),
                int(epoch),
                int(highest),
                int(oldest),
                int(acked),
                int(trimmed),
                int(held),
                int(fold),
                float(access),
                float(ended) if ended else None,
                writer.decode(),
                run.decode(),
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreLost(f"the store has lost a part of a stream's numbers: {error}") from error

    def state(self, meta: StreamMeta) -> StreamState:
        return StreamState(
            meta=meta,
            status=self.status,
            epoch=self.epoch,
            highest_seq=self.highest,
            oldest_retained_seq=self.oldest,
            acked_seq=self.acked,
            trimmed_seq=self.trimmed,
            retained_bytes=self.held,
            last_access=self.access,
            ended_at=self.ended,
        )


def encode_meta(meta: StreamMeta, names: Sequence[str]) -> bytes:
    """What never changes of a stream, but for its id, which is in the key, and its request, which may be large."""
    return orjson.dumps(
        {
            "owner": meta.owner,
            "model": meta.model,
            "created_at": meta.created_at,
            "retain": meta.retain,
            "abandon_after": meta.abandon_after,
            "names": list(names),
        }
    )


def decode_meta(stream_id: str, told: bytes | None, request: bytes | None) -> tuple[StreamMeta, tuple[str, ...]]:
    """The stream and its names.  Raises StoreLost."""
    try:
        if told is None or request is None:
            raise ValueError("no such field")
        fields = orjson.loads(told)
        names = tuple(fields.pop("names"))
        return StreamMeta(stream_id=stream_id, request=request, **fields), names
    except (ValueError, TypeError, KeyError) as error:
        raise StoreLost(f"the store has lost what {stream_id} is: {error}") from error
