"""Options that commands share, and the lookup of a configuration or a running instance."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.load import LoadedConfig

REQUEST_TIMEOUT_S = 5.0

_Command = TypeVar("_Command", bound=Callable[..., Any])

config_option = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Configuration file; else the one that RLHFD_CONFIG names, else the embedded run.",
)


def configured(command: _Command) -> _Command:
    """Give a command the options of a configuration: ``--config`` and ``--set``."""
    sets = click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        shell_complete=lambda context, option, typed: _complete_key(context, option, typed),
        help="Set one value, above the file and the environment (RLHFD_SECTION__KEY); may be repeated.",
    )
    return config_option(sets(command))


def finding(command: _Command) -> _Command:
    """Give a command the options by which it finds a running instance."""
    directory = click.option(
        "--runtime-dir",
        # A command says by its exit code what it finds there.
        type=click.Path(path_type=Path, readable=False),
        metavar="DIR",
        help="Runtime directory of the instance; else RLHFD_RUNTIME_DIR, else the configuration's.",
    )
    return directory(config_option(command))


def load(
    path: Path | None,
    sets: tuple[str, ...],
    *,
    files: bool,
    on_cards: bool | None = None,
    unused: Container[str] = (),
) -> LoadedConfig:
    """Return the configuration that these options select.

    Args:
        path: The file, as `config_option` has it.
        sets: The assignments of ``--set``.
        files: Whether the files that it names are checked.
        on_cards: Whether the run has GPUs; None for this machine's.
        unused: As in `pipeline.supervisor.preflight.problems_of_files`.
    """
    from pipeline.config import load as config_load
    from pipeline.supervisor.placement import visible_gpus
    from pipeline.supervisor.preflight import problems_of_files

    has_gpus = bool(visible_gpus(os.environ)) if on_cards is None else on_cards
    checks = functools.partial(problems_of_files, unused=unused) if files else None
    return config_load.load(path, sets, os.environ, check_files=checks, on_cards=has_gpus)


def runtime_dir_of(directory: Path | None, path: Path | None) -> Path:
    """Return the runtime directory of the instance that these options select."""
    if directory is not None:
        return directory
    from pipeline.config import load as config_load

    return config_load.find_runtime_dir(path, os.environ)


def prepare_as_start(config_path: Path | None) -> None:
    """Find modules of the user as `start` does, beside the configuration file and in the current folder."""
    from pipeline.config import user_modules

    user_modules.use_folder_of(config_path)
    user_modules.extend_path()
    # One progress bar a model is noise.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@contextlib.contextmanager
def placing(loaded: LoadedConfig) -> Iterator[None]:
    """Give each line of a ConfigError in the block the place of its key."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError("\n".join(map(loaded.placed, str(error).splitlines()))) from error


def ask(
    command: str, path: Path | None, directory: Path | None, timeout_s: float = REQUEST_TIMEOUT_S
) -> dict[str, Any]:
    """Return the running instance's answer to a command."""
    from pipeline.runtime import control, lock

    return control.request(lock.find(runtime_dir_of(directory, path)), command, timeout_s)


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed: another file would get its descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free descriptor, which is that of the stream.
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def escape_unknown_characters() -> None:
    """Let standard output escape characters that the terminal's encoding lacks, in place of a UnicodeEncodeError."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def drop_unwritable_output() -> bool:
    """Return whether standard output cannot be written, as of a file on a full disk; its unwritten rest is given up."""
    try:
        sys.stdout.flush()
        # A flush has nothing to write after a large write that has failed.
        os.write(1, b"\n")
    except OSError:
        # Python flushes the rest once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)
        return True
    return False


def is_in_removed_folder() -> bool:
    """Return whether the current folder has been removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _complete_key(context: click.Context, option: click.Parameter, typed: str) -> list[str]:
    from pipeline.config.advice import SECTIONS

    keys = [f"{section}.{name}=" for section, model in SECTIONS.items() for name in type(model).model_fields]
    keys.append("rewards=")
    return [key for key in keys if key.startswith(typed)]
