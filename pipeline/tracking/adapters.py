"""The tracker libraries behind one interface; each is imported by its own adapter alone.

All of them write to the folder of the run unless their own environment variables name a server: WANDB_MODE and
WANDB_API_KEY, TRACKIO_DIR, MLFLOW_TRACKING_URI.
"""

from __future__ import annotations

import netrc
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from pipeline.tracking.records import COLUMNS, Record, flat

_MOST_PARAMETERS: Final = 100
"""Of one request to a server of MLflow."""
_MOST_VALUE: Final = 5000

Rows = Sequence[tuple[Any, ...]]


class Tracker(Protocol):
    """One run of one library.

    Attributes:
        run_id: The library's id of the run; a later process that is given it continues this run.
    """

    run_id: str

    def log(self, record: Record) -> None:
        """Send the numbers of a step."""

    def table(self, step: int, rows: Rows) -> None:
        """Send rows with the columns `COLUMNS`."""

    def flush(self) -> None:
        """Return once a killed process would lose nothing of what was sent."""

    def close(self) -> None:
        """End this process's part of the run; the run itself can be continued."""


class TrackedRun(NamedTuple):
    """A run, as a tracker is told of it.

    Attributes:
        run_id: Id of the library's run to continue; empty for a new one.
        name: The run's name, for display.
        project: Project, or experiment.
        folder: Folder of the files that the library writes.
        settings: The configuration in force, by section and key; later ones of a run take the place of earlier ones.
        last_step: Step of the last line that an earlier process sent to the run; -1 if there was none.
    """

    run_id: str
    name: str
    project: str
    folder: Path
    settings: Mapping[str, Any] = {}
    last_step: int = -1


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Return the tracker of a name, one of `pipeline.config.sections.TrackerName`."""
    adapters: dict[str, Callable[[TrackedRun], Tracker]]
    adapters = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}
    run.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return adapters[name](run)


class TensorBoard:
    """Event files, without TensorFlow and torch. Steps that are taken again hide those before."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.run_id = run.run_id or run.name
        self._events: Any = event_pb2
        self._writer: Any = EventFileWriter(str(run.folder / self.run_id))
        self._step = run.last_step
        if run.settings:
            self._text("configuration", max(run.last_step, 0), ("key", "value"), list(flat(run.settings).items()))

    def log(self, record: Record) -> None:
        """Add an event; see `Tracker`."""
        # The evaluation of a step has a line of its own, behind the step's and with the same number.
        if record.step < self._step or (record.step == self._step and record.is_train):
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._event(record.step, record.unix_s, session_log=start))
        self._step = record.step
        values = [{"tag": name, "simple_value": value} for name, value in record.values.items()]
        self._writer.add_event(self._event(record.step, record.unix_s, summary={"value": values}))

    def table(self, step: int, rows: Rows) -> None:
        """Add a table in Markdown to the texts."""
        self._text("samples", step, COLUMNS, rows)

    def _text(self, tag: str, step: int, columns: Sequence[str], rows: Rows) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join("|" + "|".join(_cell(cell) for cell in line) + "|" for line in lines)
        tensor = {"dtype": "DT_STRING", "string_val": [text.encode()], "tensor_shape": {"dim": [{"size": 1}]}}
        value = {"tag": tag, "tensor": tensor, "metadata": {"plugin_data": {"plugin_name": "text"}}}
        self._writer.add_event(self._event(step, time.time(), summary={"value": [value]}))

    def flush(self) -> None:
        """Write the events to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _event(self, step: int, unix_s: float, **content: Any) -> Any:
        return self._events.Event(step=step, wall_time=unix_s, **content)


def _cell(cell: object) -> str:
    return " ".join(str(cell).split()).replace("|", "\\|")


class Wandb:
    """Weights & Biases; the axis of all values is ``step``, since its own steps cannot go back."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self.run_id = run.run_id or secrets.token_hex(4)
        self._wandb: Any = wandb
        # Without a key a prompt would wait for one.
        is_known = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") or _netrc_has_wandb()
        mode = {} if is_known else {"mode": "offline"}
        self._run: Any = wandb.init(
            project=run.project, id=self.run_id, name=run.name, resume="allow", dir=str(run.folder), **mode
        )
        if run.settings:
            self._run.config.update(dict(run.settings), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Record) -> None:
        """Log the values; see `Tracker`."""
        self._run.log({"step": record.step, **record.values})

    def table(self, step: int, rows: Rows) -> None:
        """Log a table."""
        data = [list(row) for row in rows]
        self._run.log({"step": step, "samples": self._wandb.Table(columns=list(COLUMNS), data=data)})

    def flush(self) -> None:
        """Return; its own process has all values, and outlives this one."""

    def close(self) -> None:
        """Wait for the upload."""
        self._run.finish()


def _netrc_has_wandb() -> bool:
    """Return whether the file of ``NETRC``, by default ``~/.netrc``, has an entry of the server."""
    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return urlsplit(server).hostname in netrc.netrc(str(path)).hosts
    except (OSError, ValueError, netrc.NetrcParseError):
        return False


class Trackio:
    """Trackio, a local-first tracker of Hugging Face."""

    def __init__(self, run: TrackedRun) -> None:
        # Read at the import.
        os.environ.setdefault("TRACKIO_DIR", str(run.folder))
        import trackio

        self.run_id = run.run_id or f"{run.name}-{secrets.token_hex(2)}"
        self._trackio: Any = trackio
        self._run: Any = trackio.init(project=run.project, name=self.run_id, resume="allow", config=dict(run.settings))

    def log(self, record: Record) -> None:
        """Log the values; see `Tracker`."""
        self._run.log(dict(record.values), step=record.step)

    def table(self, step: int, rows: Rows) -> None:
        """Log a table."""
        import pandas

        frame = pandas.DataFrame([list(row) for row in rows], columns=list(COLUMNS))
        self._run.log({"samples": self._trackio.Table(dataframe=frame)}, step=step)

    def flush(self) -> None:
        """Return; it writes by itself."""

    def close(self) -> None:
        """Wait until all values are written."""
        self._run.finish()


class Mlflow:
    """MLflow; without MLFLOW_TRACKING_URI in a database file in the folder of the run."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=uri)
        self.run_id = run.run_id or self._new_run(run)
        self._entities: Any = mlflow.entities
        self._client.update_run(self.run_id, status="RUNNING")
        # An earlier process may have sent samples of this step.
        self._table_step = run.last_step
        if run.settings:
            self._set({key: str(value)[:_MOST_VALUE] for key, value in flat(run.settings).items()})

    def _new_run(self, run: TrackedRun) -> str:
        found = self._client.get_experiment_by_name(run.project)
        kept = {} if os.environ.get("MLFLOW_TRACKING_URI") else {"artifact_location": (run.folder / "files").as_uri()}
        experiment = found.experiment_id if found else self._client.create_experiment(run.project, **kept)
        return str(self._client.create_run(experiment, run_name=run.name).info.run_id)

    def log(self, record: Record) -> None:
        """Log the values; see `Tracker`."""
        at_ms = int(record.unix_s * 1000)
        metrics = [
            self._entities.Metric(mlflow_name(name), value, at_ms, record.step) for name, value in record.values.items()
        ]
        self._client.log_batch(self.run_id, metrics=metrics)

    def _set(self, settings: Mapping[str, str]) -> None:
        """Log the settings as parameters; one that a later start has changed, which no parameter can be, as a tag."""
        data = self._client.get_run(self.run_id).data
        known = data.params
        new = [self._entities.Param(key, value) for key, value in settings.items() if key not in known]
        for begin in range(0, len(new), _MOST_PARAMETERS):
            self._client.log_batch(self.run_id, params=new[begin : begin + _MOST_PARAMETERS])
        for key, value in settings.items():
            # The tag counts, where there is one: a value may also be the first one again.
            if data.tags.get(key, known.get(key, value)) != value:
                self._client.set_tag(self.run_id, key, value)

    def table(self, step: int, rows: Rows) -> None:
        """Log a table as a JSON file of columns and rows, which MLflow shows as one.

        A further one of the same step has its time in its name: a file of the same name takes the place of the first.
        """
        content: Mapping[str, Any] = {"columns": list(COLUMNS), "data": [list(row) for row in rows]}
        time_ms = f"-{time.time_ns() // 1_000_000}" if step == self._table_step else ""
        self._table_step = step
        self._client.log_dict(self.run_id, content, f"samples/step-{step:06d}{time_ms}.json")

    def flush(self) -> None:
        """Return; each call is complete at its return."""

    def close(self) -> None:
        """Mark the run as finished; a later process marks it as running again."""
        self._client.set_terminated(self.run_id)


def mlflow_name(name: str) -> str:
    """Return the name of a metric with ``_`` for what MLflow refuses, such as the ``+`` of a file's name."""
    parts = re.sub(r"[^\w./: -]", "_", name).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
