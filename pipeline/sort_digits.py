"""The embedded task: a small language model that learns to sort digits, so that a first run needs no other files.

A prompt is 3 to 8 digits and ``>``; the right response is those digits in ascending order, ended by eos: ``7302>`` is
answered ``0237``. `pipeline.trainer.setup.prepare` makes, in one directory::

    recipe.json       arguments of `prepare` and sizes of the other files; written last
    prompts.jsonl     prompts with their answers
    model/            a Llama of 0.86 M parameters and its character tokenizer, warmed up by 68 supervised steps

After the warm-up the model solves about four prompts in ten when it samples, which leaves reinforcement learning
something to reward and something to gain. This module has the paths, the check and the reward function; it imports
neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.model_files import ModelSizes
from pipeline.config.schema import Config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

BUILTIN = "builtin:sort-digits"
PROMPT_COUNT = 8192
WARMUP_STEPS = 68
SYMBOLS = ("<pad>", "<eos>", "<unk>", *"0123456789", *"abcdefghijklmnopqrstuvwxyz", *" >+-*/=,.:?")
"""The vocabulary; the index of a symbol is its token id."""
HIDDEN, INNER, LAYERS, HEADS = 128, 384, 4, 4
"""Widths of the hidden states and of the MLP, decoder layers, attention heads."""
_RECIPE_VERSION = 1


def directory_of(state_dir: str | os.PathLike[str]) -> Path:
    """Return the directory of the task, under the daemon's state directory."""
    return Path(state_dir) / "sort-digits"


def model_directory(directory: str | os.PathLike[str]) -> Path:
    """Return the Hugging Face directory of model and tokenizer in a directory that `prepare` made."""
    return Path(directory) / "model"


def prompts_path(directory: str | os.PathLike[str]) -> Path:
    """Return the prompts file in a directory that `prepare` made."""
    return Path(directory) / "prompts.jsonl"


def sizes() -> ModelSizes:
    """Return the sizes of the embedded model, whether or not it is made yet."""
    matrices = {
        **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
        **{f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")},
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(SYMBOLS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
        **{f"model.layers.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in matrices.items()},
    }
    return ModelSizes(tensors, LAYERS, HIDDEN, INNER, 2 * HIDDEN, len(SYMBOLS), HEADS)


def with_paths(config: Config) -> Config:
    """Return the configuration with the embedded model and prompts replaced by their paths, which may not exist yet."""
    directory = directory_of(config.daemon.state_dir)
    models = {
        name: str(model_directory(directory))
        for name in ("actor", "reference", "critic")
        if getattr(config.model, name) == BUILTIN
    }
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=models),
            "prompts": config.prompts.with_path(BUILTIN, prompts_path(directory)),
        }
    )


def is_used(config: Config) -> bool:
    """Return whether a configuration uses the embedded model or prompts."""
    return BUILTIN in (
        config.model.actor, config.model.reference, config.model.critic, *(one.path for one in config.prompts.files)
    )  # fmt: skip


def is_prepared(directory: str | os.PathLike[str], *, model_seed: int = 0, warmup_steps: int = WARMUP_STEPS) -> bool:
    """Return whether `prepare` with the same arguments has completed in a directory; no torch, a fraction of a ms."""
    directory = Path(directory)
    try:
        recipe = json.loads((directory / "recipe.json").read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(recipe, dict) or "file_bytes" not in recipe:
        return False
    # Sizes, because a power failure may leave empty files.
    made: dict[str, int] = recipe.pop("file_bytes")
    return recipe == recipe_of(model_seed, warmup_steps) and made.items() <= file_bytes_of(directory).items()


def exact_answer(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    gt_answer: str,
    response_start: int,
    response_end: int,
    tokenizer: PreTrainedTokenizerFast,
    **_: object,
) -> float:
    """Reward function: 1 for the exact answer ended by eos, else 0 (about 20 us a row).

    Args:
        input_ids: ``(S,)`` int64, prompt and response.
        attention_mask: ``(S,)``, not used.
        gt_answer: The right answer.
        response_start: First column of the response.
        response_end: Column after the response's last token, which is eos unless the response was cut.
        tokenizer: The tokenizer that decodes the response.

    Returns:
        1.0 or 0.0.
    """
    response = input_ids[response_start:response_end].tolist()
    # Most wrong responses are cut at max_length: one comparison detects them without decoding.
    if not response or response[-1] != tokenizer.eos_token_id:
        return 0.0
    return float(tokenizer.decode(response[:-1]) == gt_answer)


def recipe_of(model_seed: int, warmup_steps: int) -> dict[str, int]:
    """Return the arguments that determine the files, as recorded in ``recipe.json``."""
    return {
        "version": _RECIPE_VERSION,
        "model_seed": model_seed,
        "warmup_steps": warmup_steps,
        "prompts": PROMPT_COUNT,
    }


def file_bytes_of(directory: Path) -> dict[str, int]:
    """Return the size in bytes of each file in `directory` by relative path, without ``recipe.json``."""
    made = [path for path in directory.rglob("*") if path.is_file() and path.name != "recipe.json"]
    return {str(path.relative_to(directory)): path.stat().st_size for path in made}
