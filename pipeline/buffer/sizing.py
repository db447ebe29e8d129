"""Sizes derived from a configuration: the bounds of the buffer, its ledger, and checks that they fit."""

from __future__ import annotations

from pipeline.buffer.admission import Limits
from pipeline.config.lengths import EXTENT_OVERHEAD_BYTES
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, counted
from pipeline.storage.layout import LedgerLayout
from pipeline.storage.tables import MOST_LEASES

_LEAST_EXTENTS = 256
_MOST_EXTENTS = 16384
_TYPICAL_ROW_BYTES = 256


def limits_of(config: Config, *, prompts_in_source: int = 0) -> Limits:
    """Return the bounds of the buffer under this configuration; `prompts_in_source`: prompts of one epoch, if known."""
    return Limits(
        sample_batch_size=config.sample_batch_size,
        rows_per_version=config.rows_per_version,
        group_size=config.group_size,
        prompts_per_ticket=config.prompts_per_ticket,
        max_staleness=config.buffer.max_staleness,
        limit_batches=config.buffer.limit,
        world_size=config.trainer.world_size,
        row_bytes=config.row_bytes,
        max_attempts=config.rollout.max_attempts,
        ticket_timeout_s=config.rollout.ticket_timeout_s,
        prompts_in_source=prompts_in_source,
        max_refill=config.rollout.max_refill,
    )


def capacity_items(config: Config) -> int:
    """Return the most rows that are reserved or ready at once: by the limit, or by the staleness bound."""
    staleness = (config.buffer.max_staleness + 1) * config.rows_per_version
    return min(config.buffer.limit * config.sample_batch_size, staleness) if config.buffer.limit else staleness


def ledger_layout(config: Config) -> LedgerLayout:
    """Return the layout of a ledger with a record for as many extents as the arena could hold of short rows.

    It does not depend on `buffer.row_bytes`: rows without images are short at any room for a row, and a run resumed
    with more room must find its ledger.
    """
    rows = config.prompts_per_ticket * config.group_size
    extents = config.buffer.arena_bytes // (rows * _TYPICAL_ROW_BYTES)
    return LedgerLayout(extents=min(max(extents, _LEAST_EXTENTS), _MOST_EXTENTS), rows_per_extent=rows)


def checked_layout(config: Config) -> LedgerLayout:
    """Return the ledger's layout for this configuration.

    Raises:
        ConfigError: If the arena is too small for the configured batches, or the ledger for tickets or leases.
    """
    refuse_sizes(config)
    return ledger_layout(config)


def refuse_sizes(config: Config) -> None:
    """Raise ConfigError if memory of these sizes cannot hold the configured batches, tickets or leases."""
    refuse_small_arena(config, limits_of(config))
    refuse_small_tickets(config)
    refuse_many_leases(config)


def refuse_small_arena(config: Config, limits: Limits) -> None:
    """Raise ConfigError if the arena cannot hold one batch for each rank and one more ticket."""
    rows = limits.sample_batch_size * limits.world_size + limits.prompts_per_ticket * limits.group_size
    needed_bytes = rows * limits.row_bytes + 2 * EXTENT_OVERHEAD_BYTES
    if config.buffer.arena_bytes < needed_bytes:
        given = config.buffer.row_bytes
        kind = f"of {config.lengths.row} tokens" if given is None else f"of buffer.row_bytes = {given:,} B"
        raise ConfigError(
            f"buffer.arena_bytes: {config.buffer.arena_bytes:,} B cannot hold a batch a rank and a ticket: "
            f"{rows} rows {kind} take up to {needed_bytes:,} B, {limits.row_bytes:,} B each; "
            f'arena_bytes = "{-(-needed_bytes >> 20)}MiB" is enough'
        )


def refuse_small_tickets(config: Config) -> None:
    """Raise ConfigError if a batch, or the rows of a version, would be more tickets than the ledger holds."""
    layout = ledger_layout(config)
    rows = layout.rows_per_extent
    # One transaction ends a batch. The built-in trainer holds all batches of a version until it is published.
    parts = [("a batch", config.sample_batch_size, layout.most_changed)]
    if config.trainer.kind == "builtin":
        parts.append(("what a version is trained on", config.rows_per_version, layout.extents))
    for part, part_rows, most in parts:
        if (tickets := -(-part_rows // rows)) > most:
            raise ConfigError(
                f"rollout.batch_size: {part}, {part_rows:,} rows, would be {tickets:,} tickets of "
                f"{counted(rows, 'row')}; the ledger has room for {most:,}: a larger rollout.batch_size makes fewer"
            )


def refuse_many_leases(config: Config) -> None:
    """Raise ConfigError if the ranks would hold more batches at once than the ledger has leases."""
    trainer = config.trainer
    leases = (trainer.gradient_accumulation_steps * trainer.publish_every + 1) * trainer.world_size
    if leases > MOST_LEASES:
        raise ConfigError(
            f"trainer.publish_every: {counted(trainer.world_size, 'rank')} would hold {leases:,} batches at once, "
            f"{trainer.gradient_accumulation_steps} x {trainer.publish_every} to a version; at most {MOST_LEASES:,}"
        )
