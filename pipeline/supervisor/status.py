"""One reading of metrics and children, for `rlhfd status`, the terminal, the page and the health endpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.buffer.sizing import capacity_items
from pipeline.config.evaluation import names_of
from pipeline.config.identity import run_dir
from pipeline.config.rewards import part_labels
from pipeline.runtime.latest_checkpoint import best_checkpoint, readable_latest
from pipeline.runtime.pause import Pause
from pipeline.runtime.signals import stat_of
from pipeline.runtime.workspace import Workspace
from pipeline.supervisor.external import process_row
from pipeline.supervisor.fleet import Fleet, Slot
from pipeline.supervisor.gpus import GpuWatch, gpu_series
from pipeline.supervisor.pace import RateWindow, Steps
from pipeline.supervisor.watchdog import Watchdog
from pipeline.telemetry.evaluations import GAUGES, TOTAL
from pipeline.telemetry.exposition import Exposition
from pipeline.telemetry.history import EVALUATION, learning_of
from pipeline.telemetry.metrics import EVALUATION_LABELS, NUMBER_LABELS, REWARD_LABELS
from pipeline.telemetry.number_names import NumberNames
from pipeline.telemetry.reader import MetricsReader, Reading, build_info

_HISTORY = 512
_SHOWN_REWARDS = 56
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SLOT_STATES = ("starting", "ready", "draining", "backoff", "failed")


@dataclasses.dataclass(eq=False)
class InstanceStatus:
    """Reads the slab and the fleet; writes the supervisor's own metrics.

    Attributes:
        workspace: The instance's folder in shared memory.
        fleet: The instance's processes.
        watchdog: The instance's watchdog.
        metrics_url: Address of the metrics; empty without one.
        path: The configuration file, if there is one.
        pending: Keys whose value in the file needs a restart.
        state: ``"starting"``, ``"ready"`` or ``"draining"``.
        reading: The newest reading of the metrics.
    """

    workspace: Workspace
    fleet: Fleet
    watchdog: Watchdog
    _: dataclasses.KW_ONLY
    metrics_url: str
    path: Path | None = None
    pending: Sequence[str] = ()
    state: str = dataclasses.field(default="starting", init=False)

    def __post_init__(self) -> None:
        config, run = self.fleet.config, self.workspace.run
        self._pause = Pause(self.workspace.folder)
        self._run_folder = run_dir(config)
        self._writer = self.fleet.slab.writer("supervisor")
        info = {
            "rlhfd_build_info": build_info(),
            "rlhfd_run_info": {
                "run_id": run.run_id,
                "algorithm": config.rollout.algorithm,
                "model": config.model.actor,
            },
        }
        self._files = names_of(config.evaluation.files)
        self._k = config.evaluation.pass_k or config.evaluation.num_generations
        names = zip(REWARD_LABELS, part_labels(config), strict=False), zip(EVALUATION_LABELS, self._files, strict=False)
        self._reader = MetricsReader(self.fleet.slab, info, dict(itertools.chain(*names)))
        self._number_names = NumberNames(self._run_folder)
        self._named: list[str] = []
        self._gpus = GpuWatch()
        self._gpus.start()
        self._exposition = Exposition(self._reader)
        self.reading: Reading = self._reader.read()
        self._tokens_rate, self._steps_rate = RateWindow(60.0), RateWindow(300.0)
        self._has_rolled = False
        self._steps = Steps(_HISTORY)
        self._trained = self._evaluated = self.reading
        self._policy_version = 0
        self._cpu_s: dict[int, float] = {}
        self._started_s = time.monotonic()
        self._writer.gauge("rlhfd_start_time_seconds").set(time.time())

    def sample(self, now_s: float) -> None:
        """Take the reading that all other methods use until the next one."""
        if self.state == "starting" and self.fleet.all_ready():
            self.state = "ready"
        self._writer.gauge("rlhfd_ready").set(float(self.fleet.all_ready()))
        self._writer.beat()
        self._sample_processes()
        self._sample_memory()
        self._reader.external.update(gpu_series(self._gpus.gpus()))
        self._reader.external["rlhfd_device_info"] = {
            (slot.role, str(slot.index), slot.device): 1.0 for slot in self.fleet.slots if slot.alive and slot.device
        }
        self._sample_cluster()
        if (names := self._number_names.names) != self._named:
            self._named = list(names)
            self._reader.name(dict(zip(NUMBER_LABELS, names, strict=False)))
        self.reading = self._reader.read()
        spent = self.reading.families["rlhfd_process_time_seconds_total"]
        self.watchdog.shares.add(now_s, {key: value for key, value in spent.items() if isinstance(value, float)})
        self.watchdog.engines.add(now_s, self.reading)
        self.watchdog.idle_steps = int(self._value("rlhfd_train_steps_since_signal") or 0)
        # A trainer has none until its first checkpoint; what its predecessor could not write is on no disk yet.
        if (lost := self._value("rlhfd_checkpoint_failures_since_success")) is not None:
            self.watchdog.lost_checkpoints = int(lost)
        version = self._value("rlhfd_policy_version", role="trainer", worker="0")
        self._policy_version = self._policy_version if version is None else int(version)
        self._sample_rates(now_s)

    def _sample_rates(self, now_s: float) -> None:
        steps = self._value("rlhfd_train_steps_total")
        tokens = self._value("rlhfd_tokens_total", kind="response") or 0.0
        # The start of the processes does not count as time without tokens.
        self._has_rolled |= any(slot.state == "ready" for slot in self.fleet.of("rollout"))
        if self._has_rolled:
            self._tokens_rate.add(now_s, tokens)
            # Absent until the trainer has found the step from which it resumes: earlier steps are no rate of this run.
            if steps is not None:
                self._steps_rate.add(now_s, steps)
        # A rank or a buffer that has ended has no gauges any more; their last values are still the newest.
        if learning_of(self.reading).keys() - {EVALUATION}:
            self._trained = self.reading
        if self._value("rlhfd_evaluation_version") is not None:
            self._evaluated = self.reading
        # An external trainer has no number of its step; it undoes none.
        step = steps if self.fleet.config.trainer.kind == "external" else self._value("rlhfd_train_step")
        self._steps.add(step, steps, self._value("rlhfd_reward_mean"))

    def changed(self, slot: Slot) -> None:
        """Set the metrics of a slot's new state."""
        if not slot.works:
            return
        for state in _SLOT_STATES:
            count = sum(other.shown_state == state for other in self.fleet.of(slot.role))
            self._writer.gauge("rlhfd_processes", role=slot.role, state=state).set(count)
        labels = {"role": slot.role, "worker": str(slot.index)}
        self._writer.gauge("rlhfd_process_up", **labels).set(float(slot.state == "ready"))
        wait_s = slot.due_s - self.fleet.clock() if slot.state == "backoff" else 0.0
        self._writer.gauge("rlhfd_process_backoff_seconds", **labels).set(max(0.0, wait_s))

    @property
    def phase(self) -> str:
        """The state, or paused."""
        return "paused" if self.state == "ready" and self._pause.is_on() else self.state

    @property
    def shown_state(self) -> str:
        """The state, or paused, or stuck."""
        return "stuck" if self.state == "ready" and self.watchdog.is_stuck else self.phase

    @property
    def is_buffer_paused(self) -> bool | None:
        """Whether the buffer issued no tickets at the last reading; None while there is no buffer."""
        paused = self._value("rlhfd_paused")
        return None if paused is None else paused > 0

    def steps_and_version(self) -> tuple[float, float, tuple[int, int]]:
        """Return all optimizer steps, repeated ones too, the newest policy version, and its evaluation's progress.

        The progress is the number of prompts that are done, and of all.
        """
        done, prompts = (
            self._value("rlhfd_evaluation_under_way_prompts", state=state) or 0.0 for state in ("done", "all")
        )
        steps = self._value("rlhfd_train_steps_total") or 0.0
        return steps, float(self._policy_version), (int(done), int(prompts))

    # Answers.

    def metrics(self, openmetrics: bool) -> bytes:
        """Return the exposition text."""
        text = self._exposition.openmetrics() if openmetrics else self._exposition.text()
        # After the reading, so that a value shown here is never above that which a next supervisor takes over.
        self._writer.beat()
        return text

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether supervisor and buffer make progress; a supervisor that hangs does not answer at all."""
        silent = self.watchdog.is_buffer_silent()
        return not silent, {"state": self.shown_state, "pid": os.getpid(), **({"hung": "buffer"} if silent else {})}

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Return whether every required role is ready, and the names of those that are not."""
        waiting = [slot.name for slot in self.fleet.slots if slot.works and slot.state != "ready"]
        return self.fleet.all_ready() and self.state == "ready", {"state": self.shown_state, "waiting_for": waiting}

    def numbers(self) -> dict[str, Any]:
        """Return the part of `status` that the terminal shows; it does so each tick, so the values are cheap."""
        counts, rewards = self.reading.conservation, [reward for _, reward in self._steps.rewards]
        return {
            "state": self.shown_state,
            "metrics_url": self.metrics_url,
            "algorithm": self.fleet.config.rollout.algorithm,
            "model": self.fleet.config.model.actor,
            "step": self._steps.step,
            "max_steps": int(self._value("rlhfd_last_step") or self.fleet.config.trainer.max_steps),
            "policy_version": self._policy_version,
            # A rank that has ended has no gauge any more; its last value is still the newest.
            "reward_mean": rewards[-1] if rewards else None,
            "reward_history": rewards,
            "learning": self._learning(),
            "evaluation": self._evaluation(),
            "tokens_per_s": self._tokens_rate.rate(),
            "staleness_mean_versions": self.reading.histogram_mean("rlhfd_policy_staleness_versions", point="train"),
            "buffer": {
                "ready_items": counts.ready_items if counts else 0,
                "capacity_items": capacity_items(self.fleet.config),
            },
            "processes": [{"role": slot.role, "state": slot.state} for slot in self.fleet.of("rollout")],
        }

    def status(self, why: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of `rlhfd status`, with that of `rlhfd why` of the same moment."""
        # All from one reading: rows that were read later than the steps would not add up with them.
        numbers, counts = self.numbers(), self.reading.conservation
        rewards, ends = numbers["reward_history"], self._steps.tenths()
        return numbers | {
            "run_id": self.workspace.run.run_id,
            "run": self._run_folder.name,
            "checkpoint": self._checkpoint(),
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "config": str(self.path or ""),
            "why": next(iter(why["sentences"]), ""),
            "needs_restart": [*self.pending],
            "ranks": self.fleet.config.trainer.world_size,
            "sharding": self.fleet.config.trainer.sharding,
            "reward_trend": ends and ends[1] - ends[0],
            "reward_since_step": self._steps.rewards[0][0] if rewards else None,
            "reward_history": [round(reward, 6) for reward in rewards[-_SHOWN_REWARDS:]],
            "reward_functions": {
                labels[-1]: value
                for labels, value in self._trained.families["rlhfd_reward_function_mean"].items()
                if labels[0] == "trainer" and isinstance(value, float)
            },
            "steps_per_s": self._steps_rate.rate(),
            "buffer": numbers["buffer"]
            | {
                "leased_items": counts.leased_items if counts else 0,
                "reserved_items": counts.writing_items if counts else 0,
                "capacity_bytes": self.fleet.config.buffer.arena_bytes,
                "used_bytes": (counts.ready_bytes + counts.leased_bytes + counts.writing_bytes) if counts else 0,
                "sealed": counts.sealed if counts else 0,
                "trained": counts.trained if counts else 0,
                "dropped": counts.dropped_by_reason() if counts else {},
                "unaccounted": counts.unaccounted if counts else 0,
            },
            "cluster": self._cluster(),
            "processes": [self._process(slot) for slot in self.fleet.slots if slot.works]
            + [
                process_row(rank, self.fleet.clock(), resident_bytes(rank.pid))
                for rank in self.watchdog.external_ranks()
            ],
        }

    def summary(self) -> list[str]:
        """Return the last lines of a run: steps and rewards, the counts of rows, which add up, the last checkpoint."""
        counts, checkpoint = self.fleet.slab.conservation(), self._checkpoint()
        tail = [f"checkpoint, a folder for from_pretrained: {checkpoint}"] if checkpoint else []
        if counts is None or not counts.sealed:
            return tail
        dropped = ", ".join(f"{reason} {n}" for reason, n in counts.dropped_by_reason().items() if n)
        lines = [
            f"experiences: sealed {counts.sealed} = trained {counts.trained} + dropped {sum(counts.dropped)}"
            f"{f' ({dropped})' if dropped else ''} + ready {counts.ready_items} + leased {counts.leased_items}"
        ]
        if ends := self._steps.tenths():
            first, last = ends
            since = f"since step {self._steps.rewards[0][0]}: " if self._steps.rewards[0][0] > 1 else ""
            lines.insert(
                0,
                f"steps: {self._steps.step}, {since}mean reward of the first tenth {first:.3f}, of the last {last:.3f}",
            )
        return lines + tail

    # Readings.

    def _checkpoint(self) -> str:
        """Return the folder of the latest checkpoint, "" if there is none."""
        latest = readable_latest(self._run_folder / "checkpoints")
        return "" if latest is None else str(self._run_folder / "checkpoints" / latest.path)

    def _learning(self) -> dict[str, float]:
        last = learning_of(self._trained) | {EVALUATION: learning_of(self._evaluated).get(EVALUATION)}
        return {name: value for name, value in last.items() if value is not None}

    def _evaluation(self) -> dict[str, Any] | None:
        """Return the last evaluation and the progress of the next; None without held-out prompts."""
        if not self._files:
            return None
        best = None
        # A disk that fails, or a ticket of Kerberos that has expired, ends no run.
        with contextlib.suppress(OSError):
            best = best_checkpoint(self._run_folder / "checkpoints")
        _, _, (done, prompts) = self.steps_and_version()
        last = self._evaluated
        version = last.value("rlhfd_evaluation_version")
        files = {
            name: {field: last.value(metric, file=name) for field, metric in GAUGES.items()}
            for name in (TOTAL, *self._files)
        }
        return {
            "version": None if version is None else int(version),
            "k": self._k,
            **files.pop(TOTAL),
            "files": files,
            "done": done,
            "prompts": prompts,
            "best": "" if best is None else str(best),
        }

    def _value(self, name: str, **labels: str) -> float | None:
        return self.reading.value(name, **labels)

    def _process(self, slot: Slot) -> dict[str, Any]:
        return {
            "name": slot.name,
            "role": slot.role,
            "index": slot.index,
            "pid": slot.child.pid if slot.child else None,
            "state": slot.shown_state,
            "restarts": slot.restarts,
            "uptime_s": round(self.fleet.clock() - slot.started_s, 1) if slot.child else 0.0,
            "resident_bytes": resident_bytes(slot.child.pid) if slot.child else 0,
            "devices": slot.devices.gpu or "cpu",
            "progress": self._progress(slot),
            "engine": self._engine(slot),
            "device": slot.device,
            "node": str(slot.node or "") if slot.child else "",
            "last_exit": slot.last_exit,
        }

    def _progress(self, slot: Slot) -> dict[str, int] | None:
        """Return rows and tokens of a worker's present stage; None if the stage does not tell."""
        if slot.role != "rollout":
            return None
        worker = str(slot.index)
        rows, done = (self._value("rlhfd_ticket_rows", worker=worker, state=state) for state in ("all", "done"))
        tokens = self._value("rlhfd_ticket_tokens", worker=worker)
        return {"rows_done": int(done or 0), "rows": int(rows), "tokens": int(tokens or 0)} if rows else None

    def _engine(self, slot: Slot) -> dict[str, Any] | None:
        """Return the values of a worker's engine; None for another process, or a worker without one."""
        engine = self.watchdog.engines.view(slot.index) if slot.role == "rollout" else None
        return None if engine is None else engine.shown()

    def _sample_processes(self) -> None:
        before_s, self._cpu_s = self._cpu_s, {}
        for slot in self.fleet.slots:
            if not slot.works or slot.child is None:
                continue
            labels = {"role": slot.role, "worker": str(slot.index)}
            self._writer.gauge("rlhfd_process_resident_memory_bytes", **labels).set(resident_bytes(slot.child.pid))
            pid = slot.child.pid
            cpu_s = self._cpu_s[pid] = max(cpu_seconds(pid), known_s := before_s.get(pid, 0.0))
            self._writer.counter("rlhfd_process_cpu_seconds_total", role=slot.role).inc(cpu_s - known_s)

    def _actors(self) -> dict[str, int]:
        """Return the number of actors by state: waiting for room in the cluster, or on a node of it."""
        workers = [slot for slot in self.fleet.of("rollout") if slot.alive]
        placed = sum(slot.node is not None for slot in workers)
        return {"pending": sum(slot.is_pending for slot in workers), "placed": placed}

    def _cluster(self) -> dict[str, Any] | None:
        """Return the nodes of the cluster and the actors on them; None without a cluster."""
        if self.fleet.config.cluster.engine != "ray":
            return None
        nodes, on = self.fleet.nodes, [slot for slot in self.fleet.of("rollout") if slot.alive and slot.node]
        return {
            "nodes": [
                {
                    "name": node.name,
                    "address": node.address,
                    "workers": [slot.name for slot in on if slot.node and slot.node.id == node.id],
                }
                for node in nodes.alive
            ],
            "left": [str(node) for node in nodes.left],
            "actors": self._actors(),
        }

    def _sample_cluster(self) -> None:
        if self.fleet.config.cluster.engine != "ray":
            return
        nodes = self.fleet.nodes
        for state, count in (("alive", len(nodes.alive)), ("left", len(nodes.left))):
            self._writer.gauge("rlhfd_cluster_nodes", state=state).set(count)
        for state, count in self._actors().items():
            self._writer.gauge("rlhfd_cluster_actors", state=state).set(count)
        self._reader.external["rlhfd_cluster_actor_info"] = {
            (str(slot.index), slot.node.name, slot.node.address): 1.0
            for slot in self.fleet.of("rollout")
            if slot.alive and slot.node
        }

    def _sample_memory(self) -> None:
        workspace = self.workspace
        for kind, paths in (
            ("buffer", [workspace.arena_path]),
            ("weights", [workspace.weights_path, *workspace.folder.glob("training*")]),
            ("metrics", [workspace.metrics_path]),
        ):
            if sizes := [path.stat().st_size for path in paths if path.exists()]:
                self._writer.gauge("rlhfd_shm_bytes", kind=kind).set(sum(sizes))
        # The supervisor's next tick ends a run whose folder was removed.
        with contextlib.suppress(FileNotFoundError):
            system = os.statvfs(self.workspace.folder)
            self._writer.gauge("rlhfd_shm_available_bytes").set(system.f_bavail * system.f_frsize)


def resident_bytes(pid: int) -> int:
    """Return a process's resident memory, 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time a process has used, user and system, 0 if it is gone."""
    try:
        fields = stat_of(pid)
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    except (OSError, IndexError):
        return 0.0
