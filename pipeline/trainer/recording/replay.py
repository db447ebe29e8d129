"""Recorded steps, taken again in this process: from a checkpoint, or from the models as the run began.

The steps after the checkpoint are taken on their recorded rows. On the same device, with the same libraries, each gives
the recorded digests bit for bit; the first difference ends the replay, unless the step is wanted under pdb.
"""

from __future__ import annotations

import logging
import pdb
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from pipeline.config.identity import identity_of
from pipeline.config.schema import Config
from pipeline.errors import CheckpointError, ConfigError, counted
from pipeline.experience.saved_rows import batches_of
from pipeline.models.device import device_name, process_device
from pipeline.models.loading import load_tokenizer
from pipeline.models.lora import published
from pipeline.models.weights.slot_copy import Slot, combined
from pipeline.models.weights.store import bytes_of_slot, flatten
from pipeline.models.weights.tensor_specs import tensor_specs, tensor_views
from pipeline.prompts.rendering import first_tokens
from pipeline.runtime.checkpoint_note import read_note as read_checkpoint
from pipeline.runtime.checkpoint_note import verify
from pipeline.runtime.run_folder import read_note
from pipeline.storage.recording import Recording, TrainerStart, recording_of
from pipeline.trainer.checkpoints import load_whole
from pipeline.trainer.learner import Learner
from pipeline.trainer.process import new_learner, whole_models
from pipeline.trainer.recording.bases import Base, Bases, config_of
from pipeline.trainer.recording.recorder import versions
from pipeline.trainer.state import Progress, digest_after, progress_of, tensors_of
from pipeline.trainer.step_log import line_of

log = logging.getLogger(__name__)


class Replayed(NamedTuple):
    """A step that was taken again.

    Attributes:
        step: The step.
        weights: Fingerprint of its weights, in hexadecimal.
        experiences: Digest of all experience up to and including it, in hexadecimal.
        recorded_weights: The recorded fingerprint; empty if its weights were not published.
        recorded_experiences: The recorded digest.
    """

    step: int
    weights: str
    experiences: str
    recorded_weights: str
    recorded_experiences: str

    @property
    def differences(self) -> list[str]:
        """The digests that are not the recorded ones; empty if all are."""
        found = []
        if self.experiences != self.recorded_experiences:
            found.append(f"experiences={self.experiences}, recorded {self.recorded_experiences}")
        if self.recorded_weights and self.weights != self.recorded_weights:
            found.append(f"weights={self.weights}, recorded {self.recorded_weights}")
        return found


class Replay:
    """The replay of one step of a run.

    Attributes:
        config: The configuration with which the step was taken.
        base: Step of the checkpoint that it begins from; 0 for the models as the run began.
        start: The recorded start of the trainer that took the step.
        device: Device of the models.
    """

    def __init__(self, run: Path, step: int, device: str = "") -> None:
        """Find the recorded step, the checkpoint before it, and the rows of the steps between them.

        Args:
            run: Folder of the run.
            step: The step to take again.
            device: Device of the models; empty for a device of the kind on which the step was taken.

        Raises:
            ConfigError: If the recording is missing, of another run, or lacks something that the step needs.
        """
        self._recording = recording_of(run)
        self._step = step
        if step not in self._recording.steps:
            raise ConfigError(f"step {step} is not recorded: {_range_of(self._recording)}")
        start = self._recording.start_of(step)
        if start is None:
            raise ConfigError(f"{self._recording.folder}: the start of the trainer that took step {step} is missing")
        self.start = start
        self.device = _device(device or ("cpu" if start.device == "cpu" else ""))
        self.config = config_of(self._recording, start)
        if (note := read_note(run)) is None:
            raise ConfigError(f"{run / 'run.json'} is missing, which tells whether the recording is of this run")
        if not note.identity == start.identity == identity_of(self.config):
            raise ConfigError(f"{self._recording.folder} is of another run: its models, prompts, seed or batches are "
                              f"not those of {run / 'run.json'}")  # fmt: skip
        bases = Bases(run, self._recording)
        found = self._usable(bases)
        self._checkpoint, self.base = found.folder, found.step
        self._refuse_what_is_missing(bases)

    @property
    def begin(self) -> str:
        """The checkpoint that it begins from, in words."""
        return "the start of the run" if self._checkpoint is None else f"checkpoint {self._checkpoint.name}"

    def steps(self, *, debug: bool = False) -> Iterator[Replayed]:
        """Take the steps again, from the one after the checkpoint to the wanted one, unless that is left in pdb.

        Args:
            debug: Whether to take the wanted step under pdb, which stops at its first line.

        Yields:
            First the weights that it begins from, if they are recorded; then each step.

        Raises:
            CheckpointError: If the checkpoint cannot be read.
            ConfigError: If a model cannot be loaded.
            DecodeError: If recorded rows are damaged.
        """
        config, device = self.config, self.device
        models, learner = _new(config, device)
        progress = Progress()
        if self._checkpoint is not None:
            state = tensors_of(learner, progress)
            load_whole(self._checkpoint, config, models, state)
            progress = progress_of(state)
        learner.step, digest = progress.step, progress.digest
        if self.base in self._recording.weights:
            yield self._compared(self.base, models, learner, digest)
        for step in range(self.base + 1, self._step + 1):
            batches = batches_of(self._recording, step)
            digest = digest_after(digest, batches)
            if not (debug and step == self._step):
                learner.update(batches)
            # pdb returns None where it is left within the step: by `q` or the end of its input.
            elif pdb.runcall(learner.update, batches) is None:
                return
            yield self._compared(step, models, learner, digest)

    def hints(self, step: int) -> list[str]:
        """Return the differences between the trainer that took a step and this process: they may explain others."""
        start = self._recording.start_of(max(step, 1))
        return hints_of(start or self.start, self.device)

    def _compared(self, step: int, models: dict[str, torch.nn.Module], learner: Learner, digest: int) -> Replayed:
        experiences = f"{digest:016x}"
        weights, taken = self._recording.weights.get(step), self._recording.steps.get(step)
        return Replayed(
            step,
            fingerprint_of(models, learner.published()),
            experiences,
            "" if weights is None else weights.weights,
            # The step before the first one has no line.
            experiences if taken is None else taken.experiences,
        )

    def _usable(self, bases: Bases) -> Base:
        for strange in bases.strange:
            if strange.step < self._step:
                log.warning("a checkpoint is not of the recorded steps, trying the one before it: %s", strange.folder)
        for base in bases.before(self._step):
            if base.folder is None:
                return base
            try:
                verify(base.folder, read_checkpoint(base.folder))
            except CheckpointError as error:
                log.warning("a checkpoint cannot be used, trying the one before it: %s", error)
                continue
            return base
        raise AssertionError("the start of the run is the last base")

    def _refuse_what_is_missing(self, bases: Bases) -> None:
        recording = self._recording
        needed = range(self.base + 1, self._step + 1)
        lacking = [step for step in needed if not recording.has_rows(step)]
        if lacking:
            step = lacking[0]
            raise ConfigError(
                f"step {self._step} cannot be replayed: the newest usable checkpoint before it is {self.begin}, and "
                f"{len(lacking)} of the steps from there on lack their rows, first step {step}: "
                f"{_why_without_rows(recording, step)}"
            )
        wanted = bases.settings_of(self._step)
        for step in reversed(needed):
            if bases.settings_of(step) != wanted:
                raise ConfigError(
                    f"step {self._step} cannot be replayed from {self.begin}: step {step} was taken with other "
                    "settings of [model], [rollout] or [trainer], and there is no checkpoint "
                    "after it; trainer.keep_checkpoints keeps more of them"
                )


def report(run: Path, step: int, device: str, *, debug: bool, write: Callable[[str], object]) -> bool:
    """Replay a step, a line for each step on the way.

    Args:
        run: Folder of the run.
        step: The step.
        device: Device of the models; empty for a device of the kind on which the step was taken.
        debug: Whether to take the step under pdb, also after a difference.
        write: Called with each line.

    Returns:
        Whether all digests that were compared are the recorded ones.

    Raises:
        ConfigError: If something that the step needs is missing, or of another run.
        DecodeError: If recorded rows are damaged.
    """
    replay = Replay(run, step, device)
    write(f"step {step} from {replay.begin}, on {device_name(replay.device)}")
    reached: int | None = None
    is_equal = True
    for found in replay.steps(debug=debug):
        reached = found.step
        digests = f"step {found.step}: weights={found.weights} experiences={found.experiences}"
        if not found.differences:
            published = "" if found.recorded_weights else ", weights were not published"
            write(f"{digests}: equal to the recorded ones{published}")
            continue
        write(f"{digests}: differs, {'; '.join(found.differences)}")
        if is_equal:
            for hint in replay.hints(found.step):
                write(f"  {hint}")
        is_equal = False
        if not debug:
            return False
    if reached != step:
        write(f"step {step}: left in the debugger, nothing is compared")
    return is_equal


def train(config: Config, run: Path, device: str, *, write: Callable[[str], object]) -> None:
    """Train the models of a configuration on all recorded rows of a run, a line of statistics for each step.

    Args:
        config: The configuration. Advantages were computed with the rows: its algorithm and its advantages must be
            those of the run; its sampling, rewards, buffer and number of steps are not used.
        run: Folder of the run.
        device: Device of the models; empty for the process's.
        write: Called with the line of each step, JSON as in ``metrics.jsonl`` without the means over its rows; its
            ``step`` is the recorded one.

    Raises:
        ConfigError: If there is no recording or no row in it, its rows are of another algorithm or have other
            advantages, or a model cannot be loaded.
        DecodeError: If recorded rows are damaged.
        FieldError: If the rows lack a field that the configuration's algorithm needs.
        OSError: If rows cannot be read.
    """
    recording, own = recording_of(run), _device(device)
    kept = [step for step in sorted(recording.steps) if recording.has_rows(step)]
    if not kept:
        raise ConfigError(f'no rows are recorded in {recording.folder}: trainer.record = "rows" keeps them')
    _refuse_other_rows(config, recording, kept)
    if kept != list(range(1, len(kept) + 1)):
        log.warning("the models train from their start on, without the rows of all steps: first=%d last=%d kept=%d",
                    kept[0], kept[-1], len(kept))  # fmt: skip
    _, learner = _new(config, own)
    for step in kept:
        stats = learner.update(batches_of(recording, step))
        write(line_of(step, stats, time.time()).decode().rstrip())


def _refuse_other_rows(config: Config, recording: Recording, kept: list[int]) -> None:
    starts = {id(start): start for step in kept if (start := recording.start_of(step)) is not None}
    for start in starts.values():
        recorded = config_of(recording, start)
        for key, there, here in (
            ("rollout.algorithm", recorded.rollout.algorithm, config.rollout.algorithm),
            ("rollout.advantages", recorded.advantages, config.advantages),
        ):
            if there != here:
                raise ConfigError(f"{key}: {here}, the recorded rows are of {there}: "
                                  "their advantages were computed with them")  # fmt: skip


def hints_of(start: TrainerStart, device: torch.device) -> list[str]:
    """Return the differences between the recorded start and this process that may explain other digests."""
    here = {**versions(), "device": device_name(device)}
    there = {**start.libraries, "device": start.device}
    return [f"{name} is {here.get(name)} here, {there[name]} there" for name in there if here.get(name) != there[name]]


def fingerprint_of(models: dict[str, torch.nn.Module], beside: Mapping[str, torch.Tensor]) -> str:
    """Return the fingerprint under which these models, and tensors beside them, would be published, in hexadecimal."""
    critic = models.get("critic")
    tensors = flatten(actor=published(models["actor"]), critic=None if critic is None else critic.state_dict())
    tensors |= beside
    specs = tensor_specs(tensors)
    memory = memoryview(bytearray(bytes_of_slot(specs)))
    return f"{combined(Slot(memory, tensor_views(memory, specs)).write(tensors)):016x}"


def _device(name: str) -> torch.device:
    if not name:
        return process_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: neither cpu nor cuda:N")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"--device {name}: this process can use {counted(count, 'GPU')}")
    return device


def _new(config: Config, device: torch.device) -> tuple[dict[str, torch.nn.Module], Learner]:
    """Return the models and the learner of a run at its start, as its trainer makes them."""
    torch.set_num_threads(config.trainer.threads)
    models = whole_models(config, device)
    tokens = first_tokens(config.prompts, config.daemon.seed, load_tokenizer(config.model.actor))
    return models, new_learner(config, models, tokens, device)


def _why_without_rows(recording: Recording, step: int) -> str:
    if step not in recording.steps:
        return "it is not recorded"
    if not recording.steps[step].nbytes:
        return 'its rows were not kept: trainer.record = "rows" keeps them, unless the log tells of a failure'
    if recording.rows_path(step).is_file():
        return "the file of its rows is not whole, as after a power failure"
    return "its rows were removed for newer ones: raise trainer.keep_checkpoints for a later checkpoint before the step"


def _range_of(recording: Recording) -> str:
    if not recording.steps:
        return "no step is"
    first, last = min(recording.steps), max(recording.steps)
    lost = last + 1 - first - len(recording.steps)
    return f"steps {first} to {last} are" + (f", but for {lost:,} of them" if lost else "")
