"""The start of an engine's process; vLLM itself is not needed."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.losses import engine_is_forked
from pipeline.config.schema import Config
from pipeline.rollout.generation.vllm import engine as engines
from pipeline.rollout.generation.vllm import process, wire

CARD: Any = SimpleNamespace(type="cuda")


@pytest.mark.parametrize(
    ("rollout", "buffer", "directories"),
    [
        ({"engine": "vllm"}, {}, ["model"]),
        ({"engine": "transformers"}, {}, []),
        # Begun before the turn on the card, it would not hold it.
        ({"engine": "vllm", "sleep": True, "cache_bytes": 1 << 20}, {"max_staleness": 0}, []),
    ],
)
def test_it_begins_before_the_models_unless_it_must_inherit_the_turn_on_the_card(
    rollout: dict[str, Any], buffer: dict[str, int], directories: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(engines, "refuse_unsuitable", lambda: None)
    monkeypatch.setattr(engines, "EngineProcess", lambda settings, **_: started.append(settings.directory))

    config = Config.model_validate({"model": {"actor": "model"}, "rollout": rollout, "buffer": buffer})
    engines.begin(config, CARD)

    assert started == directories


SLEEPS = {"sleep": True, "cache_bytes": 1 << 20}


@pytest.mark.parametrize(
    ("rollout", "is_forked"),
    [
        ({}, True),
        ({"engine": "transformers"}, False),
        ({"tensor_parallel": 2}, False),
        ({"deterministic": True}, False),
        (SLEEPS, False),
    ],
)
def test_an_engine_is_a_fork_where_it_begins_as_every_other_engine(rollout: dict[str, Any], is_forked: bool) -> None:
    buffer = {"max_staleness": 0} if rollout is SLEEPS else {}
    config = Config.model_validate(
        {"model": {"actor": "model"}, "rollout": {"engine": "vllm", **rollout}, "buffer": buffer}
    )
    assert engine_is_forked(config) == is_forked
    elsewhere = config.model_copy(update={"cluster": config.cluster.model_copy(update={"engine": "ray"})})
    assert not engine_is_forked(elsewhere)


def test_an_engine_is_executed_where_the_forkserver_dies_as_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "engines.sock"))
    listener.listen()
    send = socket.send_fds

    def dies_first(*message: Any) -> int:
        listener.close()
        return send(*message)

    executed: list[str] = []
    monkeypatch.setattr(socket, "send_fds", dies_first)
    monkeypatch.setattr(engines, "_executed", lambda theirs, settings, variables: executed.append(settings.title))
    settings = wire.Settings("model", "float32", True, 32, 4, 0, "error", False, "title")

    process = engines.EngineProcess(settings, forkserver=tmp_path / "engines.sock")

    process.link.close()
    assert executed == ["title"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("no file named model.safetensors"), "config"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "config"),
        (OSError(errno.EMFILE, "Too many open files"), "engine"),
        (OSError(errno.EADDRINUSE, "Address already in use"), "engine"),
        (ValueError("Free memory on device cuda:0 (27.94/74.51 GiB) on startup is less than desired"), "engine"),
        (AssertionError("Error in memory profiling. Initial free memory 20.0 GiB, current free memory 30.0"), "engine"),
        (ValueError("To serve at least one request, more KV cache is needed"), "config"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "engine"),
    ],
)
def test_what_the_machine_lacks_for_the_moment_is_a_reason_to_start_again(error: Exception, kind: str) -> None:
    """A configuration that cannot be ends the run, by whichever worker starts again."""
    assert process._refusal(error).kind == kind
