"""The import of the libraries that trainer, worker and setup have in common, without packages of no use to them.

transformers imports what is installed beside it, as pandas and pyarrow through scikit-learn. No role uses these, and
their import takes as long as all else together. They are hidden while the libraries are imported, so transformers takes
them as not installed for the life of the process; code of the user imports them as ever.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from pipeline.config import model_files

ROLES: Final = {
    "trainer": "pipeline.trainer.process",
    "rollout": "pipeline.rollout.process",
    "setup": "pipeline.trainer.setup",
}
"""Module by role; those that load torch."""

UNUSED: Final = ("pandas", "pyarrow", "scipy", "sklearn", "torchaudio", "torchvision")
"""Packages that transformers or torch would import."""

# Imported lazily by transformers at their first use; every role uses them.
_CLASSES = ("AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor", "PreTrainedTokenizerFast")
_EMBEDDED = "llama"


def load(modules: Iterable[str], model: str) -> None:
    """Import modules of roles, and the code of the actor's type of model ("" for the embedded one)."""
    with _without_garbage_collection(), _hidden(UNUSED):
        for name in modules:
            importlib.import_module(name)
        transformers = importlib.import_module("transformers")
        for name in _CLASSES:
            getattr(transformers, name)
        kind = model_type(model)
        if importlib.util.find_spec(f"transformers.models.{kind}") is not None:
            importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        _compile_conversions(kind)


def _compile_conversions(kind: str) -> None:
    """Have transformers make its table of conversions of weights, which it keeps for the life of a process.

    It compiles a thousand regular expressions at the first load of a model: half of the CPU time in which a role loads
    a small one.
    """
    conversions = importlib.import_module("transformers.conversion_mapping")
    # No part of its documented interface; without it the first load makes the table as ever.
    with contextlib.suppress(AttributeError):
        conversions.get_checkpoint_conversion_mapping(kind)


def model_type(model: str) -> str:
    """Return the type of a model by its folder's config.json; that of the embedded one if there is none."""
    # Not made yet, or broken: the role that loads the model reports it.
    return model_files.model_type(Path(model)) or _EMBEDDED


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector, a quarter of the time of imports: they make millions of objects and no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _hidden(packages: Iterable[str]) -> Iterator[None]:
    hidden = [name for name in packages if name not in sys.modules]
    for name in hidden:
        # An entry of None: its import fails, and `find_spec` says that it is not installed.
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
