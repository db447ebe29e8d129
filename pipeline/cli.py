"""The command line: starts an instance in the foreground, finds a running one, checks and shows the configuration."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.errors import ExitCode, NotRunningError, RlhfdError

# Everything else is imported by the command that needs it: `rlhfd --help` and completion answer at once.
if TYPE_CHECKING:
    from pipeline.config_file import LoadedConfig

_REQUEST_TIMEOUT_S = 5.0
_COLUMNS = ("process", "pid", "state", "restarts", "up", "memory", "devices", "last exit")

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Commands(click.Group):
    """Turns our errors into lines on standard error and their exit codes."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except RlhfdError as error:
            click.echo(str(error), err=True)
            context.exit(int(error.exit_code))


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from pipeline.instance import installed_version

        click.echo(f"rlhfd {installed_version()}")
        context.exit()


_config_option = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Configuration file; else the one that RLHFD_CONFIG names, else the embedded run.",
)


def _configured(command: _Command) -> _Command:
    sets = click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="Set one value, above the file and the environment (RLHFD_SECTION__KEY); may be repeated.",
    )
    return _config_option(sets(command))


def _finding(command: _Command) -> _Command:
    directory = click.option(
        "--runtime-dir",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Runtime directory of the instance; else RLHFD_RUNTIME_DIR, else the configuration's.",
    )
    return directory(_config_option(command))


def _load(path: Path | None, sets: tuple[str, ...], *, files: bool) -> LoadedConfig:
    from pipeline import config_file

    return config_file.load(path, sets, os.environ, files=files)


def _runtime_dir(directory: Path | None, path: Path | None) -> Path:
    if directory is not None:
        return directory
    from pipeline import config_file

    return config_file.find_runtime_dir(path, os.environ)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 ok, 1 failed, 2 usage, 3 not running, 4 unreachable, 70 gave up, 78 bad configuration.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def main() -> None:
    r"""Keep the rollout GPUs and the trainer GPUs of an RLHF run busy at the same time.

    \b
    Examples:
      rlhfd start                              the embedded run: a small model learns to sort digits
      rlhfd config check --config grpo.toml    every error at once, with its line
      rlhfd start --config grpo.toml           in the foreground; Ctrl-C drains and ends it
      rlhfd status                             from another terminal
    """


@main.command()
@_configured
@click.option("--serial", is_flag=True, help="Run every role in this one process, in turn: slow, and easy to debug.")
@click.option("--fresh", is_flag=True, help="Start anew, whatever checkpoint there is; sets trainer.resume=never.")
def start(path: Path | None, sets: tuple[str, ...], serial: bool, fresh: bool) -> None:
    r"""Start an instance in the foreground; SIGTERM or Ctrl-C drains it and ends it.

    It goes on from the last checkpoint of the same run, if that did not take all of its steps.

    \b
    Examples:
      rlhfd start
      rlhfd start --config grpo.toml --set rollout.workers=4 --set 'rollout.devices=[0, 1, 2, 3]'
      rlhfd start --serial --set trainer.max_steps=3
      rlhfd start --fresh
    """
    loaded = _load(path, (*sets, "trainer.resume=never") if fresh else sets, files=True)
    if serial:
        from pipeline.launchers.serial import run
    else:
        from pipeline.supervisor import run
    sys.exit(int(run(loaded)))


@main.command()
@_finding
@click.option("--timeout-s", type=click.FloatRange(min=0), default=120.0, show_default=True, help="Seconds to wait.")
def stop(path: Path | None, runtime_dir: Path | None, timeout_s: float) -> None:
    r"""Drain the running instance and wait until it has ended.

    \b
    Examples:
      rlhfd stop
      rlhfd stop --runtime-dir /run/rlhfd --timeout-s 300
    """
    from pipeline import instance

    folder = _runtime_dir(runtime_dir, path)
    try:
        instance.request(instance.find(folder), "stop", _REQUEST_TIMEOUT_S)
    except NotRunningError:
        raise
    except RlhfdError as error:
        click.echo(f"{error}; sending SIGTERM", err=True)
        instance.terminate(folder)
    if not instance.wait_until_released(folder, timeout_s):
        click.echo(f"pid {instance.holder(folder)} in {folder} has not ended within {timeout_s:g} s", err=True)
        sys.exit(int(ExitCode.FAILED))


@main.command()
@_finding
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def status(path: Path | None, runtime_dir: Path | None, as_json: bool) -> None:
    r"""Show what the running instance does.

    \b
    Examples:
      rlhfd status
      rlhfd status --json | jq .step
    """
    from pipeline import instance

    record = instance.find(_runtime_dir(runtime_dir, path))
    answer = instance.request(record, "status", _REQUEST_TIMEOUT_S)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show an arrow gets a question mark, not a traceback.
        sys.stdout.reconfigure(errors="replace")
    click.echo(json.dumps(answer, indent=2) if as_json else render_status(answer))


@main.command()
@_finding
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def why(path: Path | None, runtime_dir: Path | None, as_json: bool) -> None:
    r"""Say in a few sentences what holds the running instance back.

    \b
    Examples:
      rlhfd why
      rlhfd why --json | jq .last_minute
    """
    from pipeline import instance

    record = instance.find(_runtime_dir(runtime_dir, path))
    answer = instance.request(record, "why", _REQUEST_TIMEOUT_S)
    click.echo(json.dumps(answer, indent=2) if as_json else "\n".join(answer.get("sentences") or ["nothing to say"]))


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure rlhfd on this machine; of a checkout only: its bin/bench, which takes --help."""
    program = Path(__file__).parents[1] / "bin" / "bench"
    if not program.exists():
        raise RlhfdError(f"the benchmarks come with a checkout of rlhfd; there is no {program}")
    os.execv(program, [str(program), *arguments])


@main.group()
def config() -> None:
    r"""Check and show the configuration.

    \b
    Examples:
      rlhfd config check --config grpo.toml
      rlhfd config show --effective --origin
      rlhfd config schema > config.schema.json
    """


@config.command()
@_configured
def check(path: Path | None, sets: tuple[str, ...]) -> None:
    r"""Print every error at once, each with its place; exit 78 if there is one.

    \b
    Examples:
      rlhfd config check
      rlhfd config check --config grpo.toml --set rollout.workers=8
    """
    loaded = _load(path, sets, files=True)
    click.echo(f"{loaded.path or 'embedded defaults'}: ok")


@config.command()
@_configured
@click.option("--effective", is_flag=True, help="Everything that is in force, not only what was set.")
@click.option("--origin", is_flag=True, help="Where each value comes from, as a comment.")
def show(path: Path | None, sets: tuple[str, ...], effective: bool, origin: bool) -> None:
    r"""Print the configuration as TOML.

    \b
    Examples:
      rlhfd config show
      RLHFD_ROLLOUT__WORKERS=8 rlhfd config show --effective --origin
    """
    from pipeline import config_file

    click.echo(config_file.render(_load(path, sets, files=False), effective=effective, origin=origin), nl=False)


@config.command()
def schema() -> None:
    r"""Print the JSON schema: every key with its type, bounds, default and meaning.

    \b
    Examples:
      rlhfd config schema | jq '."$defs".RolloutConfig.properties | keys'
    """
    from pipeline.config import Config

    click.echo(json.dumps(Config.model_json_schema(), indent=2))


def render_status(status: Mapping[str, Any]) -> str:
    """Write the answer of a running instance for people.

    Args:
        status: As the supervisor gives it; what is missing shows as a dash.
    """
    buffer = status.get("buffer") or {}
    run = {
        "state": f"{_shown(status, 'state')}, up {_duration(status.get('uptime_s'))}",
        "run": f"{_shown(status, 'run_id')}, pid {_shown(status, 'pid')}, configured by {_shown(status, 'config')}",
        "model": f"{_shown(status, 'model')}, {_shown(status, 'algorithm')}",
        "step": f"{_shown(status, 'step')}{_of(status.get('max_steps'))}, "
        f"policy version {_shown(status, 'policy_version')}",
        "reward": f"{_number(status, 'reward_mean', '.4f')} {_trend(status.get('reward_trend'))}".rstrip(),
        "speed": f"{_number(status, 'tokens_per_s', ',.0f')} tokens/s",
        "staleness": f"{_number(status, 'staleness_mean_versions', '.2f')} versions",
        "buffer": ", ".join(f"{_shown(buffer, f'{state}_items')} {state}" for state in ("ready", "leased", "reserved")),
        "arena": f"{_bytes(buffer.get('used_bytes'))} of {_bytes(buffer.get('capacity_bytes'))}{_share(buffer)}",
        "rows": f"{_shown(buffer, 'sealed')} sealed, {_shown(buffer, 'trained')} trained, {_dropped(buffer)} dropped",
    }
    if buffer.get("unaccounted"):
        run["LOST"] = f"{_shown(buffer, 'unaccounted')} rows are unaccounted for: please report this"
    run["metrics"] = _shown(status, "metrics_url")
    lines = [f"{name:<11}{text}" for name, text in run.items()]
    if processes := status.get("processes"):
        lines += ["", *_table([_process_row(process) for process in processes])]
    return "\n".join(lines)


def _process_row(process: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{_shown(process, 'role')} {_shown(process, 'index')}",
        _shown(process, "pid"),
        _shown(process, "state"),
        _shown(process, "restarts"),
        _duration(process.get("uptime_s")),
        _bytes(process.get("resident_bytes")),
        _shown(process, "devices"),
        _exit(process.get("last_exit")),
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (_COLUMNS, *rows)]


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


def _trend(change: Any) -> str:
    if not isinstance(change, int | float):
        return str(change or "")
    return f"{'↑' if change > 0 else '↓' if change < 0 else '→'} {change:+.4f} since the start"


def _duration(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return "–"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _bytes(count: Any) -> str:
    if not isinstance(count, int | float):
        return "–"
    power = next((power for power in range(5) if count < 1024 ** (power + 1)), 4)
    return f"{count / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _share(buffer: Mapping[str, Any]) -> str:
    used, capacity = buffer.get("used_bytes"), buffer.get("capacity_bytes")
    return f" ({used / capacity:.0%})" if isinstance(used, int | float) and capacity else ""


def _dropped(buffer: Mapping[str, Any]) -> str:
    reasons = buffer.get("dropped")
    if not isinstance(reasons, dict):
        return "–"
    named = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
    return f"{sum(reasons.values()):,}" + (f" ({named})" if named else "")
