"""The findings of a worker's start that need the libraries of models, and no weights: for `rlhfd config check`.

It runs in a process of its own, so that the command line loads no torch. Each finding has the words of the start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from pipeline.config import user_modules
from pipeline.config.evaluation import held_out
from pipeline.config.prompts import PromptsConfig
from pipeline.config.rewards import reward_functions, reward_models
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, PromptError
from pipeline.models.loading import load_tokenizer, refuse_large_tokenizer, sees_images, shell
from pipeline.models.lora import adapt, target_layers
from pipeline.prompts.rendering import Rendering, rendering_of
from pipeline.prompts.source import PromptSource
from pipeline.rollout.first_rollouts import TRIED_PROMPTS, note_first_prompts
from pipeline.rollout.generation.vllm.releases import refuse_unable_to_quantize, refuse_unsuitable
from pipeline.rollout.reward.functions import load_reward_function
from pipeline.rollout.roller import rendered
from pipeline.rollout.sampling import end_tokens
from pipeline.rollout.vision_prompts import VisionPrompts

_T = TypeVar("_T")


def findings(config: Config) -> dict[str, list[str]]:
    """Return the "problems" that would end a start, each begun by its key, and the "notes" that it would log."""
    notes = _Notes()
    logging.getLogger("pipeline").addHandler(notes)
    try:
        check = _Check()
        check.of_packages(config)
        tokenizer = check.tried(load_tokenizer, config.model.actor)
        if tokenizer is not None:
            check.of_model(config, tokenizer)
            check.of_prompts(config, tokenizer)
    finally:
        logging.getLogger("pipeline").removeHandler(notes)
    return {"problems": check.problems, "notes": notes.texts}


class _Check:
    """The checks, and the problems that they have found."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def tried(self, load: Callable[..., _T], *arguments: Any, **keywords: Any) -> _T | None:
        """Return the result of a call; None if it ended with a problem, which is kept."""
        try:
            return load(*arguments, **keywords)
        except ConfigError as error:
            # Several steps read the same files.
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return None

    def of_packages(self, config: Config) -> None:
        if config.cluster.engine != "local":
            # The actors' machines have the libraries.
            return
        if config.rollout.engine == "vllm":
            self.tried(refuse_unsuitable)
            if config.rollout.quantization != "none":
                self.tried(refuse_unable_to_quantize)
        # Functions of the user are imported elsewhere.
        for reward in reward_functions(config):
            if ":" not in reward.name or reward.name.startswith("pipeline."):
                self.tried(load_reward_function, reward)

    def of_model(self, config: Config, tokenizer: Any) -> None:
        actor = config.model.actor
        outline = self.tried(shell, actor, dtype=config.model.dtype)
        if outline is None:
            return
        vocabulary = outline.config.get_text_config().vocab_size
        self.tried(refuse_large_tokenizer, tokenizer, vocabulary, actor)
        if config.model.lora_adapter is not None:
            self.tried(adapt, outline, config.model, seed=config.daemon.seed)
        elif config.model.lora_rank:
            self.tried(target_layers, outline, config.model.lora_targets)
        for model in reward_models(config):
            if model.tokenizer == "own":
                self.tried(load_tokenizer, model.path, field=model.key)
        end_tokens(config, tokenizer, vocabulary)

    def of_prompts(self, config: Config, tokenizer: Any) -> None:
        rendering, vision = self.tried(rendering_of, config.prompts), None
        takes_images = self.tried(sees_images, config.model.actor)
        if takes_images:
            vision = self.tried(VisionPrompts, config.model.actor, tokenizer)
        if rendering is None or takes_images is None or (takes_images and vision is None):
            return
        self.tried(_refuse_prompts, config, config.prompts, "prompts.path", tokenizer, rendering, vision)
        for file in config.evaluation.files:
            section = held_out(config, file)
            self.tried(_refuse_prompts, config, section, "evaluation.files", tokenizer, rendering, vision)
        self.tried(note_first_prompts, config, tokenizer)


def _refuse_prompts(
    config: Config, section: PromptsConfig, key: str, tokenizer: Any, rendering: Rendering, vision: VisionPrompts | None
) -> None:
    """Refuse a source of which none of the first prompts can be rendered.

    Raises:
        ConfigError: Then; or if a prompt needs a chat template and there is none.
    """
    last: PromptError | None = None
    with contextlib.closing(PromptSource(section, config.daemon.seed)) as source:
        for position in range(TRIED_PROMPTS):
            try:
                rendered(
                    source.at(position),
                    tokenizer,
                    rendering,
                    config.lengths,
                    vision,
                    cuts_prompts=config.rollout.long_prompts == "cut_left",
                )
            except PromptError as error:
                last = error
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from error
            else:
                return
    assert last is not None
    told = last.told(texts=config.daemon.log_texts)
    raise ConfigError(f"{key}: none of the first {TRIED_PROMPTS} prompts can be rolled out, the last one: {told}")


class _Notes(logging.Handler):
    """Keeps the warnings of the checks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


if __name__ == "__main__":
    user_modules.extend_path()
    # Whatever libraries print goes elsewhere: standard output has the findings alone.
    answers = os.dup(1)
    os.dup2(2, 1)
    found = findings(Config.model_validate_json(sys.stdin.read()))
    with open(answers, "w") as file:
        json.dump(found, file)
