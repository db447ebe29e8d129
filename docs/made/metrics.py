"""docs/metrics.md: the catalogue of metrics, from their declarations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from pipeline.telemetry.metrics import CONSERVATION, EACH, INFO, METRICS, OWN, Metric

_SECTIONS: Final = {
    "rlhfd_build_info": "The run and its processes",
    "rlhfd_prompts_total": "Throughput",
    "rlhfd_buffer_items": "The buffer",
    "rlhfd_items_sealed_total": "Where every row is",
    "rlhfd_policy_version": "Policy versions and weights",
    "rlhfd_reward": "Reward and learning",
    "rlhfd_shm_bytes": "Memory, GPUs and messages",
}
_INTRODUCTION: Final = """\
# Metrics

<!-- Made by `python -m docs.made`; checked by tests/project/test_made_pages.py. -->

Served at `/metrics` (`metrics.host`, `metrics.port`; 9477 on the loopback address), in Prometheus' text format or, if
the scraper requests it, in OpenMetrics. `rlhfd dashboards` writes a Prometheus configuration that works unchanged,
recording rules, alerts and a dashboard; docs/runbook.md has a section for each alert.

- Counters and histograms stay exact after a kill of any process, the supervisor included. They never fall while the
  arena is the same: a start that finds no arena begins at 0, as Prometheus expects.
- A gauge is removed with the process that wrote it; the time of an event stays. A series is absent, which is not 0,
  until its process is up.
- `role` is `supervisor`, `buffer`, `trainer` or `rollout`; `worker` is the rank of a trainer, the number of a rollout
  worker, and 0 for the other roles. `partition` is always 0.
- `rlhfd_process_time_seconds_total` holds the time of a process by activity; the activities add up to its wall time
  since its start. `start` is imports and models. `wait_data` is the wait of a worker for a ticket, of a trainer for a
  batch, of the buffer for messages. `wait_ticket_full`, `wait_ticket_staleness` and `wait_ticket_paused` are waits of
  a worker that `buffer.limit`, `buffer.max_staleness` and `rlhfd pause` hold back. With `rollout.sleep` a worker
  without a ticket is `asleep` while its engine sleeps; `wait_card` is the wait of a trainer until all engines sleep,
  and that of a worker with a ticket until no rank steps.
- A *ticket* permits a worker to roll out some prompts, with an *extent*: memory for their rows. A row is *sealed* once
  the buffer has recorded it, *ready* until a trainer holds it, *leased* in a batch that a trainer holds. A ticket is
  *settled* once its outcome is recorded. The *spool* has the rows that a stop leaves, for the next start.
- Always: `rlhfd_items_sealed_total` = `rlhfd_items_trained_total` + `sum(rlhfd_items_dropped_total)` +
  `rlhfd_buffer_items{state="ready"}` + `rlhfd_buffer_items{state="leased"}`. All of these are of one instant in each
  scrape. `rlhfd_items_unaccounted` is the difference.
"""


def page() -> str:
    """Return docs/metrics.md."""
    starts = [index for index, metric in enumerate(METRICS) if metric.name in _SECTIONS]
    parts = [_INTRODUCTION]
    for start, stop in itertools.pairwise([*starts, len(METRICS)]):
        title = _SECTIONS[METRICS[start].name]
        parts.append("\n".join([f"\n## {title}\n", *_table(METRICS[start:stop]), ""]))
    parts.append("\n".join(["\n## Buckets\n", *_buckets(), ""]))
    return "".join(parts)


def _table(metrics: Sequence[Metric]) -> Iterator[str]:
    yield "| metric | kind | labels | meaning | written by |"
    yield "|---|---|---|---|---|"
    for metric in metrics:
        labels = "<br>".join(_label(name, values) for name, values in metric.labels.items())
        yield f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} | {_owners(metric)} |"


def _label(name: str, values: tuple[str, ...]) -> str:
    if values in ((OWN,), (EACH,), ()):
        return f"`{name}`"
    return f"`{name}`: {', '.join(f'`{value}`' for value in values)}"


def _owners(metric: Metric) -> str:
    named = {CONSERVATION: "buffer", INFO: "supervisor"}
    return ", ".join(named.get(owner, owner) for owner in metric.owners)


def _buckets() -> Iterator[str]:
    yield "| upper bounds, and +Inf | of |"
    yield "|---|---|"
    families: dict[tuple[float, ...], list[str]] = {}
    for metric in METRICS:
        if metric.buckets:
            families.setdefault(metric.buckets, []).append(f"`{metric.name}`")
    for bounds, names in families.items():
        yield f"| {', '.join(f'{bound:g}' for bound in bounds)} | {', '.join(names)} |"
