"""`tailgate list`: the built-in experiments."""

from __future__ import annotations

from tailgate.loadtests.commands.options import Json
from tailgate.loadtests.experiments.files import builtin_names, description
from tailgate.servers import stdout

EXAMPLES = """\
  tailgate list
  tailgate list --json | jq -r '.experiments[].name'"""


def command(as_json: Json = False) -> int:
    """List the built-in experiments.

    `tailgate run`, `check`, `parity`, `frontier` and `ramp` take these names in place of a file.
    """
    rows = [(name, description(name)) for name in builtin_names()]
    document = {"experiments": [{"name": name, "description": text} for name, text in rows]}
    words = [*stdout.aligned(rows), "", "Run one with `tailgate run NAME`; `tailgate init` writes one of your own."]
    stdout.write("\n".join(words), document, as_json=as_json)
    return 0
