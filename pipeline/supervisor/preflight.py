"""Checks of the files that a configuration names, before a start."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pipeline import prompts
from pipeline.config import user_modules
from pipeline.config.load import FOLDER_KEYS, MODEL_KEYS, SECRET_KEYS, LoadedConfig, get
from pipeline.config.types import BUILTIN_PREFIX
from pipeline.errors import ConfigError
from pipeline.supervisor import placement


def problems_of_files(loaded: LoadedConfig) -> list[str]:
    """Return the problems of the models, prompts, secrets, GPUs and folders in a configuration, a line each."""
    errors = []
    for key in MODEL_KEYS:
        source = get(loaded.config, key)
        if source is None or source.startswith(BUILTIN_PREFIX):
            continue
        if not Path(source).is_dir():
            errors.append(f"{loaded.where(key)}: no such directory: {source} (models are local, none is downloaded)")
        elif not (Path(source) / "config.json").is_file() and (Path(source) / "adapter_config.json").is_file():
            errors.append(f"{loaded.where(key)}: {source} is a LoRA adapter: merge it into its model first")
        elif not (Path(source) / "config.json").is_file():
            errors.append(f"{loaded.where(key)}: no config.json in {source}: not a model that transformers saved")
    if not loaded.config.prompts.path.startswith(BUILTIN_PREFIX):
        try:
            prompts.check(loaded.config.prompts.path)
        except ConfigError as error:
            # Errors in the prompts' content begin with their place in that file.
            where, name = loaded.where("prompts.path"), "prompts.path:"
            errors += [line.replace(name, f"{where}:", line.startswith(name)) for line in str(error).splitlines()]
    places = _module_folders(loaded)
    for name in own_modules(loaded):
        if problem := user_modules.missing(name, places):
            errors.append(f"{loaded.where('rollout.reward_functions')}: {problem}")
    errors += [problem for key in SECRET_KEYS if (problem := _problem_of_secret(loaded, key))]
    try:
        placement.place(loaded.config, placement.visible_gpus(os.environ), [])
    except ConfigError as error:
        errors.append(loaded.placed(str(error)))
    for key in FOLDER_KEYS:
        folder = get(loaded.config, key)
        nearest = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
        if not nearest.is_dir():
            errors.append(f"{loaded.where(key)}: {nearest} is not a directory")
        elif not os.access(nearest, os.W_OK | os.X_OK, effective_ids=True):
            errors.append(f"{loaded.where(key)}: {nearest} cannot be written by uid {os.geteuid()}")
    return errors


def own_modules(loaded: LoadedConfig) -> list[str]:
    """Return the reward functions of the user that this machine imports; in a cluster the actors' machines do."""
    if loaded.config.cluster.engine == "ray":
        return []
    return [name for name in loaded.config.rollout.reward_functions if not name.startswith("pipeline.")]


def problems_of_imports(loaded: LoadedConfig) -> list[str]:
    """Import the modules of the reward functions in a process of its own; return the problems, a line each."""
    if not (names := own_modules(loaded)):
        return []
    found = user_modules.problems_of_import(names, _module_folders(loaded))
    return [f"{loaded.where('rollout.reward_functions')}: {problem}" for problem in found]


def _module_folders(loaded: LoadedConfig) -> list[str]:
    given = {} if loaded.path is None else {user_modules.FOLDER_VARIABLE: str(loaded.path.absolute().parent)}
    return user_modules.folders(given)


def _problem_of_secret(loaded: LoadedConfig, key: str) -> str:
    """Return the problem of a file of the HTTP server, else an empty text; the server itself checks its content."""
    path: Path | None = get(loaded.config, key)
    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        return f"{loaded.where(key)}: cannot read {path}: {error.strerror}"
    if key != "metrics.tls_cert" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"{loaded.where(key)}: {path} is open to other users, it must have mode 0600: chmod 600 {path}"
    return ""
