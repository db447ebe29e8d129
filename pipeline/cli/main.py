"""The command line: starts an instance in the foreground, finds a running one, checks and shows the configuration."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pipeline.cli.config import config
from pipeline.cli.evaluate import evaluate
from pipeline.cli.init import init, write_new
from pipeline.cli.instances import attach, ps
from pipeline.cli.options import (
    REQUEST_TIMEOUT_S,
    ask,
    configured,
    drop_unwritable_output,
    escape_unknown_characters,
    finding,
    is_in_removed_folder,
    load,
    open_standard_streams,
    placing,
    runtime_dir_of,
)
from pipeline.cli.page import page
from pipeline.cli.plan import plan
from pipeline.cli.recording import record, replay
from pipeline.cli.runs import run_folder_of, runs
from pipeline.cli.service import logs, systemd
from pipeline.cli.try_reward import try_reward
from pipeline.cli.usage import advised
from pipeline.errors import ExitCode, NotRunningError, RlhfdError, StoppedError
from pipeline.runtime.signals import keep_exit_codes

# Each command imports its other modules itself: `rlhfd --help` and completion answer at once.


# A file of another user or of another kind, or a path that is none, which any command may meet.
_OF_PATHS = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class _Commands(click.Group):
    """Turns our errors into lines on standard error and their exit codes."""

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        # It writes the help and the version.
        with _told_errors():
            return super().make_context(*arguments, **named)

    def invoke(self, context: click.Context) -> Any:
        open_standard_streams()
        escape_unknown_characters()
        keep_exit_codes()
        with _told_errors():
            try:
                return super().invoke(context)
            except click.UsageError as error:
                raise advised(error) from error


@contextlib.contextmanager
def _told_errors() -> Iterator[None]:
    code = ExitCode.FAILED
    try:
        yield
        return
    except RlhfdError as error:
        click.echo(str(error), err=True)
        code = error.exit_code
    except OSError as error:
        if error.errno == errno.EPIPE and drop_unwritable_output():
            code = ExitCode.OK  # as of `| head`: its reader has what it wants
        elif error.errno in (errno.ENOSPC, errno.EDQUOT) and drop_unwritable_output():
            click.echo(f"standard output: {error.strerror}", err=True)
        elif error.errno in _OF_PATHS and error.filename is not None:
            click.echo(f"{error.filename}: {error.strerror}", err=True)
        elif error.errno == errno.ENOENT and is_in_removed_folder():
            click.echo("the current folder has been removed: change to another one", err=True)
        else:
            raise
    raise click.exceptions.Exit(int(code))


def _print_version(context: click.Context, _: click.Parameter, is_set: bool) -> None:
    if is_set:
        from pipeline.telemetry.reader import version_of

        click.echo(f"rlhfd {version_of('rlhfd') or 'unknown'}")
        context.exit()


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 ok, 1 failed, 2 usage, 3 not running, 4 unreachable, 70 gave up, 78 bad configuration.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def main() -> None:
    """Keep the rollout GPUs and the trainer GPUs of an RLHF run busy at the same time.

    \b
    Examples:
      rlhfd init my-run                        a configuration, prompts and a reward to start from
      rlhfd start                              the embedded run: a small model learns to sort digits
      rlhfd config check --config grpo.toml    every error at once, with its line
      rlhfd start --config grpo.toml           in the foreground; Ctrl-C drains and stops it
      rlhfd status                             from another terminal
    """


@main.command(short_help="Start an instance; SIGTERM or Ctrl-C shuts it down.")
@configured
@click.option("--serial", is_flag=True, help="Run every role in this one process, in turn: slow, and easy to debug.")
@click.option("--fresh", is_flag=True, help="Remove this run, and no other, and begin it anew.")
@click.option("--from", "back_to", metavar="step-N", help="Go back to an earlier checkpoint of this run.")
@click.option("--detach", is_flag=True, help="Return when the instance is ready; it runs on without a terminal.")
def start(
    path: Path | None, sets: tuple[str, ...], serial: bool, fresh: bool, back_to: str | None, detach: bool
) -> None:
    """Start an instance in the foreground; SIGTERM or Ctrl-C drains it and shuts it down.

    It resumes from the last checkpoint of the same run. A run that has taken all of trainer.max_steps says so and exits
    with 0. Another model, seed, prompt file, algorithm or batch size is another run, with a folder of its own; `rlhfd
    runs` lists them.

    \b
    Examples:
      rlhfd start
      rlhfd start --config grpo.toml --set rollout.workers=4 --set 'rollout.devices=[0, 1, 2, 3]'
      rlhfd start --serial --set trainer.max_steps=3
      rlhfd start --from step-000050
      rlhfd start --fresh
      rlhfd start --detach && rlhfd attach
    """
    if serial and detach:
        raise click.UsageError("--serial and --detach exclude each other")
    if back_to == "":
        # As of a variable that is not set: the start would go on from the last checkpoint without a word.
        raise click.UsageError("--from is empty: give a checkpoint such as step-000050")
    if fresh and back_to:
        raise click.UsageError("--fresh removes the checkpoints of this run, --from goes back to one: give one of them")
    loaded = load(path, (*sets, "trainer.resume=never") if fresh else sets, files=True)
    if detach:
        from pipeline.cli import detached

        arguments = [*(["--config", str(path)] if path else []), *(word for item in sets for word in ("--set", item))]
        runtime_dir = Path(loaded.config.daemon.runtime_dir)
        arguments += [*(["--fresh"] if fresh else []), *(["--from", back_to] if back_to else [])]
        sys.exit(detached.start(arguments, runtime_dir))
    if serial:
        from pipeline.serial import run
    else:
        from pipeline.supervisor.supervisor import run
    with placing(loaded):
        sys.exit(int(run(loaded, back_to=back_to or "")))


@main.command()
@finding
@click.option("--timeout-s", type=click.FloatRange(min=0), default=120.0, show_default=True, help="Seconds to wait.")
def stop(path: Path | None, runtime_dir: Path | None, timeout_s: float) -> None:
    """Drain the running instance and wait until it has ended.

    It fails where the end is not wholly on disk: the last checkpoint or undelivered rows stay in shared memory then.

    \b
    Examples:
      rlhfd stop
      rlhfd stop --runtime-dir /run/rlhfd --timeout-s 300
    """
    from pipeline.runtime import control, lock
    from pipeline.runtime.signals import refuse_stopped

    folder, record = runtime_dir_of(runtime_dir, path), None
    try:
        record = lock.find(folder)
        control.request(record, "stop", REQUEST_TIMEOUT_S)
    except (NotRunningError, StoppedError):
        raise
    except RlhfdError as error:
        click.echo(f"{error}; sending SIGTERM", err=True)
        lock.terminate(folder)
    if not lock.wait_until_released(folder, timeout_s):
        refuse_stopped(lock.holder(folder) or 0)
        raise RlhfdError(f"pid {lock.holder(folder)} in {folder} has not ended within {timeout_s:g} s")
    # An end that is wholly on disk removes its shared memory before its lock.
    if record is not None and os.path.exists(record.shm_dir):
        left = f"{record.shm_dir} keeps the rest for the next start, `rlhfd logs` has the reason"
        raise RlhfdError(f"it has ended, and not all of it is on disk: {left}")


@main.command()
@finding
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def status(path: Path | None, runtime_dir: Path | None, as_json: bool) -> None:
    """Show the state of the running instance.

    Words: a ticket permits a worker to roll out some prompts, with an extent, memory for their rows. A row is sealed
    once the buffer has recorded it, leased while a trainer holds it in a batch. A ticket is settled once its outcome is
    recorded. The spool has the rows that a stop leaves.

    \b
    Examples:
      rlhfd status
      rlhfd status --json | jq .step
    """
    from pipeline.cli import status as status_view

    answer = ask("status", path, runtime_dir)
    click.echo(json.dumps(answer, indent=2) if as_json else status_view.render(answer))


@main.command(short_help="Explain why the run is slow or stopped.")
@finding
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def why(path: Path | None, runtime_dir: Path | None, as_json: bool) -> None:
    """Explain in a few sentences the bottleneck of the running instance.

    \b
    Examples:
      rlhfd why
      rlhfd why --json | jq .last_minute
    """
    answer = ask("why", path, runtime_dir)
    click.echo(json.dumps(answer, indent=2) if as_json else "\n".join(answer.get("sentences") or ["nothing to report"]))


@main.command(short_help="Show the run and its processes on a full screen.")
@finding
@click.option("--json", "as_json", is_flag=True, help="Print one reading as JSON: the answers of status and why.")
@click.option("--interval-s", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Between readings.")
def top(path: Path | None, runtime_dir: Path | None, as_json: bool, interval_s: float) -> None:
    """Show the run and the activity of each process on a full screen until Ctrl-C; in a pipe, one table.

    Words: a ticket permits a worker to roll out some prompts, with an extent, memory for their rows. A row is sealed
    once the buffer has recorded it, leased while a trainer holds it in a batch. A ticket is settled once its outcome is
    recorded. The spool has the rows that a stop leaves.

    \b
    Examples:
      rlhfd top
      rlhfd top | sort -k4
      rlhfd top --json | jq '.why.processes[] | select(.stopped)'
    """
    status, why = ask("status", path, runtime_dir), ask("why", path, runtime_dir)
    if as_json:
        click.echo(json.dumps({"status": status, "why": why}, indent=2))
        return
    from rich.console import Console

    from pipeline.cli import top as top_view

    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        click.echo(top_view.text(status, why))
        return
    try:
        top_view.run(lambda command: ask(command, path, runtime_dir), console, interval_s)
    except KeyboardInterrupt:
        pass  # the way to leave the screen


@main.command("collect-env", short_help="Print the facts for a bug report.")
@configured
@click.option("--runtime-dir", type=click.Path(path_type=Path, readable=False), metavar="DIR",
              help="Runtime directory of the running instance.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, a member for each part.")
def collect_env(path: Path | None, sets: tuple[str, ...], runtime_dir: Path | None, as_json: bool) -> None:
    """Print the facts for a bug report: versions, machine, GPUs, limits, configuration, the last errors.

    Of a running instance it has the configuration in force. It holds no secret, no row of the prompts and no response;
    texts of the configuration, such as prompts.system_prompt, are part of it. Read it before you send it.

    \b
    Examples:
      rlhfd collect-env > report.txt
      rlhfd collect-env --config grpo.toml
      rlhfd collect-env --json | jq -r .packages.torch
    """
    from pipeline.cli import collect_env

    report = collect_env.collect(path, sets, os.environ, runtime_dir)
    click.echo(json.dumps(report, indent=2) if as_json else collect_env.text(report))


@main.command(short_help="Print the completion of a shell: bash, zsh or fish.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which a shell completes commands, options and configuration keys.

    \b
    Examples:
      rlhfd completion bash > ~/.local/share/bash-completion/completions/rlhfd
      rlhfd completion zsh > "${fpath[1]}/_rlhfd"
      rlhfd completion fish > ~/.config/fish/completions/rlhfd.fish
    """
    from click.shell_completion import get_completion_class

    shell_class = get_completion_class(shell)
    assert shell_class is not None
    click.echo(shell_class(main, {}, "rlhfd", "_RLHFD_COMPLETE").source())


@main.command(short_help="Write the files for Prometheus and Grafana: rules, alerts, a dashboard.")
@click.argument("folder", default="dashboards", type=click.Path(path_type=Path, file_okay=False), metavar="[FOLDER]")
def dashboards(folder: Path) -> None:
    """Write prometheus.yml, its rules and alerts, and rlhfd.json for Grafana into FOLDER, by default ./dashboards.

    Nothing is overwritten. docs/runbook.md has a section for each alert.

    \b
    Examples:
      rlhfd dashboards
      rlhfd dashboards /etc/rlhfd/dashboards
    """
    from importlib.resources import files

    shipped = files("pipeline.telemetry") / "dashboards"
    write_new(folder, {file.name: file.read_text(encoding="utf-8") for file in shipped.iterdir()})
    click.echo(f"Next:\n  prometheus --config.file={shlex.quote(str(folder / 'prometheus.yml'))}")


@main.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
    short_help="Measure rlhfd on this machine (checkouts only).",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure rlhfd on this machine by the checkout's bin/bench, which takes --help."""
    program = Path(__file__).parents[2] / "bin" / "bench"
    if not program.exists():
        raise RlhfdError(f"the benchmarks come with a checkout of rlhfd; there is no {program}")
    os.execv(program, [str(program), *arguments])


@main.command(short_help="Read the configuration file again, and list the changes.")
@finding
@click.option("--timeout-s", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Seconds to wait.")
def reload(path: Path | None, runtime_dir: Path | None, timeout_s: float) -> None:
    """Have the running instance read its configuration file again, and wait for the result; so does SIGHUP.

    Keys that can change during a run are in force then; keys that need a restart are listed, and keys of the file that
    `--set` or the environment overrides. Code is not loaded again. A file with a mistake changes nothing: every mistake
    is printed with its place, and the exit code is 78.

    \b
    Examples:
      rlhfd reload
      rlhfd reload --runtime-dir /run/rlhfd
    """
    answer = ask("reload", path, runtime_dir, timeout_s)
    if not answer.get("ok"):
        click.echo("\n".join(answer.get("errors") or ["not reloaded"]), err=True)
        sys.exit(int(ExitCode.BAD_CONFIG))
    for change in answer.get("in_force") or []:
        click.echo(f"in force: {_change(change)}")
    for change in answer.get("needs_restart") or []:
        click.echo(f"needs a restart: {_change(change)}")
    for key, location in (answer.get("overridden") or {}).items():
        click.echo(f"not in force: {key} of the file, {location} stands above it")
    if note := answer.get("note"):
        click.echo(f"note: {note}", err=True)
    if not answer.get("in_force") and not answer.get("needs_restart"):
        click.echo(f"{answer.get('config') or 'no configuration file'}: nothing has changed")


def _change(change: dict[str, Any]) -> str:
    return f"{change['key']} = {json.dumps(change['after'])}, was {json.dumps(change['before'])}"


@main.command(short_help="Issue no more tickets until `rlhfd resume`.")
@finding
def pause(path: Path | None, runtime_dir: Path | None) -> None:
    """Issue no more tickets until `rlhfd resume`: finished rollouts are still trained, then the run is idle.

    Rollouts in progress finish. Processes, models and shared memory stay. An orderly shutdown ends the pause.

    \b
    Examples:
      rlhfd pause
      rlhfd pause --runtime-dir /run/rlhfd
    """
    is_in_force = ask("pause", path, runtime_dir)["in_force"]
    click.echo("paused" if is_in_force else "paused as soon as the buffer is up")


@main.command()
@finding
def resume(path: Path | None, runtime_dir: Path | None) -> None:
    """Issue tickets again after `rlhfd pause`.

    \b
    Examples:
      rlhfd resume
      rlhfd resume --runtime-dir /run/rlhfd
    """
    is_in_force = ask("resume", path, runtime_dir)["in_force"]
    click.echo("resumed" if is_in_force else "resumed as soon as the buffer is up")


@main.command(short_help="Show sampled rollouts with reward and advantage.")
@finding
@click.option(
    "--last", type=click.IntRange(min=0), default=10, show_default=True, help="Number of rollouts, the newest."
)
@click.option("--follow", "-f", is_flag=True, help="Continue with new rollouts until Ctrl-C.")
@click.option("--min-reward", type=float, metavar="R", help="Only rollouts with a response of reward at least R.")
@click.option("--max-reward", type=float, metavar="R", help="Only rollouts with a response of reward at most R.")
@click.option("--contains", default="", metavar="TEXT", help="Only rollouts with TEXT in prompt, answer or a response.")
@click.option("--worker", type=click.IntRange(min=0), metavar="N", help="Only rollouts of worker N.")
@click.option("--run", default="", metavar="NAME", help="Run of that name; else the running or the last one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def samples(
    path: Path | None,
    runtime_dir: Path | None,
    last: int,
    follow: bool,
    min_reward: float | None,
    max_reward: float | None,
    contains: str,
    worker: int | None,
    run: str,
    as_json: bool,
) -> None:
    """Show sampled rollouts: prompt, responses with reward and advantage; also of a run that has ended.

    \b
    Examples:
      rlhfd samples --last 3
      rlhfd samples --follow --min-reward 0.9
      rlhfd samples --json --contains 7302 | jq '.responses[].reward'
    """
    from pipeline.cli.samples import Filter, show
    from pipeline.telemetry.samples import SampleReader, folder_of

    reader = SampleReader(folder_of(run_folder_of(runtime_dir, path, run)))
    show(reader, Filter(min_reward, max_reward, contains, worker), last=last, follow=follow, as_json=as_json)


for command in (attach, config, evaluate, init, logs, page, plan, ps, record, replay, runs, systemd, try_reward):
    main.add_command(command)
