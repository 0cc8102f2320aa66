"""Write src/midstream/codec/pb/ from proto/inference.proto.

    python tools/proto.py               write it
    python tools/proto.py --check       exit with 1 when what is there is not what the definition says

Needs grpcio-tools and Connect's two plugins for protoc, which the development environment has.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
GENERATED = ROOT / "src" / "midstream" / "codec" / "pb"
_PLUGINS = ("py", "connectrpc")


def generate(into: Path) -> None:
    """Run protoc.  Raises subprocess.CalledProcessError."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'proto'}"]
    command += [f"--python_out={into}", f"--pyi_out={into}"]
    for plugin in _PLUGINS:
        command += [f"--plugin=protoc-gen-{plugin}={Path(sys.executable).parent / f'protoc-gen-{plugin}'}"]
        command += [f"--{plugin}_out={into}"]
    subprocess.run([*command, "inference.proto"], check=True)


def stale() -> list[str]:
    """The names of generated files that are missing, are not what protoc writes, or should not be there."""
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        made = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    there = {path.name: path.read_bytes() for path in GENERATED.glob("inference_*") if path.is_file()}
    return sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))


def main(arguments: list[str]) -> int:
    if "--check" not in arguments:
        generate(GENERATED)
        return 0
    wrong = stale()
    for name in wrong:
        print(f"{GENERATED / name} is not what proto/inference.proto says; run make proto", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
