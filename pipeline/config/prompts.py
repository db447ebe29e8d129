"""The section of the prompts: their files, columns, filters and template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from pipeline.config.sections import Section
from pipeline.config.types import AnyPath, Conflicts, Source

if TYPE_CHECKING:
    from pipeline.config.schema import Config

CACHED_PREFIX: Final = "datasets:"
"""Begin of a path that is the name of a data set in the local cache of Hugging Face."""

_OF_THE_TEMPLATE: Final = ("system_prompt", "template_arguments", "tools_file", "tools_column")
"""Keys that the chat template alone reads."""

# The arguments of `apply_chat_template` that rlhfd gives itself.
_OWN_ARGUMENTS: Final = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "return_dict", "return_tensors",
    "tokenize", "tools",
)  # fmt: skip


def _check_arguments(value: object) -> object:
    if not isinstance(value, dict) or any(type(one) not in (bool, int, float, str) for one in value.values()):
        raise PydanticCustomError("arguments", "must be a table of texts, numbers, true and false")
    if own := [name for name in value if name in _OWN_ARGUMENTS]:
        raise PydanticCustomError("arguments", "must not name {own}, which rlhfd sets itself", {"own": own[0]})
    return value


TemplateArguments = Annotated[
    dict[str, Any], BeforeValidator(_check_arguments, json_schema_input_type=dict[str, bool | int | float | str])
]


def _parse_flag(value: object) -> object:
    # As command lines write it.
    return bool(value) if type(value) is int and value in (0, 1) else value


Flag = Annotated[bool, BeforeValidator(_parse_flag, json_schema_input_type=bool | Annotated[int, Field(ge=0, le=1)])]


class PromptSourceConfig(Section):
    """One of several sources of prompts, which are mixed by weight."""

    path: Source
    """File, folder or name of a data set, as prompts.path."""
    weight: float = Field(default=1.0, gt=0, le=1e9)
    """Share of the prompts, relative to the weights of the other sources."""
    split: str | None = Field(default=None, min_length=1)
    """As prompts.split; left out: that key."""
    prompt_column: str | None = Field(default=None, min_length=1)
    """As prompts.prompt_column; left out: that key."""
    answer_column: str | None = Field(default=None, min_length=1)
    """As prompts.answer_column; left out: that key."""


class PromptsConfig(Section):
    """The prompts: their files, columns, filters and template."""

    path: Source = "builtin:sort-digits"
    """JSON lines of {"prompt": ..., "answer": ..., "images": [...]}, Parquet, Arrow, a folder of such files, or
    "datasets:NAME" or "datasets:NAME:SUBSET" for a data set in the local cache (docs/data.md)."""
    template: Literal["auto", "none", "chat"] = "auto"
    """Prompts that get the tokenizer's chat template: lists of messages (auto), none, or all (chat)."""
    sources: list[PromptSourceConfig] = Field(default=[])
    """Several sources in place of path, each with its weight."""
    split: str = Field(default="train", min_length=1)
    """Split of a folder or of a data set by name."""
    prompt_column: str = Field(default="prompt", min_length=1)
    """Column of the prompt; a dot enters a column of objects."""
    answer_column: str | None = Field(default=None, min_length=1)
    """Column of the answer, which every row must have; a dot enters a column of objects; left out: answer, in the rows
    that have one."""
    min_characters: int = Field(default=0, ge=0, le=2**31)
    """Minimum characters of a prompt; rows with fewer are left out."""
    max_characters: int | None = Field(default=None, ge=1, le=2**31)
    """Maximum characters of a prompt; rows with more are left out."""
    pass_rate_column: str | None = Field(default=None, min_length=1)
    """Column of the share of a prompt's responses that passed, 0 to 1, which every row must have; `rlhfd eval
    --pass-rates` writes it."""
    min_pass_rate: float = Field(default=0.0, ge=0, le=1)
    """Minimum pass rate; rows below are left out."""
    max_pass_rate: float = Field(default=1.0, ge=0, le=1)
    """Maximum pass rate; rows above are left out."""
    shuffle: Flag = True
    """Whether the rows of each epoch are mixed, in an order that follows from the seed; false, or 0: in each epoch the
    order of the files."""
    curriculum: Literal["none", "easy_first"] = "none"
    """Order of the first epoch: all rows mixed, or "easy_first", in tenths of the rows from the highest pass rate to
    the lowest; later epochs are mixed."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """System message before each prompt that has none; all prompts then get the chat template."""
    template_arguments: TemplateArguments = Field(default={})
    """Further keywords of the chat template, such as {enable_thinking = false}; all prompts then get it."""
    tools_file: AnyPath | None = None
    """JSON list of the functions that the chat template offers as tools; all prompts then get it."""
    tools_column: str | None = Field(default=None, min_length=1)
    """Column with such a list, in the rows that have one."""

    @property
    def files(self) -> list[PromptSourceConfig]:
        """The sources in force, each with its own split and columns."""
        sources = self.sources or [PromptSourceConfig(path=self.path)]
        return [
            source.model_copy(
                update={
                    "split": source.split or self.split,
                    "prompt_column": source.prompt_column or self.prompt_column,
                    "answer_column": source.answer_column or self.answer_column,
                }
            )
            for source in sources
        ]

    @property
    def needs_template(self) -> bool:
        """Whether a key is set that only the chat template reads."""
        return any(getattr(self, key) for key in _OF_THE_TEMPLATE)

    def with_path(self, before: str, after: Path) -> PromptsConfig:
        """Return the section with a path of its own or of its sources replaced."""
        if not self.sources:
            return self.model_copy(update={"path": str(after)}) if self.path == before else self
        sources = [
            source.model_copy(update={"path": str(after)}) if source.path == before else source
            for source in self.sources
        ]
        return self.model_copy(update={"sources": sources})


def identity_of_prompts(prompts: PromptsConfig) -> str:
    """Return the part of a run's identity: a key that is not set is not part of it."""
    first = prompts.model_dump_json(include={"path", "template"})
    others = prompts.model_dump_json(exclude={"path", "template"}, exclude_defaults=True)
    return first if others == "{}" else first + others


def identifying_keys(prompts: PromptsConfig) -> dict[str, Any]:
    """Return the keys and values of `identity_of_prompts`."""
    others = prompts.model_dump(mode="json", exclude={"path", "template"}, exclude_defaults=True)
    return {"path": prompts.path, "template": prompts.template, **others}


def conflicts_of_prompts(config: Config) -> Conflicts:
    """Yield the conflicts between keys of the prompts."""
    prompts, fields = config.prompts, PromptsConfig.model_fields
    if prompts.sources and prompts.path != fields["path"].default:
        yield ("prompts.path", "prompts.sources"), "must be left out with prompts.sources, which take its place"
    for kind in ("characters", "pass_rate"):
        most, least = getattr(prompts, f"max_{kind}"), getattr(prompts, f"min_{kind}")
        if most is not None and most < least:
            message = f"must be at least the {least} of prompts.min_{kind}, got {most}"
            yield (f"prompts.max_{kind}", f"prompts.min_{kind}"), message
    by_rate = ("min_pass_rate", "max_pass_rate", "curriculum")
    used = [name for name in by_rate if getattr(prompts, name) != fields[name].default]
    if used and prompts.pass_rate_column is None:
        yield (f"prompts.{used[0]}", "prompts.pass_rate_column"), "needs prompts.pass_rate_column"
    if not prompts.shuffle and prompts.curriculum != "none":
        yield ("prompts.shuffle", "prompts.curriculum"), 'must be true with prompts.curriculum = "easy_first"'
    if prompts.template == "none" and prompts.needs_template:
        given = next(key for key in _OF_THE_TEMPLATE if getattr(prompts, key))
        yield (f"prompts.{given}", "prompts.template"), 'must be left out with prompts.template = "none"'
