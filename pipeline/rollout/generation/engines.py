"""Engines by name: `rollout.engine` alone chooses the engine.

A name is that of a module in this folder, or ``module:function`` of the user's; either gives an `EngineFactory`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pipeline.config import user_modules
from pipeline.errors import ConfigError
from pipeline.rollout.generation.interface import ResponseGenerator

_FACTORY = "new_engine"


class EngineFactory(Protocol):
    """A function that makes the engine of one worker.

    `rollout.engine` names it as ``module:function``.
    """

    def __call__(
        self, actor: Any, *, directory: Path, device: Any, on_progress: Callable[[], None]
    ) -> ResponseGenerator:
        """Make the engine.

        Args:
            actor: The worker's transformers model. Its tensors hold the current weights from the first
                `ResponseGenerator.update_weights` on. An engine may compute with it, or keep weights of its own.
            directory: The directory the actor was loaded from, for an engine that loads models itself.
            device: The worker's ``torch.device``.
            on_progress: The heartbeat, to be called once a token, or as often as there is progress: a worker without a
                call for `daemon.hang_timeout_s` is killed.

        Returns:
            The engine.
        """
        ...


def load_engine(
    name: str, actor: Any, *, directory: Path, device: Any, on_progress: Callable[[], None]
) -> ResponseGenerator:
    """Make the engine of a name for a worker.

    Args:
        name: A module of this folder, or ``module:function``.
        actor: As in `EngineFactory`, like the arguments below.
        directory: The actor's.
        device: The worker's.
        on_progress: The heartbeat.

    Returns:
        The engine.

    Raises:
        ConfigError: If there is no such module or function, or its result lacks a method of `ResponseGenerator`.
    """
    module_name, _, function_name = name.partition(":")
    if not function_name:
        module_name, function_name = f"{__package__}.{name}", _FACTORY
    try:
        module = importlib.import_module(module_name)
    # User code may raise any exception at import, and would again at the next start.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}{user_modules.not_found(error, module_name)}"
        raise ConfigError(f"rollout.engine: cannot import {module_name}: {problem}") from error
    factory = getattr(module, function_name, None)
    if not callable(factory):
        raise ConfigError(f"rollout.engine: {module_name} has no function {function_name}")
    engine: ResponseGenerator = factory(actor, directory=directory, device=device, on_progress=on_progress)
    for method in ("generate", "update_weights", "pause", "resume"):
        if not callable(getattr(engine, method, None)):
            raise ConfigError(f"rollout.engine: the {type(engine).__name__} of {name} has no method {method}")
    return engine
