"""The checkpoint that each recorded step is taken again from; no torch.

A step can be taken again from the newest checkpoint before it, or from the start of the run if there is none: with the
rows of each step from there on, which must have been taken with equal settings.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pydantic

from pipeline.config.losses import log_probs_by
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime.checkpoint_note import heads_in
from pipeline.storage.recording import Recording, TrainerStart

_WITHOUT_EFFECT = frozenset({
    "max_steps", "max_epochs", "save_every", "keep_checkpoints", "resume", "keep_state", "keep_state_every",
    "publish_every", "record", "devices", "sharding",
})  # fmt: skip
"""Keys of ``[trainer]`` that change no step of one rank."""


class Base(NamedTuple):
    """A checkpoint, or with `folder` None the models as the run began."""

    step: int
    folder: Path | None

    @property
    def name(self) -> str:
        """Name of the checkpoint, or ``"start"``."""
        return "start" if self.folder is None else self.folder.name


class Bases:
    """The checkpoints of a run that its recorded steps can be taken again from.

    Attributes:
        strange: Step and folder of each checkpoint that is not of the recorded steps.
    """

    def __init__(self, run: Path, recording: Recording) -> None:
        """Read the descriptions of the checkpoints; their files are not verified.

        Args:
            run: Folder of the run.
            recording: Recording of the run.
        """
        self._recording = recording
        self._settings: dict[int, dict[str, Any]] = {}
        self.strange: list[Base] = []
        self._found: list[tuple[Base, str]] = []
        for folder, head in heads_in(run / "checkpoints"):
            is_of_them = recording.passed(head.step, digest=head.digest, weights=head.fingerprint)
            if is_of_them:
                self._found.append((Base(head.step, folder), head.identity))
            else:
                self.strange.append(Base(head.step, folder))
        self._found.sort(key=lambda found: found[0].step, reverse=True)

    def before(self, step: int) -> Iterator[Base]:
        """Yield the checkpoints before a step, the newest first, then the start of the run."""
        start = self._recording.start_of(step)
        for base, identity in self._found:
            if base.step < step and start is not None and identity == start.identity:
                yield base
        yield Base(0, None)

    def of(self, step: int) -> Base | None:
        """Return the base of a step; None if rows after it are missing, or were not taken with equal settings."""
        base = next(self.before(step))
        return base if self._first_steps.get(step, step + 1) <= base.step + 1 else None

    def settings_of(self, step: int) -> dict[str, Any] | None:
        """Return the settings with which a step was taken, besides its rows; None if its start is missing.

        Raises:
            ConfigError: If the recorded configuration is not one of this release.
        """
        start = self._recording.start_of(step)
        if start is None:
            return None
        # A run has few starts, so a linear search is enough.
        if id(start) not in self._settings:
            self._settings[id(start)] = effective(config_of(self._recording, start))
        return self._settings[id(start)]

    @functools.cached_property
    def _first_steps(self) -> dict[int, int]:
        """For each step with rows the first of the steps before it that lack nothing."""
        first: dict[int, int] = {}
        for step in sorted(self._recording.steps):
            if self._recording.has_rows(step):
                first[step] = first[step - 1] if step - 1 in first and self._is_alike(step - 1, step) else step
        return first

    def _is_alike(self, step: int, other: int) -> bool:
        try:
            return self.settings_of(step) == self.settings_of(other)
        except ConfigError:
            return False


def config_of(recording: Recording, start: TrainerStart) -> Config:
    """Return the configuration of a recorded start.

    Raises:
        ConfigError: If it is not one of this release.
    """
    try:
        return Config.model_validate_json(msgspec.json.encode(start.config))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        told = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigError(f"{recording.folder}: its configuration is not one of this release: {told}") from error


def effective(config: Config) -> dict[str, Any]:
    """Return the settings that a step depends on, besides its rows."""
    rollout = config.rollout
    return {
        "model": config.model.model_dump(),
        "trainer": config.trainer.model_dump(exclude=set(_WITHOUT_EFFECT)),
        "kl_coef": config.trainer_kl_coef,
        # A share of max_steps is a part of it.
        "learning rate": config.trainer.decay,
        "rollout": (rollout.algorithm, rollout.temperature, log_probs_by(config), config.advantages, config.lengths),
    }
