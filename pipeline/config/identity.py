"""The identity of a run, and its folder; both follow from the configuration alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pipeline.config.schema import Config


def identity_of(config: Config) -> str:
    """Return a digest of the settings that identify a run: models, prompts, seed, algorithm and batches."""
    parts = (
        config.daemon.seed, config.model.model_dump_json(), config.prompts.model_dump_json(), config.rollout.algorithm,
        config.rollout.num_generations, config.lengths.row, config.sample_batch_size, config.prompts_per_ticket,
        config.trainer.world_size, config.trainer.kind, config.buffer.arena_bytes,
        *(() if config.lengths.response is None else (config.lengths.response,)),
    )  # fmt: skip
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def run_dir(config: Config) -> Path:
    """Return the folder of a run: checkpoints, spool, snapshot, samples, history, quarantine."""
    return config.daemon.state_dir
