"""Writes each document that is made of the code, the JSON schema of `rlhfd config schema` included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from docs.made import coming_from, configuration, metrics
from pipeline.config.json_schema import schema

DOCUMENTS: Final = {
    "coming-from.md": coming_from.page,
    "config.schema.json": lambda: json.dumps(schema(), indent=2) + "\n",
    "configuration.md": configuration.page,
    "metrics.md": metrics.page,
}

if __name__ == "__main__":
    for name, content in DOCUMENTS.items():
        Path(__file__).parents[1].joinpath(name).write_text(content())
