"""Folders of models without weights that can be used: for checks that read names, shapes and sizes alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def save_shell(folder: Path, **config: Any) -> Path:
    """Make a folder with a config.json of these keys, a tokenizer's file and one tensor; return the folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    header = json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))
    return folder
