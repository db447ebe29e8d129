"""Checks of the files that a configuration names, before a start."""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import os
import re
import stat
import subprocess
import sys
from collections.abc import Container, Iterable
from pathlib import Path

from pipeline import sort_digits
from pipeline.config import own_model, user_modules
from pipeline.config.evaluation import held_out
from pipeline.config.load import FOLDER_KEYS, FUNCTION_KEYS, MODEL_KEYS, SECRET_KEYS, LoadedConfig, get
from pipeline.config.model_files import (
    VLLM_IMAGE_MODELS,
    has_images,
    model_type,
    problem_of_model,
    problem_of_parts,
    problem_of_pointers,
)
from pipeline.config.optimizers import missing_package as missing_optimizer
from pipeline.config.positions import problem_of_positions
from pipeline.config.rewards import OwnReward, missing_package, reward_models
from pipeline.config.schema import Config
from pipeline.config.sections import missing_tracker
from pipeline.config.types import BUILTIN_PREFIX, stop_sequences_of
from pipeline.config.vllm_release import refusal_of_vllm
from pipeline.config.vocabularies import NO_IMAGES, problem_of_stop_tokens, problem_of_vocabulary
from pipeline.errors import ConfigError
from pipeline.prompts.check import check
from pipeline.prompts.rendering import rendering_of
from pipeline.prompts.source import PromptSource
from pipeline.supervisor import placement

Problems = Iterable[tuple[str, str]]
"""The problem of each key; an empty text is none."""

_PROMPTS_SEEN = 256
_START_CHECK = "pipeline.rollout.start_check"
_START_CHECK_S = 300.0


def problems_of_files(loaded: LoadedConfig, *, unused: Container[str] = ()) -> list[str]:
    """Return the problems of the models, prompts, secrets, GPUs and folders in a configuration, a line each.

    Args:
        loaded: The configuration.
        unused: The keys of `own_model.NEEDED` and `FOLDER_KEYS` that the command can do without.
    """
    if errors := _placed(loaded, _unreadable_models(loaded.config)):
        # Nearly every check below reads them.
        return errors
    return [
        *_problems_of_own_model(loaded, unused),
        *_placed(loaded, _problems_of_models(loaded)),
        *_problems_of_prompts(loaded),
        *_placed(loaded, _problems_of_packages(loaded)),
        *_placed(loaded, _problems_of_secrets(loaded.config)),
        *_problems_of_devices(loaded),
        *_placed(loaded, ((key, text) for key, text in _problems_of_folders(loaded.config) if key not in unused)),
    ]


def _placed(loaded: LoadedConfig, found: Problems) -> list[str]:
    return [f"{loaded.where(key)}: {problem}" for key, problem in found if problem]


def _problems_of_models(loaded: LoadedConfig) -> Problems:
    config, actor = loaded.config, Path(loaded.config.model.actor)
    for key, source in _models(config):
        folder = Path(source)
        if not folder.is_dir():
            yield key, _no_directory(loaded, folder)
        elif not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
            yield key, f"{folder} is a LoRA adapter: merge it into its model first"
        elif not (folder / "config.json").is_file():
            found = sorted(folder.glob("snapshots/*/config.json"))
            advice = f"take {found[-1].parent}" if found else "not a model that transformers saved"
            yield key, f"no config.json in {folder}: {advice}"
        elif (folder / "adapter_config.json").is_file():
            # transformers would load the adapter's base model, by the name in that file.
            yield key, f"{folder} has config.json and adapter_config.json: remove the one that is not used"
        else:
            is_actor, row = key == "model.actor", config.lengths.row
            engine = config.rollout.engine if is_actor else ""
            packed = config.trainer.packing and key in ("model.actor", "model.reference", "model.critic")
            problem = problem_of_model(folder, is_actor=is_actor, is_trained=is_actor or key == "model.critic")
            problem = problem or problem_of_positions(folder, row, engine=engine, packed=bool(packed))
            yield key, problem
            if is_actor and config.rollout.tensor_parallel > 1 and not problem:
                yield "rollout.tensor_parallel", problem_of_parts(folder, config.rollout.tensor_parallel)
    if config.rollout.quantization != "none" and has_images(actor):
        problem = f'must be "none": {actor} is a vision-language model, which is not quantized'
        yield "rollout.quantization", problem
    yield from _problems_of_vocabularies(config)
    stops = stop_sequences_of(config.rollout.stop_token_ids)
    yield "rollout.stop_token_ids", problem_of_stop_tokens(actor, stops)
    yield "model.lora_adapter", _problem_of_adapter(loaded)


def _problems_of_prompts(loaded: LoadedConfig) -> list[str]:
    """Return the problems of prompts, held-out prompts and templates; one in a file's content begins with its place."""
    config, found = loaded.config, []
    key = "prompts.sources" if config.prompts.sources else "prompts.path"
    for problems_of in (check, rendering_of):
        try:
            problems_of(config.prompts)
        except ConfigError as error:
            found += [loaded.placed(line) for line in str(error).splitlines()]
        except OSError as error:
            found.append(f"{loaded.where(key)}: cannot read {error.filename}: {error.strerror}")
            break
    if problem := _problem_of_images(config):
        found.append(f"{loaded.where('rollout.engine')}: {problem}")
    where, name = loaded.where("evaluation.files"), "prompts.path:"
    for file in config.evaluation.files:
        try:
            check(held_out(config, file))
        except ConfigError as error:
            found += [line.replace(name, f"{where}:", line.startswith(name)) for line in str(error).splitlines()]
        except OSError as error:
            found.append(f"{where}: cannot read {error.filename}: {error.strerror}")
    return found


def _problems_of_packages(loaded: LoadedConfig) -> Problems:
    """Yield the functions, and the packages that rewards, optimizer and trackers need, that are not there."""
    config, searched = loaded.config, _module_folders(loaded)
    yield from ((key, user_modules.missing(name, searched)) for key, name, _ in _own_functions(config))
    if config.cluster.engine == "local":
        yield from (("rewards", missing_package(reward.name)) for reward in config.rewards)
    yield "trainer.optimizer", missing_optimizer(config.trainer.optimizer)
    yield from (("metrics.tracker", missing_tracker(name)) for name in config.metrics.tracker)


def _problems_of_devices(loaded: LoadedConfig) -> list[str]:
    try:
        placement.assign(loaded.config, placement.visible_gpus(os.environ), [])
    except ConfigError as error:
        return [loaded.placed(str(error))]
    return []


def _problems_of_folders(config: Config) -> Problems:
    for key in FOLDER_KEYS:
        yield key, _problem_of_folder(get(config, key))
    daemon = config.daemon
    if os.path.realpath(daemon.state_dir) == os.path.realpath(daemon.runtime_dir):
        # Each has a lock of its own, in a file of the same name.
        yield "daemon.state_dir", f"{daemon.state_dir} is daemon.runtime_dir too: give them a folder each"


def _problem_of_folder(folder: Path) -> str:
    """Return why files cannot be made in a folder, which may not exist yet; else an empty text."""
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not nearest.is_dir():
        return f"{nearest} is not a directory"
    is_writable = os.access(nearest, os.W_OK | os.X_OK, effective_ids=True)
    return "" if is_writable else f"{nearest} cannot be written by uid {os.geteuid()}"


def _unreadable_models(config: Config) -> Problems:
    """Yield the problems of models that this user may not read."""
    files = [(key, Path(source, "config.json")) for key, source in _models(config)]
    if config.model.lora_adapter is not None:
        files.append(("model.lora_adapter", Path(config.model.lora_adapter, "adapter_config.json")))
    for key, file in files:
        try:
            file.open("rb").close()
        except (FileNotFoundError, NotADirectoryError):
            pass  # other checks say more
        except OSError as error:
            yield key, f"cannot read {file.parent} as uid {os.geteuid()}: {error.strerror}"


def _no_directory(loaded: LoadedConfig, source: Path) -> str:
    """Return the problem of a model that is no directory, with the advice for an id of the hub if it may be one."""
    advice = "models are local, none is downloaded"
    folder = Path.cwd() if loaded.path is None else loaded.path.absolute().parent
    # Paths are absolute by now: an id has become one below the folder of the configuration.
    is_word = source.parent == folder
    name = "/".join(source.parts[-1 if is_word else -2 :]).partition("@")[0]
    # The folder of models, as in the examples, and no owner.
    name = re.sub(r"^(models|checkpoints)/", "OWNER/", name)
    may_be_id = folder in source.parents and not source.exists()
    if may_be_id and (re.search(r"[\d-]", name) if is_word else not source.parent.exists()):
        advice += f"; for a model of the hub: hf download {name} --local-dir FOLDER, and that folder here"
    return f"no such directory: {source} ({advice})"


def _problem_of_adapter(loaded: LoadedConfig) -> str:
    """Return the problem of the adapter to begin with, else an empty text."""
    if loaded.config.model.lora_adapter is None:
        return ""
    folder = Path(loaded.config.model.lora_adapter)
    if not folder.is_dir():
        return _no_directory(loaded, folder)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            return f"no {name} in {folder}: no adapter of peft"
    return problem_of_pointers(folder)


def _problems_of_own_model(loaded: LoadedConfig, unused: Container[str]) -> list[str]:
    """Return the lack of a reward or of prompts for a model of its own: those of the embedded task are not for it."""
    missing = own_model.missing(loaded.config.model.actor, loaded.origins)
    # Of a folder that is not there model.actor's own message is enough.
    if not missing or not Path(loaded.config.model.actor).is_dir():
        return []
    location = loaded.origins["model.actor"].location
    return [f"{location}: {key}: {message}" for key, message in missing.items() if key not in unused]


def _problems_of_vocabularies(config: Config) -> Problems:
    """Yield the problems of the models that read the actor's token ids."""
    actor, rewards = Path(config.model.actor), {model.key: model for model in reward_models(config)}
    for key, source in _models(config):
        reward = rewards.get(key)
        if reward is not None and reward.tokenizer == "own":
            yield reward.tokenizer_key, NO_IMAGES if has_images(actor) else ""
        elif key != "model.actor" and (problem := problem_of_vocabulary(Path(source), actor)):
            advice = ""
            # An environment gives rows of several turns, which are no text of one prompt.
            if reward is not None and config.rollout.environment is None:
                advice = f'; {reward.tokenizer_key} = "own" gives it texts'
            yield key, f"{problem}{advice}"


def _models(config: Config) -> list[tuple[str, str]]:
    """Return key and folder of each model; those of the embedded task are left out."""
    found = [(key, get(config, key)) for key in MODEL_KEYS if key != "model.reward"]
    found += [(model.key, model.path) for model in reward_models(config)]
    return [(key, source) for key, source in found if source is not None and not source.startswith(BUILTIN_PREFIX)]


def _problem_of_images(config: Config) -> str:
    """Return the problem of an engine that takes no images of the model, else an empty text; it reads some prompts."""
    folder = Path(config.model.actor)
    if config.rollout.engine != "vllm" or not has_images(folder) or model_type(folder) in VLLM_IMAGE_MODELS:
        return ""
    sections = [config.prompts, *(held_out(config, file) for file in config.evaluation.files)]
    for section in sections:
        if any(part.path.startswith(BUILTIN_PREFIX) for part in section.files):
            continue
        # Another problem of a file is found elsewhere.
        with (
            contextlib.suppress(ConfigError, OSError),
            contextlib.closing(PromptSource(section, config.daemon.seed)) as source,
        ):
            for position in range(min(len(source), _PROMPTS_SEEN)):
                if (prompt := source.at(position)).images:
                    return (
                        f"vllm takes images for models of the type {', '.join(VLLM_IMAGE_MODELS)}, "
                        f"model.actor is of the type {model_type(folder)}, and {prompt.named} has images"
                    )
    return ""


def _own_functions(config: Config) -> list[tuple[str, str, str]]:
    """Return key, name and style of each function of the user's that this machine imports.

    In a cluster the actors' machines import those of workers.
    """
    own = (reward for reward in config.rewards if isinstance(reward, OwnReward))
    found = [("rewards", reward.name, str(reward.style)) for reward in own if not reward.name.startswith("pipeline.")]
    for key in FUNCTION_KEYS:
        style = user_modules.FACTORY if key == "rollout.environment" else user_modules.ANY
        found.append((key, get(config, key) or "", style))
    is_local = config.cluster.engine == "local"
    return [one for one in found if ":" in one[1] and (is_local or one[0].startswith("trainer."))]


def problems_of_imports(loaded: LoadedConfig) -> list[str]:
    """Import the modules of the user's functions in processes of their own; return the problems."""
    config, problems = loaded.config, []
    for key, functions in itertools.groupby(_own_functions(config), key=operator.itemgetter(0)):
        columns = _first_columns(config) if key == "rewards" else None
        named = [(name, style) for _, name, style in functions]
        found = user_modules.problems_of_import(named, _module_folders(loaded), columns)
        problems += [f"{loaded.where(key)}: {problem}" for problem in found]
    return problems


def _first_columns(config: Config) -> list[str] | None:
    """Return the further columns of the first prompts; None if they are not known."""
    if any(part.path.startswith(BUILTIN_PREFIX) for part in config.prompts.files):
        return None
    columns = dict[str, None]()
    try:
        with contextlib.closing(PromptSource(config.prompts, config.daemon.seed)) as source:
            for position in range(min(len(source), _PROMPTS_SEEN)):
                columns |= dict.fromkeys(source.at(position).columns)
    except (ConfigError, OSError):
        # It is found elsewhere.
        return None
    return list(columns)


def findings_of_start(loaded: LoadedConfig) -> tuple[list[str], list[str]]:
    """Return the problems and the notes of a start that need the libraries of models, found in a process of its own.

    The embedded model needs the engine alone.
    """
    config = loaded.config
    if config.model.actor.startswith(BUILTIN_PREFIX):
        needs_vllm = config.rollout.engine == "vllm" and config.cluster.engine == "local"
        return [loaded.placed(refusal)] if needs_vllm and (refusal := refusal_of_vllm()) else [], []
    variables = {} if loaded.path is None else {user_modules.FOLDER_VARIABLE: str(loaded.path.absolute().parent)}
    config = sort_digits.with_paths(config)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", _START_CHECK], input=config.model_dump_json(), capture_output=True, text=True,
            timeout=_START_CHECK_S, check=False, env={**os.environ, **variables},
        )  # fmt: skip
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return [], [f"model.actor: tokenizer, prompts and layers were not checked within {_START_CHECK_S:g} s"]
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [f"the check of the model ended with exit code {done.returncode}: {last}"], []
    return [loaded.placed(line) for problem in found["problems"] for line in problem.splitlines()], found["notes"]


def _module_folders(loaded: LoadedConfig) -> list[str]:
    given = {} if loaded.path is None else {user_modules.FOLDER_VARIABLE: str(loaded.path.absolute().parent)}
    return user_modules.folders(given)


def _problems_of_secrets(config: Config) -> Problems:
    for key in SECRET_KEYS:
        if (path := get(config, key)) is not None:
            try:
                read_secret(key, path)
            except ConfigError as error:
                yield key, str(error).removeprefix(f"{key}: ")


def read_secret(key: str, path: Path) -> bytes:
    """Return the content of the file that a key of `SECRET_KEYS` names, at most 1 MiB.

    Raises:
        ConfigError: If it cannot be read, or other users may read it and it is no certificate.
    """
    try:
        with path.open("rb") as file:
            is_open = os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
            if is_open and key != "metrics.tls_cert":
                raise ConfigError(f"{key}: {path} is open to other users, it must have mode 0600: chmod 600 {path}")
            return file.read(1 << 20)
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
