"""The official JavaScript clients of Connect, for tests: where they are, and what a page needs to import them."""

from __future__ import annotations

import json
import shutil
import subprocess
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import pytest
from google.rpc.error_details_pb2 import ErrorInfo

from midstream.codec.pb import inference_pb2 as pb

FOLDER = Path(__file__).parent / "js"
MODULES = FOLDER / "node_modules"
# What the clients make themselves of: the definition of the service, as protoc describes it.
DEFINITION = b64encode(pb.DESCRIPTOR.serialized_pb).decode()


def require_clients() -> None:
    """Skip, saying why, where they are not installed."""
    if not (MODULES / "@connectrpc" / "connect-web").is_dir():
        pytest.skip("the JavaScript clients are not installed (make js)")


def node(protocol: str, base: str, *calls: dict[str, Any]) -> list[dict[str, Any]]:
    """What came of each of these calls, made by a process of Node's."""
    require_clients()
    program = shutil.which("node") or pytest.skip("no node is installed")
    told = {"protocol": protocol, "base": base, "definition": DEFINITION, "calls": calls}
    done = subprocess.run(
        [program, FOLDER / "client.js", json.dumps(told)], check=False, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def reason(told: dict[str, Any]) -> str:
    """The reason in the google.rpc.ErrorInfo of an error."""
    for kind, data in told["details"]:
        if kind == ErrorInfo.DESCRIPTOR.full_name:
            return str(ErrorInfo.FromString(b64decode(data)).reason)
    return ""


def import_map(root: str) -> str:
    """A page's import map for Connect's packages that stand below this path as npm has laid them out."""
    imports = {}
    for manifest in (*MODULES.glob("@bufbuild/*/package.json"), *MODULES.glob("@connectrpc/*/package.json")):
        package = json.loads(manifest.read_text(encoding="utf-8"))
        for name, targets in package["exports"].items():
            target = targets["import"] if isinstance(targets, dict) else targets
            path = target["default"] if isinstance(target, dict) else target
            imports[package["name"] + name.removeprefix(".")] = f"{root}/{package['name']}/{path.removeprefix('./')}"
    return json.dumps({"imports": imports})
