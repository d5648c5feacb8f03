"""The JSON Schema of an experiment's TOML file, for editors: `python -m loadtests.experiments.schema FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from loadtests.experiments.model import Experiment


class _Untitled(GenerateJsonSchema):
    """Without titles of fields, which repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> str:
    """Return the schema of what a file may hold. Whether all of it fits together, `tailgate run` says."""
    schema = Experiment.model_json_schema(mode="validation", schema_generator=_Untitled)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:tailgate:schema:experiment"}
    return json.dumps(head | schema, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json_schema(), encoding="utf-8")
