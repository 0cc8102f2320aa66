"""Write the pages of docs/reference/ that are made from the code.

    python tools/reference.py           write them
    python tools/reference.py --check   exit with 1 when one is not what the code says

A setting or an exit code is declared once, in the code; these pages follow, and a test holds them to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from midstream.cli import exits
from midstream.server.settings import Settings, env_name, flag_name, shown

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
_GENERATED = "<!-- Made by tools/reference.py from {source}. Change that, then run `python tools/reference.py`. -->"

_SETTINGS_HEAD = """\
# Settings

What `midstream serve` and `midstream demo` can be told. A flag wins over its environment variable, and that over the
default. An environment variable that begins with `MIDSTREAM_` and is no setting is an error, so that a typing mistake
does not pass for a default. Several values stand in one variable with spaces between them; a flag is repeated.

Sizes are bytes, or `512KiB`, `8MiB`, `1GiB`. Times are seconds.
"""

_SETTINGS_FOOT = """\
## Other variables

Secrets are no flags of the gateway, since a flag shows in the list of processes.

| variable | meaning |
|---|---|
| `MIDSTREAM_UPSTREAM_KEY` | the key that is sent to every upstream |
| `MIDSTREAM_UPSTREAM_KEY_1`, `_2`, … | the key of one upstream, in the order of `--upstream`, instead of that |
| `MIDSTREAM_GATEWAY` | the gateway that the other commands (`generate`, `inspect`, `worker`) ask; `--gateway` wins |
| `MIDSTREAM_KEY` | the key that they send to it; `--key` wins |

A caller's key is never passed on to an upstream.
"""


def settings_page() -> str:
    """docs/reference/settings.md."""
    rows = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    rows += [_setting_row(setting) for setting in fields(Settings)]
    generated = _GENERATED.format(source="src/midstream/server/settings.py")
    return "\n".join([generated, _SETTINGS_HEAD, *rows, "", _SETTINGS_FOOT])


def _setting_row(setting: Field[Any]) -> str:
    more = setting.metadata
    flag = flag_name(setting) + (f" {more['metavar']}" if more["metavar"] else "")
    default = "" if setting.default in (None, (), False) else f"`{shown(setting.default)}`"
    return f"| `{flag}` | `{env_name(setting)}` | {default} | {_cell(more['help'])} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


_EXITS_HEAD = """\
# Exit codes

Of all `midstream` commands. What a command has to say about them goes to stderr; stdout holds data alone.
"""


def exits_page() -> str:
    """docs/reference/exit-codes.md."""
    rows = ["| code | meaning |", "|---|---|"]
    rows += [f"| {code} | {_cell(meaning)} |" for code, meaning in exits.MEANINGS.items()]
    generated = _GENERATED.format(source="src/midstream/cli/exits.py")
    return "\n".join([generated, _EXITS_HEAD, *rows, ""])


PAGES: dict[str, Callable[[], str]] = {"settings.md": settings_page, "exit-codes.md": exits_page}


def main(arguments: list[str]) -> int:
    stale = 0
    for name, page in PAGES.items():
        path, text = REFERENCE / name, page()
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is not what the code says; run python tools/reference.py", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
