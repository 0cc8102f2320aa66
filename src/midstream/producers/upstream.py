"""What a gateway asks for answers: an upstream, or what stands in for one or in front of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from midstream.codec.openai import Route
from midstream.records import Fold, Producer


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """How long an upstream may take, in seconds.

    connect      name look-up, TCP and TLS
    first_token  from the request to the first chunk; comments do not count
    idle         between bytes of the body, comments among them
    total        the whole answer
    """

    connect: float = 5.0
    first_token: float = 300.0
    idle: float = 120.0
    total: float = 1800.0


class Direct(ABC):
    """A source that is asked at once, and takes any request, whoever asks and whatever stream it is for.

    (In the pool, which is the other kind, requests wait for a worker.)
    """

    abandon_after: float | None = None
    continues = False

    @abstractmethod
    def generate(self, body: Mapping[str, Any], route: Route, headers: Mapping[str, str] | None = None) -> Producer:
        """A generation for this request, not yet begun."""

    def ask(
        self, owner: str, body: Mapping[str, Any], route: Route, headers: Mapping[str, str] | None = None
    ) -> Callable[[str], Producer]:
        """What generates the answer, given the id of its stream."""
        return lambda _: self.generate(body, route, headers)

    async def proceed(
        self, owner: str, body: Mapping[str, Any], route: Route, stream_id: str, fold: Fold
    ) -> Producer | None:
        """Go on with a stream whose writer's process is gone: not here."""
        return None


class Upstream(Direct):
    """What answers for the models that `pattern`, a glob, matches (None: for every model)."""

    pattern: str | None

    @property
    @abstractmethod
    def name(self) -> str:
        """For messages."""

    def serves(self, model: str) -> bool:
        return self.pattern is None or fnmatchcase(model, self.pattern)

    @abstractmethod
    async def models(self) -> list[dict[str, Any]]:
        """The models it lists and its pattern matches, as it describes them.  Raises ProducerFailed."""
