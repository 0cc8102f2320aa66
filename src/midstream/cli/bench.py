"""Measure what a dropped connection costs: asking again (retry) against going on (resume).

It starts a gateway of its own, and the demo's small real model behind it, or puts the gateway in front of your
--upstream. A reader is cut off after so many tokens. By retry it asks again from the start, the old generation being
stopped; by resume it goes on in the same stream, at the next token.

The table goes to stdout, everything else to stderr. Where the model says the same each time (temperature 0), it is
checked that resume inferred exactly as many tokens fewer as the reader already had, and that the text is the same byte
for byte; else the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from midstream.cli import exits
from midstream.cli.bench_figures import Attempt, document, rows, table, violations
from midstream.cli.gateway import code_of
from midstream.cli.terminal import Interrupted
from midstream.client import Client, Patience
from midstream.errors import MidstreamError

if TYPE_CHECKING:
    from midstream.cli.bench_measure import Bench
    from midstream.cli.bench_relay import Relay

TRANSPORTS: Final = ("sse", "ws", "grpc")
SCRIPTED: Final = "scripted:"
PROMPT: Final = "Write a long story about a lighthouse keeper who finds a message in a bottle."
# Tokens of the answer after the last cut, so that there is something left to read.
_REST: Final = 112
_PLOTS: Final = (".png", ".svg")
# What is measured is one cut; a second, that nobody meant, must fail it and not be mended.
_IMPATIENT: Final = Patience(attempts=1, unreached=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drop-after",
        type=_positions,
        default=(50, 200, 400),
        metavar="N,…",
        help="cut after so many tokens (50,200,400)",
    )
    parser.add_argument("--runs", type=_positive, default=1, metavar="N", help="runs of each; medians are shown (1)")
    parser.add_argument("--transport", choices=TRANSPORTS, default="sse", help="what is cut (sse)")
    parser.add_argument("--journal", default="memory:", metavar="URL", help="of the gateway (memory:)")
    parser.add_argument("--gap", type=_seconds, default=0.1, metavar="S", help="from the cut to the return (0.1)")
    asked = parser.add_argument_group("the model")
    asked.add_argument(
        "--upstream", metavar="URL", help="ask this one instead of the demo's; scripted: is a simulation"
    )
    asked.add_argument("--model", help="the model's name (the upstream's first)")
    asked.add_argument("--prompt", default=PROMPT, metavar="TEXT", help="what to ask (for a long story)")
    asked.add_argument("--max-tokens", type=_positive, metavar="N", help=f"end answers here (the last cut + {_REST})")
    asked.add_argument(
        "--temperature", type=_seconds, default=0.0, metavar="T", help="above 0 each answer is another (0)"
    )
    asked.add_argument("--seed", type=int, default=1, metavar="N", help="sent along (1)")
    asked.add_argument("--rate", type=_seconds, default=50.0, metavar="N", help="tokens per second of scripted: (50)")
    kept = parser.add_argument_group("to keep")
    kept.add_argument("--json", type=Path, metavar="FILE", help="each run and the medians")
    kept.add_argument("--plot", type=Path, metavar="FILE", help="draw FILE.png and FILE.svg (needs the extra `bench`)")


def _positions(text: str) -> tuple[int, ...]:
    return tuple(sorted({_positive(part.strip()) for part in text.split(",")}))


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 up")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 up")
    return value


def run(args: argparse.Namespace) -> int:
    """Measure, and print the table; returns an exit code of `exits`."""
    reason = _senseless(args)
    if reason is not None:
        say(f"midstream bench: {reason}")
        return exits.USAGE
    try:
        measured = _Measurement(args).run()
        print(table(rows(measured.attempts)), end="", flush=True)
        return _report(args, measured)
    except Interrupted as signalled:
        return signalled.code
    except BrokenPipeError:
        # Or Python fails again when it flushes what is left.
        sys.stdout = None
        return exits.BROKEN_PIPE
    except OSError as error:
        say(f"midstream bench: {error}")
        return exits.OUTPUT_FAILED
    except MidstreamError as error:
        say(f"midstream bench: {error}")
        return code_of(error)


def _senseless(args: argparse.Namespace) -> str | None:
    """What can be told before anything is started."""
    if args.max_tokens is not None and args.max_tokens < args.drop_after[-1]:
        return f"--max-tokens {args.max_tokens} ends the answer before the cut at {args.drop_after[-1]}"
    if args.plot is not None:
        from midstream.cli import bench_plot

        return bench_plot.missing()
    return None


@dataclass(frozen=True, slots=True)
class _Measured:
    """`failure`: why it ended early; what had been measured by then is here all the same."""

    about: dict[str, Any]
    attempts: list[Attempt]
    failure: str | None


def _report(args: argparse.Namespace, measured: _Measured) -> int:
    """Judge, write the files, and say what it means."""
    deterministic = args.temperature == 0
    pairs = measured.attempts[: len(measured.attempts) // 2 * 2]
    wrong = violations(pairs, deterministic=deterministic)
    if measured.failure is not None:
        wrong.append(measured.failure)
    if args.json is not None:
        args.json.write_bytes(
            orjson.dumps(document(measured.about, measured.attempts, wrong), option=orjson.OPT_INDENT_2)
        )
    if args.plot is not None and pairs:
        from midstream.cli import bench_plot

        for suffix in _PLOTS:
            bench_plot.draw(rows(pairs), measured.about, args.plot.with_suffix(suffix))
    for sentence in wrong:
        say(f"WRONG: {sentence}")
    if not wrong:
        say(_verdict(pairs, deterministic=deterministic))
    return exits.FAILED if wrong else exits.OK


def _verdict(attempts: list[Attempt], *, deterministic: bool) -> str:
    if deterministic:
        return "checked: resume inferred exactly as many tokens fewer as the reader had; every text is identical"
    lengths = sorted({attempt.length for attempt in attempts})
    return (
        "checked: every resumed text is that of its stream, and nothing was inferred again. "
        f"This model samples: a retry is another answer, so its text differs, lengths ({lengths[0]} to {lengths[-1]} "
        "tokens) and times to the end differ by chance, and so do the tokens inferred"
    )


class _Measurement:
    """One run of the verb, up to the figures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._limit = args.max_tokens or args.drop_after[-1] + _REST
        self._attempts: list[Attempt] = []
        self._about: dict[str, Any] = {}

    def run(self) -> _Measured:
        return asyncio.run(self._until_terminated())

    async def _until_terminated(self) -> _Measured:
        """Raises Interrupted on SIGTERM, once gateway and model have ended, and with them the thread that measures."""
        task = asyncio.create_task(self._run())
        terminated = False

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        try:
            return await task
        except asyncio.CancelledError:
            if terminated:
                raise Interrupted(signal.SIGTERM) from None
            raise

    async def _run(self) -> _Measured:
        from midstream.cli.bench_gateway import GatewayFailed, GatewayProcess
        from midstream.cli.bench_measure import BenchFailed
        from midstream.cli.model import ModelUnavailable

        failure = None
        try:
            async with self._upstream() as (upstream, relay), GatewayProcess(upstream, self._args.journal) as gateway:
                await asyncio.to_thread(self._measure, self._bench(gateway.url, gateway.grpc, relay))
                self._doubt(relay)
        except BenchFailed as error:
            failure = str(error)
        except ModelUnavailable as error:
            failure = f"no model: {error} Name one with --upstream, or measure a simulation with --upstream {SCRIPTED}"
        except GatewayFailed as error:
            failure = f"the gateway did not start: {error}"
        return _Measured(self._about, self._attempts, failure)

    @contextlib.asynccontextmanager
    async def _upstream(self) -> AsyncIterator[tuple[str, Relay | None]]:
        """What the gateway is put in front of, for as long as this context, and what counts there."""
        import aiohttp

        from midstream.cli.bench_measure import BenchFailed
        from midstream.cli.bench_relay import Relay
        from midstream.cli.model import Model

        args = self._args
        if args.upstream == SCRIPTED:
            say("a scripted SIMULATION answers: no model is running")
            yield SCRIPTED, None
            return
        fields = {"max_tokens": self._limit, "temperature": args.temperature, "seed": args.seed}
        async with contextlib.AsyncExitStack() as stack:
            url = args.upstream
            if url is None:
                say("starting the model (SmolLM2-135M, one thread) …")
                url = (await stack.enter_async_context(Model())).url
            relay = await stack.enter_async_context(Relay(url, fields))
            try:
                await relay.reach()
            except (aiohttp.ClientError, ValueError) as error:
                raise BenchFailed(f"the upstream cannot be reached: {error}") from None
            yield relay.url, relay

    def _bench(self, url: str, grpc: str, relay: Relay | None) -> Bench:
        from midstream.cli.bench_measure import AtTheUpstream, Bench, InTheJournal

        args, desk = self._args, Client(url, patience=_IMPATIENT)
        reader = Client(url, patience=_IMPATIENT, transport=args.transport, grpc=grpc)
        model = args.model
        if relay is None:
            model = f"scripted-n{self._limit}-r{args.rate:g}"
        counter = InTheJournal(desk) if relay is None else AtTheUpstream(relay.written)
        self._about = {
            "model": model or "smollm2" if args.upstream is None else model,
            "upstream": args.upstream or "the demo's model",
            "transport": args.transport,
            "journal": args.journal.partition(":")[0],
            "runs": args.runs,
            "gap": args.gap,
            "temperature": args.temperature,
            "prompt": args.prompt,
        }
        return Bench(reader, desk, counter, args.prompt, model, args.gap)

    def _measure(self, bench: Bench) -> None:
        from midstream.cli.bench_measure import BenchFailed

        deterministic = self._args.temperature == 0
        began = time.perf_counter()
        reference = bench.whole()
        length = len(reference.tokens)
        took = time.perf_counter() - began
        self._about["length"] = length
        say(f"an answer that nobody cuts: {length} tokens in {took:.1f} s")
        out_of_reach = [drop for drop in self._args.drop_after if drop > length]
        for drop, run in self._plan(length):
            say(f"dropped after {drop}{f', run {run}' if self._args.runs > 1 else ''} …")
            self._attempts.append(bench.retry(drop, reference.text))
            self._attempts.append(bench.resume(drop, reference.text if deterministic else None))
        if out_of_reach:
            raise BenchFailed(
                f"the model ended its answer after {length} tokens: it cannot be cut after "
                f"{', '.join(map(str, out_of_reach))}; ask for something longer with --prompt"
            )

    def _plan(self, length: int) -> Iterator[tuple[int, int]]:
        for run in range(1, self._args.runs + 1):
            for drop in self._args.drop_after:
                if drop <= length:
                    yield drop, run

    def _doubt(self, relay: Relay | None) -> None:
        """What is counted are chunks, which most upstreams send for each token."""
        whole = [answer for answer in relay.written if answer.usage is not None] if relay is not None else []
        odd = [answer for answer in whole if answer.usage is not None and abs(answer.usage - answer.chunks) > 1]
        if odd:
            say(f"this upstream sends {odd[0].chunks} chunks for {odd[0].usage} tokens: `tokens` here are chunks")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
