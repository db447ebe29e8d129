"""Engines by name: `rollout.engine` alone chooses the engine.

A name is that of a module in this folder, or ``module:function`` of the user's; either gives an `EngineFactory`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.config import user_modules
from pipeline.errors import ConfigError
from pipeline.progress import Telemetry
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.interface import Engine, ResponseGenerator

if TYPE_CHECKING:
    from pipeline.config.schema import Config

_FACTORY = "new_engine"
_BLOCKING_METHODS = ("generate", "update_weights", "pause", "resume")
_STREAM_METHODS = ("submit", "step", "cancel", "update_weights", "pause", "resume", "close")


class EngineFactory(Protocol):
    """A function that makes the engine of one worker.

    `rollout.engine` names it as ``module:function``. A function that names `config` gets the instance's configuration
    as well, and one that names `telemetry` gets that in place of `on_progress`.
    """

    def __call__(
        self, actor: Any, *, directory: Path, device: Any, on_progress: Callable[[], None]
    ) -> ResponseGenerator | Engine:
        """Make the engine: a stream (`Engine`), or one whose calls block (`ResponseGenerator`).

        Args:
            actor: The worker's transformers model. Its tensors hold the current weights from the first
                `update_weights` on. An engine may compute with it, or keep weights of its own.
            directory: The directory the actor was loaded from, for an engine that loads models itself.
            device: The worker's ``torch.device``.
            on_progress: The heartbeat, to be called once a token, or as often as there is progress: a worker without a
                call for `daemon.hang_timeout_s` is killed.

        Returns:
            The engine.
        """
        ...


def load_engine(config: Config, actor: Any, device: Any, telemetry: Telemetry, begun: object = None) -> Engine:
    """Make the engine of a worker, `rollout.engine`; one whose calls block is behind a `BlockingEngine`.

    Args:
        config: The instance's; a factory that names it gets it.
        actor: As in `EngineFactory`, like `device`.
        device: The worker's.
        telemetry: Told of the engine's progress.
        begun: A process of the engine that has begun before the models were loaded, for a factory that takes it.

    Returns:
        The engine.

    Raises:
        ConfigError: If there is no such module or function, or its result lacks a method of `ResponseGenerator`, or
            with a method ``submit`` one of `Engine`, or with `rollout.sleep` one of `Sleeper`.
    """
    name = config.rollout.engine
    function_name = name if ":" in name else f"{__package__}.{name}:{_FACTORY}"
    factory = user_modules.load_function("rollout.engine", function_name)
    # By name alone: a factory that takes any keyword may pass them on to one that does not know these.
    named = inspect.signature(factory).parameters
    extra: dict[str, Any] = {"config": config} if "config" in named else {}
    extra |= {"telemetry": telemetry} if "telemetry" in named else {"on_progress": telemetry.progress}
    if begun is not None:
        extra["begun"] = begun
    engine: Any = factory(actor, directory=Path(config.model.actor), device=device, **extra)
    is_stream = callable(getattr(engine, "submit", None))
    needed = dict.fromkeys(_STREAM_METHODS if is_stream else _BLOCKING_METHODS, "rollout.engine")
    if config.rollout.sleep:
        needed |= dict.fromkeys(("sleep", "wake"), "rollout.sleep")
    for method, key in needed.items():
        if not callable(getattr(engine, method, None)):
            raise ConfigError(f"{key}: the {type(engine).__name__} of {name} has no method {method}")
    most_rows = config.rollout.inference_batch_size
    return engine if is_stream else BlockingEngine(engine, most_rows=most_rows, telemetry=telemetry)
