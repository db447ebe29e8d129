"""Folders of models without weights, for checks that read names, shapes and sizes alone; of modules; a certificate."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
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


def save_certificate(folder: Path) -> None:
    """Write cert.pem, for 127.0.0.1, and key.pem into a folder."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", "req", *options.split(), *names], check=True, capture_output=True, timeout=30)
    key.chmod(0o600)


@contextlib.contextmanager
def importable(folder: Path, **modules: str) -> Iterator[Path]:
    """Write modules into a folder; it is the current one, and on this process's path, until the end of the context."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    with contextlib.chdir(folder):
        sys.path.append(str(folder))
        yield folder
        sys.path.remove(str(folder))
