"""Engines by name: what stands at the seam is chosen by `rollout.engine` alone.

A name is that of a module in this folder, or ``module:function`` of one's own; either gives an `EngineFactory`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import ConfigError
from pipeline.rollout.generation.interface import ResponseGenerator

_FACTORY = "new_engine"


class EngineFactory(Protocol):
    """What makes an engine for one worker."""

    def __call__(
        self, actor: Any, *, directory: Path, device: Any, on_progress: Callable[[], None]
    ) -> ResponseGenerator:
        """Make the engine.

        Args:
            actor: The worker's transformers model, whose tensors hold the weights in force from the first
                `ResponseGenerator.update_weights` on. An engine may compute with it, or keep weights of its own.
            directory: Where the actor was loaded from, for an engine that loads models itself.
            device: The worker's.
            on_progress: To be called once a token, or as often as there is a sign of life: calls that cease for
                `daemon.hang_timeout_s` get the worker killed.
        """
        ...


def load_engine(
    name: str, actor: Any, *, directory: Path, device: Any, on_progress: Callable[[], None]
) -> ResponseGenerator:
    """Make the engine of that name for a worker; arguments as in `EngineFactory`.

    Raises:
        ConfigError: If there is none, or what is there is no engine.
    """
    module_name, _, function_name = name.partition(":")
    if not function_name:
        module_name, function_name = f"{__package__}.{name}", _FACTORY
    try:
        module = importlib.import_module(module_name)
    # Somebody else's code may raise anything while it is imported, and would again at the next start.
    except Exception as error:
        raise ConfigError(f"rollout.engine: cannot import {module_name}: {type(error).__name__}: {error}") from error
    factory = getattr(module, function_name, None)
    if not callable(factory):
        raise ConfigError(f"rollout.engine: {module_name} has no function {function_name}")
    engine: ResponseGenerator = factory(actor, directory=directory, device=device, on_progress=on_progress)
    for method in ("generate", "update_weights", "pause", "resume"):
        if not callable(getattr(engine, method, None)):
            raise ConfigError(f"rollout.engine: the {type(engine).__name__} of {name} has no method {method}")
    return engine
