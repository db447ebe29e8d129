"""The section of the evaluation: held-out prompts, their sampling, and the test of a right response."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import Field

from pipeline.config.rewards import part_names
from pipeline.config.sections import Section
from pipeline.config.types import AnyPath, Conflicts, StopStrings

if TYPE_CHECKING:
    from pipeline.config.prompts import PromptsConfig
    from pipeline.config.schema import Config

MOST_FILES: Final = 8
"""Files with a metric of their own."""


class EvaluationConfig(Section):
    """Evaluation on held-out prompts, during a run and by `rlhfd eval`; docs/evaluation.md describes it."""

    files: list[AnyPath] = Field(default=[])
    """Files of held-out prompts, of the form of prompts.path; left out: no evaluation."""
    every: int = Field(default=10, ge=1, le=2**31)
    """Versions per evaluation, version 0 included; a version that is due gets no successor before its evaluation is
    complete."""
    num_generations: int = Field(default=1, ge=1, le=4096)
    """Responses per held-out prompt."""
    pass_k: int | None = Field(default=None, ge=1, le=4096)
    """The k of pass@k, at most num_generations; left out: num_generations."""
    pass_reward: float = Field(default=1.0, ge=-1e9, le=1e9)
    """Reward, or score of pass_function, from which a response counts as right."""
    pass_function: str | None = Field(default=None, min_length=1)
    """Name of one of rewards, as it stands there (judge, judge-2 of two of one name), or label of a reward model: a
    response is right by its score alone, before the weight; left out: by the whole reward."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature, 0: the most likely token; left out: rollout.temperature."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """As rollout.top_p, which it is if left out."""
    top_k: int | None = Field(default=None, ge=0)
    """As rollout.top_k, which it is if left out."""
    min_p: float | None = Field(default=None, ge=0, lt=1)
    """As rollout.min_p, which it is if left out."""
    max_new_tokens: int | None = Field(default=None, ge=1, lt=2**20)
    """Maximum tokens of a response; left out: as in the rollouts."""
    stop: StopStrings | None = None
    """As rollout.stop, which it is if left out."""
    batch_size: int | None = Field(default=None, ge=1)
    """Held-out prompts per ticket; left out: as many rows as a ticket of rollouts."""
    keep_best: bool = True
    """Whether the checkpoint of the best evaluation is kept, as checkpoints/best: highest pass@1, then highest mean
    reward."""


def names_of(files: list[Path]) -> list[str]:
    """Return a short name for each file: its own without suffixes, with a number where two would be the same."""
    # The name of the summary of all files.
    names = ["all"]
    for file in files:
        name = file.name.partition(".")[0] or file.name
        numbered = (f"{name}-{number}" for number in range(2, len(files) + 3))
        names.append(next(each for each in numbered if each not in names) if name in names else name)
    return names[1:]


def held_out(config: Config, file: Path | str) -> PromptsConfig:
    """Return the section of a held-out file: columns, split and template of the run's prompts, without filters."""
    filters = ("min_characters", "max_characters", "pass_rate_column", "min_pass_rate", "max_pass_rate", "curriculum")
    none = {name: type(config.prompts).model_fields[name].default for name in (*filters, "shuffle")}
    return config.prompts.model_copy(update={"path": str(file), "sources": [], **none})


def prompts_per_ticket(config: Config) -> int:
    """Return the held-out prompts of one ticket."""
    rows = config.prompts_per_ticket * config.group_size
    return config.evaluation.batch_size or max(1, rows // config.evaluation.num_generations)


def conflicts_of_evaluation(config: Config) -> Conflicts:
    """Yield the conflicts between keys of the evaluation."""
    evaluation, longest = config.evaluation, config.lengths.response or config.lengths.row - 1
    generations, names = evaluation.num_generations, part_names(config)
    if len(evaluation.files) > MOST_FILES:
        yield ("evaluation.files",), f"must name at most {MOST_FILES} files, got {len(evaluation.files)}"
    if (evaluation.pass_k or 1) > generations:
        message = f"must be at most the {generations} of evaluation.num_generations, got {evaluation.pass_k}"
        yield ("evaluation.pass_k", "evaluation.num_generations"), message
    if evaluation.pass_function is not None and evaluation.pass_function not in names:
        message = f"must be one of rewards ({', '.join(names) or 'none'}), got {evaluation.pass_function}"
        yield ("evaluation.pass_function", "rewards"), message
    if evaluation.temperature == 0 and generations > 1:
        message = "must be 1 with evaluation.temperature = 0, where all responses to a prompt are equal"
        yield ("evaluation.num_generations", "evaluation.temperature"), f"{message}, got {generations}"
    if evaluation.max_new_tokens is not None and evaluation.max_new_tokens > longest:
        message = f"must be at most the {longest} tokens that a response of a rollout has"
        keys = ("evaluation.max_new_tokens", "rollout.max_new_tokens", "rollout.max_length")
        yield keys, f"{message}, got {evaluation.max_new_tokens}"
