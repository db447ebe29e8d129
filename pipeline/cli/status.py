"""`rlhfd status`: the state of an instance as text."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from pipeline.errors import counted
from pipeline.supervisor import diagnosis
from pipeline.supervisor.live import evaluation_text

_COLUMNS = ("process", "pid", "state", "restarts", "up", "memory", "devices", "last exit")


def render(status: Mapping[str, Any]) -> str:
    """Return the answer of a running instance as text: progress and warnings first, then the details.

    Args:
        status: The supervisor's answer; a missing value shows as a dash.

    Returns:
        Several lines.
    """
    buffer = status.get("buffer") or {}
    run = {
        "state": f"{_shown(status, 'state')}, up {duration(status.get('uptime_s'))}",
        "step": f"{_shown(status, 'step')}{_of(status.get('max_steps'))}{_left(status)}",
        "reward": f"{_number(status, 'reward_mean', '.4f')} {_trend(status)}".rstrip(),
        "learning": _learning(status.get("learning") or {}),
        "held out": evaluation_text(evaluation) if (evaluation := status.get("evaluation")) else "",
        "best": str((status.get("evaluation") or {}).get("best") or ""),
        "speed": f"{_number(status, 'tokens_per_s', ',.0f')} tokens/s{_pace(status)}",
        "now": str(status.get("why") or ""),
        "ATTENTION": "; ".join(warnings(status)),
        "buffer": ", ".join(f"{_shown(buffer, f'{state}_items')} {state}" for state in ("ready", "leased", "reserved"))
        + f"; arena {size(buffer.get('used_bytes'))} of {size(buffer.get('capacity_bytes'))}{_share(buffer)}",
        "staleness": f"{_number(status, 'staleness_mean_versions', '.2f')} versions, "
        f"policy version {_shown(status, 'policy_version')}",
        "rollouts": "; ".join(
            f"{_name(process)}: {in_work}"
            for process in status.get("processes") or []
            if (in_work := progress(process))
        ),
        "engines": "; ".join(
            f"{_name(process)}: {in_hand}{_speed(process['engine'])}"
            for process in status.get("processes") or []
            if (in_hand := engine(process))
        ),
        "rows": f"{_shown(buffer, 'sealed')} sealed, {_shown(buffer, 'trained')} trained, {_dropped(buffer)} dropped",
        "model": f"{_shown(status, 'model')}, {_shown(status, 'algorithm')}{_ranks(status)}",
        "cluster": _cluster(status.get("cluster") or {}),
        "checkpoint": _shown(status, "checkpoint"),
        "run": f"{_shown(status, 'run')}, id {_shown(status, 'run_id')}",
        "daemon": f"pid {_shown(status, 'pid')}, configured by {_shown(status, 'config')}",
        "metrics": _shown(status, "metrics_url"),
    }
    lines = [f"{name:<11}{text}" for name, text in run.items() if text]
    if processes := status.get("processes"):
        lines += ["", *table(_COLUMNS, [_process_row(process) for process in processes])]
    return "\n".join(lines)


def warnings(status: Mapping[str, Any]) -> list[str]:
    """Return the facts that need an operator's attention, the worst first; usually none."""
    buffer, processes = status.get("buffer") or {}, status.get("processes") or []
    found = []
    if buffer.get("unaccounted"):
        found.append(f"{counted(buffer['unaccounted'], 'row is', 'rows are')} unaccounted for, please report this")
    found += [f"{_name(process)} has failed" for process in processes if process.get("state") == "failed"]
    found += [f"{_name(process)} has left" for process in processes if process.get("state") == "left"]
    restarted = [process for process in processes if process.get("restarts") and process.get("state") != "failed"]
    found += [f"{_name(process)} was started again {_times(process['restarts'])}" for process in restarted]
    quarantined = (buffer.get("dropped") or {}).get("quarantined")
    if quarantined:
        found.append(counted(quarantined, "row is in quarantine", "rows are in quarantine"))
    if pending := status.get("needs_restart"):
        found.append(f"changed, needs a restart: {', '.join(pending)}")
    return found


def _cluster(cluster: Mapping[str, Any]) -> str:
    """Return the nodes of a cluster and the actors on them as text; empty without one."""
    if not cluster:
        return ""
    nodes, left, actors = cluster.get("nodes") or [], cluster.get("left") or [], cluster.get("actors") or {}
    gone = f", {len(left):,} left: {', '.join(left[:3])}{', ...' if len(left) > 3 else ''}" if left else ""
    waiting = f", {counted(actors['pending'], 'waits', 'wait')} for a node" if actors.get("pending") else ""
    return f"{counted(len(nodes), 'node')}{gone}; actors: {actors.get('placed') or 0:,} placed{waiting}"


def _ranks(status: Mapping[str, Any]) -> str:
    ranks = status.get("ranks")
    if not isinstance(ranks, int) or ranks < 2:
        return ""
    held = "shards of it" if status.get("sharding") in ("full", "hybrid") else "all of it each"
    return f", {ranks} trainer ranks with {held}"


def _name(process: Mapping[str, Any]) -> str:
    return f"{_shown(process, 'role')} {_shown(process, 'index')}"


def progress(process: Mapping[str, Any]) -> str:
    """Return the progress of a worker's present stage as text, such as ``12 of 128 rows, 3,412 tokens``; or nothing."""
    done = process.get("progress")
    if not done:
        return ""
    tokens = f", {_shown(done, 'tokens')} tokens" if done.get("tokens") else ""
    return f"{_shown(done, 'rows_done')} of {_shown(done, 'rows')} rows{tokens}"


def engine(process: Mapping[str, Any]) -> str:
    """Return the work in hand of a worker's engine, such as ``32 run, 8 wait, cache 97 %``; or nothing."""
    found = process.get("engine")
    if not found:
        return ""
    cache, lost = found.get("cache_ratio") or 0.0, found.get("preemptions") or 0
    parts = [f"{_shown(found, 'running')} run", f"{_shown(found, 'waiting')} wait"]
    parts += [f"cache {cache * 100:.0f} %"] if cache else []
    parts += [f"{lost:,} preempted"] if lost else []
    return ", ".join(parts)


def _speed(found: Mapping[str, Any]) -> str:
    hits = found.get("prefix_hit_ratio")
    prefix = f", prefix hits {hits * 100:.0f} %" if isinstance(hits, int | float) and hits else ""
    speeds = (_number(found, f"tokens_{direction}_per_s", ",.0f") for direction in ("in", "out"))
    return "{}, {} tokens/s in, {} out".format(prefix, *speeds)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def _pace(status: Mapping[str, Any]) -> str:
    pace = status.get("steps_per_s")
    return f", {pace * 60:.1f} steps/min" if isinstance(pace, int | float) and pace > 0 else ""


def _left(status: Mapping[str, Any]) -> str:
    pace, step, most = status.get("steps_per_s"), status.get("step"), status.get("max_steps")
    if not pace or not most or not isinstance(step, int):
        return ""
    return f", about {duration(max(0, most - step) / pace)} left"


def _process_row(process: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _name(process),
        _shown(process, "pid"),
        _shown(process, "state"),
        _shown(process, "restarts"),
        duration(process.get("uptime_s")),
        size(process.get("resident_bytes")),
        devices(process),
        _exit(process.get("last_exit")),
    )


def devices(process: Mapping[str, Any]) -> str:
    """Return the device of a process: its number with the GPU's name, or cpu; a dash if it is missing.

    Of a worker whose actor runs on a node of a cluster, the node in its place.
    """
    if node := process.get("node"):
        return f"node {node}"
    number, name = _shown(process, "devices"), process.get("device") or ""
    return number if name in ("", number) else f"{number}: {name}"


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return lines of aligned columns, the column names first."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (columns, *rows)]


def _shown(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    if value is None or value == "":
        return "–"
    return f"{value:,}" if type(value) is int and key != "pid" else str(value)


def _number(values: Mapping[str, Any], key: str, form: str) -> str:
    value = values.get(key)
    return format(value, form) if isinstance(value, int | float) else "–"


def _exit(code: Any) -> str:
    if not isinstance(code, int):
        return str(code or "–")
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"exit {code}"


def _of(most: Any) -> str:
    return f" of {most:,}" if isinstance(most, int) and most else ""


def _trend(status: Mapping[str, Any]) -> str:
    change, first = status.get("reward_trend"), status.get("reward_since_step")
    if not isinstance(change, int | float):
        return str(change or "")
    arrow = "↑" if change > 0 else "↓" if change < 0 else "→"
    return f"{arrow} {change:+.4f} since step {first if first is not None else '–'}"


def duration(seconds: Any) -> str:
    """Return a duration as text, in whole seconds; a dash if it is missing."""
    return diagnosis.duration(seconds, whole=True) if isinstance(seconds, int | float) else "–"


def size(count: Any) -> str:
    """Return a number of bytes as text, such as ``1.5 GiB``; a dash if it is missing."""
    if not isinstance(count, int | float):
        return "–"
    power = next((power for power in range(5) if count < 1024 ** (power + 1)), 4)
    return f"{count / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _learning(values: Mapping[str, Any]) -> str:
    """Return the values of the last step beside its reward; empty before the first step."""
    forms = {
        "loss": "loss {:.4g}",
        "kl": "KL {:.4g} nats",
        "entropy": "entropy {:.4g} nats",
        "response_length": "response length {:.1f} tokens",
        "clipped": "clipped {:.2%}",
        "gradient_norm": "gradient norm {:.4g}",
    }
    known = {name: values.get(name) for name in forms}
    return ", ".join(forms[name].format(value) for name, value in known.items() if isinstance(value, int | float))


def _share(buffer: Mapping[str, Any]) -> str:
    used, capacity = buffer.get("used_bytes"), buffer.get("capacity_bytes")
    return f" ({used / capacity:.0%})" if isinstance(used, int | float) and capacity else ""


def _dropped(buffer: Mapping[str, Any]) -> str:
    reasons = buffer.get("dropped")
    if not isinstance(reasons, dict):
        return "–"
    named = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
    return f"{sum(reasons.values()):,}" + (f" ({named})" if named else "")
