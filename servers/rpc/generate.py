"""Regenerate the committed gRPC stubs: `python -m tailgate.servers.rpc.generate [OUT_DIR]`.

Needs the grpcio-tools that constraints.txt pins, old on purpose: generated code refuses to run on a grpcio or protobuf
older than its generator, so the pin sets the floors in pyproject.toml.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
PROTO_ROOT = PACKAGE.parent.parent / "proto"
PROTOS = ("tailgate/v1/inference", "tailgate/v1/telemetry", "inference/oip")


def generate(out_dir: Path) -> list[Path]:
    """Write the stubs of every proto into `out_dir`; returns their paths."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-I{PROTO_ROOT}"]
        arguments += [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        arguments += [str(PROTO_ROOT / f"{name}.proto") for name in PROTOS]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed")
        written = []
        for source in sorted(path for path in Path(scratch).rglob("*_pb2*") if path.is_file()):
            # protoc imports by proto package; our stubs live in tailgate.servers.rpc, where pickle finds their classes
            text = source.read_text()
            text = re.sub(r"from (?:tailgate\.v1|inference) import", "from tailgate.servers.rpc import", text)
            text = re.sub(r"'(?:tailgate\.v1|inference)\.(\w+_pb2)'", r"'tailgate.servers.rpc.\1'", text)
            target = out_dir / source.name
            target.write_text(text)
            written.append(target)
    return written


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE)
