"""The cases in which vLLM is asked for batch invariance; vLLM itself is not needed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.progress import Telemetry
from pipeline.rollout.generation.vllm import engine as engines
from pipeline.rollout.generation.vllm import wire
from pipeline.runtime.link import Link


@pytest.mark.parametrize(
    ("wanted", "variable", "device", "capability", "invariant"),
    [
        (False, "0", "cuda", (9, 0), False),
        (True, "0", "cuda", (9, 0), True),
        (True, "0", "cuda", (8, 0), True),
        (True, "0", "cuda", (7, 5), False),
        (False, "1", "cuda", (9, 0), True),
        (True, "1", "cpu", None, False),
    ],
)
def test_batch_invariance_is_asked_for_where_it_is_wanted_and_there(
    wanted: bool,
    variable: str,
    device: str,
    capability: tuple[int, int] | None,
    invariant: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", variable)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(engines, "refuse_unsuitable", lambda: None)
    monkeypatch.setattr(engines, "VllmEngine", lambda settings, **_: settings)
    monkeypatch.setattr(engines, "EngineProcess", lambda settings, **_: SimpleNamespace(settings=settings))
    config = Config.model_validate({"rollout": {"engine": "vllm", "deterministic": wanted}})

    settings: Any = engines.new_engine(
        None, directory=Path("model"), device=SimpleNamespace(type=device), telemetry=Telemetry.none(), config=config
    )

    assert settings.batch_invariant is invariant


@pytest.mark.parametrize("invariant", [False, True])
def test_its_process_is_told_and_the_engine_is_deterministic_with_it_alone(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, str] = {}
    # As in a container beside a service that is called vllm, and where ModelScope is the hub.
    monkeypatch.setenv("VLLM_PORT", "tcp://10.96.0.7:8000")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")

    def start(command: list[str], *, pass_fds: list[int], env: dict[str, str], **_: Any) -> Any:
        told.update(env)
        with contextlib.closing(Link(socket.socket(fileno=os.dup(pass_fds[0])), wire.orders)) as link:
            link.send(wire.Ready(64, 32))
        return SimpleNamespace(pid=1, kill=lambda: None, wait=lambda _: 0)

    monkeypatch.setattr(subprocess, "Popen", start)
    settings = wire.Settings("model", "float32", True, 32, 4, 0, "error", False, "title", batch_invariant=invariant)

    with contextlib.closing(engines.VllmEngine(settings)) as engine:
        assert engine.deterministic is invariant

    assert told["VLLM_BATCH_INVARIANT"] == str(int(invariant))
    assert told["VLLM_USE_MODELSCOPE"] == "0" and "VLLM_PORT" not in told
