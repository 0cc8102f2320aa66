"""The body of one upstream response, from its bytes to chunks, without I/O.

What it is, is told by its first bytes: servers and the proxies before them lie about content types, whereas an event
stream cannot begin with `{` and a JSON completion or a web page cannot begin with anything else than `{` and `<`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from midstream.codec.openai import ChatReader
from midstream.codec.sse import Decoder, EventTooLarge
from midstream.codec.upstream_errors import malformed
from midstream.errors import ProducerFailed
from midstream.records import Chunk, Finish

_BOM: Final = b"\xef\xbb\xbf"
_GZIP_MAGIC: Final = b"\x1f\x8b"
_INFLATE_STEP: Final = 64 * 1024


class Body:
    """Feed it bytes, take chunks, then ask for the end.

    `failure` is what has gone wrong: the chunks returned until then are good and come first.  `spoken` once there has
    been a chunk; `complete` once the answer is whole, though `[DONE]` may follow; `done` when nothing can follow.
    """

    __slots__ = (
        "_content_type",
        "_decoder",
        "_events",
        "_head",
        "_inflate",
        "_max",
        "_reader",
        "_streams",
        "_whole",
        "_whole_size",
        "failure",
        "spoken",
    )

    def __init__(self, reader: ChatReader, inflate: Inflate | None, content_type: str, max_event_bytes: int) -> None:
        self.failure: ProducerFailed | None = None
        self.spoken = False
        self._reader = reader
        self._inflate = inflate
        self._content_type = content_type
        self._max = max_event_bytes
        self._decoder = Decoder(max_event_bytes)
        self._streams = False
        self._events = False
        self._head = b""
        self._whole: list[bytes] | None = None
        self._whole_size = 0

    @property
    def compressed(self) -> bool:
        return self._inflate is not None

    @property
    def complete(self) -> bool:
        return self._reader.complete

    @property
    def done(self) -> bool:
        return self._reader.done

    def take(self, data: bytes) -> list[Chunk]:
        """The chunks that these bytes complete, with none after the `failure` they may hold."""
        chunks: list[Chunk] = []
        try:
            if self._inflate is None:
                self._take(data, chunks)
            else:
                for piece in self._inflate.feed(data):
                    self._take(piece, chunks)
        except ProducerFailed as failure:
            self.failure = failure
        if chunks:
            self.spoken = True
        return chunks

    def end(self) -> tuple[list[Chunk], Finish]:
        """The body has ended, as it should or not: the last chunks, and how the generation finished.

        Raises ProducerFailed: `upstream_truncated` where the answer is not whole, `upstream_malformed` where it never
        was an answer.
        """
        chunks: list[Chunk] = []
        if self._whole is not None:
            chunks = self._read_whole(b"".join(self._whole))
        elif not self._reader.done:
            self._take_unterminated(chunks)
        if not (self._reader.done or self._reader.complete):
            self._explain()
        return chunks, self._reader.finish()

    def _take(self, data: bytes, chunks: list[Chunk]) -> None:
        if not self._streams:
            data = self._begin(data)
        read = self._reader.read
        try:
            events = self._decoder.feed(data)
        except EventTooLarge as error:
            for event in error.events:
                chunks += read(event.data, event.event)
            raise _too_large(self._max) from None
        if events:
            self._events = True
        for event in events:
            chunks += read(event.data, event.event)

    def _begin(self, data: bytes) -> bytes:
        """Find out what the body is; return what there is for the decoder."""
        if self._whole is not None:
            self._keep(data)
            return b""
        head = self._head + data
        if _BOM.startswith(head):
            self._head = head
            return b""
        text = head.removeprefix(_BOM).lstrip()
        if not text:
            self._head = b" "  # something has come: what comes now is no byte order mark
            return b""
        if text.startswith(b"<"):
            raise malformed(f"the upstream answered with a web page (Content-Type {self._content_type or 'absent'})")
        if text.startswith(b"{"):
            self._whole = []
            self._keep(text)
            return b""
        self._streams = True
        return text

    def _keep(self, data: bytes) -> None:
        assert self._whole is not None
        self._whole.append(data)
        self._whole_size += len(data)
        if self._whole_size > self._max:
            raise _too_large(self._max)

    def _read_whole(self, body: bytes) -> list[Chunk]:
        try:
            return self._reader.read_whole(body)
        except ProducerFailed as failure:
            # JSON that does not parse and ends nowhere was cut; `}` at its end means that it is broken.
            if failure.failure == "upstream_malformed" and not body.rstrip().endswith(b"}"):
                raise _truncated("the upstream's answer, a JSON object, ended in its middle") from None
            raise

    def _take_unterminated(self, chunks: list[Chunk]) -> None:
        """Read a last event that lacks its blank line, if it is whole: no beginning of a JSON object, or of [DONE], is
        one itself, so what can be read was not cut."""
        for event in Decoder(self._max).feed(self._decoder.close() + b"\n\n"):
            try:
                chunks += self._reader.read(event.data, event.event)
            except ProducerFailed as failure:
                if failure.failure != "upstream_malformed":
                    raise

    def _explain(self) -> None:
        if not self._streams and self._whole is None:
            raise _truncated("the upstream answered with an empty body")
        if not self._events and "event-stream" not in self._content_type:
            kind = self._content_type or "absent"
            raise malformed(f"the upstream's answer (Content-Type {kind}) is no event stream and no completion")


class Inflate:
    """Undoes a Content-Encoding that was not asked for, in bounded steps.

    Raises ProducerFailed (`upstream_malformed`): for an encoding it does not know, and from `feed` for broken data.
    """

    def __init__(self, encoding: str) -> None:
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise malformed(f"the upstream answered in Content-Encoding {encoding[:40]!r}, which was not asked for")
        self._gzip = encoding != "deflate"
        self._head = b""
        self._inflater = zlib.decompressobj(wbits=31) if self._gzip else None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The plain bytes, in pieces of at most 64 KiB, made as they are asked for."""
        while data:
            if self._inflater is None:
                data = self._begin(data)
                continue
            try:
                piece = self._inflater.decompress(data, _INFLATE_STEP)
            except zlib.error:
                raise malformed("the upstream's compressed answer is broken") from None
            data = self._inflater.unconsumed_tail
            if self._inflater.eof:
                data, self._inflater = self._inflater.unused_data, None
            if piece:
                yield piece

    def _begin(self, data: bytes) -> bytes:
        """Look at the two bytes that tell what follows; return what is to be inflated."""
        head = self._head + data
        if len(head) < 2:
            self._head = head
            return b""
        self._head = b""
        if not self._gzip:
            # Servers disagree on whether `deflate` has zlib's header (RFC 1950, section 2.2), as it should.
            has_header = head[0] & 0x0F == 8 and int.from_bytes(head[:2]) % 31 == 0
            self._inflater = zlib.decompressobj(wbits=15 if has_header else -15)
            return head
        if head.startswith(_GZIP_MAGIC):  # one more member
            self._inflater = zlib.decompressobj(wbits=31)
            return head
        return b""  # padding


def _truncated(message: str) -> ProducerFailed:
    return ProducerFailed("upstream_truncated", message)


def _too_large(limit: int) -> ProducerFailed:
    return ProducerFailed("upstream_too_large", f"the upstream sent more than {limit} bytes as one event")
