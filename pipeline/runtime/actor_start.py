"""The start of a role on another machine: the specification of its actor, and the entry of the actor's process."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
from pathlib import Path
from typing import Final

import xxhash

from pipeline.config import user_modules
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime import role_libraries

_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorSpec:
    """The part of an actor's specification that tells of the daemon's machine; the defaults are this process's.

    Attributes:
        config: The instance's configuration, as JSON.
        working_directory: Folder of the daemon's start; entered if it exists on the actor's machine too.
        modules: Folder of the configuration file, searched first for modules of the user's.
        release: Version of this package on the daemon's machine.
        code: Digest of its files there: checkouts of one release differ.
        libraries: Versions of torch and transformers there, without the name of their build.
        generation: Number of this start of the role: other code ends the first one alone, files may change under way.
    """

    config: str
    generation: int
    working_directory: str = dataclasses.field(default_factory=os.getcwd)
    modules: str = dataclasses.field(default_factory=lambda: os.environ.get(user_modules.FOLDER_VARIABLE, ""))
    release: str = dataclasses.field(default_factory=lambda: importlib.metadata.version("rlhfd"))
    code: str = dataclasses.field(default_factory=lambda: _code())
    libraries: dict[str, str] = dataclasses.field(default_factory=lambda: _libraries())


def _code() -> str:
    """Return a digest of the files of this package."""
    digest, folder = xxhash.xxh3_64(), Path(user_modules.__file__).parents[1]
    # Not the locks of an editor, which are links to nothing.
    for file in sorted(file for file in folder.rglob("*.py") if not file.name.startswith(".")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _libraries() -> dict[str, str]:
    return {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "transformers")}


def enter(spec: ActorSpec) -> Config:
    """Make an actor's process one of the daemon's: its environment, folder, search path and libraries.

    Returns:
        The configuration.

    Raises:
        ConfigError: If another release is installed here, or at the first start other code of the same one.
    """
    release = importlib.metadata.version("rlhfd")
    # Before the configuration is read, which may have keys that this release does not know.
    if release != spec.release:
        raise ConfigError(f"rlhfd {release} is installed, on the daemon's machine {spec.release}")
    if (code := _code()) != spec.code:
        other = f"the code of rlhfd is another one ({code}) than on the daemon's machine ({spec.code}): take one commit"
        if spec.generation <= 1:
            raise ConfigError(other)
        log.warning("%s", other)
    here = _libraries()
    if unlike := [f"{name} {here[name]}, not {there}" for name, there in spec.libraries.items() if here[name] != there]:
        log.warning("this machine has %s as the daemon's: numbers may differ", " and ".join(unlike))
    os.environ.update(_ENVIRONMENT)
    if os.path.isdir(spec.working_directory):
        # Modules of the user's are searched in the folder of the start, which is this process's.
        os.chdir(spec.working_directory)
    os.environ[user_modules.FOLDER_VARIABLE] = spec.modules
    user_modules.extend_path()
    config = Config.model_validate_json(spec.config)
    role_libraries.load((), config.model.actor)
    return config
