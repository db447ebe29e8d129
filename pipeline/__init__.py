"""rlhfd: rollout, buffer and training processes of RLHF, kept running on a GPU server.

The names below are the library's public ones. Each is imported when it is first asked for, so that `import pipeline`
loads no torch: the supervisor, the buffer and the command line run without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.experience.batching import (
        make_experience_batch,
        remove_padding_in_sequences,
        split_experience_batch,
        zero_pad_sequences,
    )
    from pipeline.experience.types import BufferItem, BufferItemVL, Experience, ExperienceVL, is_vl_experience
    from pipeline.replay.buffer import DetachedReplayBuffer
    from pipeline.rollout.maker import ExperienceMaker, NaiveExperienceMaker
    from pipeline.trainer.connection import connect

__all__ = [
    "BufferItem",
    "BufferItemVL",
    "DetachedReplayBuffer",
    "Experience",
    "ExperienceMaker",
    "ExperienceVL",
    "NaiveExperienceMaker",
    "connect",
    "is_vl_experience",
    "make_experience_batch",
    "remove_padding_in_sequences",
    "split_experience_batch",
    "zero_pad_sequences",
]

_MODULES = {
    "experience.batching": (
        "make_experience_batch",
        "remove_padding_in_sequences",
        "split_experience_batch",
        "zero_pad_sequences",
    ),
    "experience.types": ("BufferItem", "BufferItemVL", "Experience", "ExperienceVL", "is_vl_experience"),
    "rollout.maker": ("ExperienceMaker", "NaiveExperienceMaker"),
    "replay.buffer": ("DetachedReplayBuffer",),
    "trainer.connection": ("connect",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


# Hidden from type checkers, which would take any attribute of the package for one that exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        # From here on the name is found without this function.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
