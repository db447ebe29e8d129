"""The embedded task: a small language model that learns to sort digits, so that a first run needs nothing from outside.

A prompt is 3 to 8 digits and ``>``; the right response is those digits in ascending order, ended by eos: ``7302>`` is
answered ``0237``. `prepare` makes, in one directory::

    recipe.json       what the rest was made with; written last
    prompts.jsonl     prompts with their answers
    model/            a Llama of 0.86 M parameters and its character tokenizer, warmed up by 68 supervised steps

After the warm-up the model solves about four prompts in ten when it samples, which leaves reinforcement learning
something to reward and something to gain. Only `prepare` imports torch and transformers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.schema import Config
from pipeline.errors import DeadlineError

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

BUILTIN = "builtin:sort-digits"
PROMPT_COUNT = 8192
WARMUP_STEPS = 68

_RECIPE_VERSION = 1
_SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789", *"abcdefghijklmnopqrstuvwxyz", *" >+-*/=,.:?"]
_PAD, _EOS = 0, 1
_DIGITS_LEAST, _DIGITS_MOST = 3, 8
_WARMUP_ROWS = 64
_WARMUP_LEARNING_RATE = 2e-3
_WARMUP_BETAS = (0.9, 0.99)
_RISE_STEPS = 5
_IGNORED_LABEL = -100
_LOCK_RETRY_S = 0.05


def directory_of(state_dir: str | os.PathLike[str]) -> Path:
    """Where the daemon keeps the task: a directory under its state directory."""
    return Path(state_dir) / "sort-digits"


def model_directory(directory: str | os.PathLike[str]) -> Path:
    """The Hugging Face directory of model and tokenizer in a directory that `prepare` made."""
    return Path(directory) / "model"


def prompts_path(directory: str | os.PathLike[str]) -> Path:
    """The prompts in a directory that `prepare` made."""
    return Path(directory) / "prompts.jsonl"


def with_paths(config: Config) -> Config:
    """Return the configuration with the embedded model and prompts replaced by where they lie, or will."""
    directory = directory_of(config.daemon.state_dir)
    models = {
        name: str(model_directory(directory))
        for name in ("actor", "reference", "critic")
        if getattr(config.model, name) == BUILTIN
    }
    prompts = {"path": str(prompts_path(directory))} if config.prompts.path == BUILTIN else {}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=models),
            "prompts": config.prompts.model_copy(update=prompts),
        }
    )


def is_used(config: Config) -> bool:
    """Whether a configuration asks for the embedded model or prompts."""
    return BUILTIN in (config.model.actor, config.model.reference, config.model.critic, config.prompts.path)


def is_prepared(directory: str | os.PathLike[str], *, model_seed: int = 0, warmup_steps: int = WARMUP_STEPS) -> bool:
    """Whether `prepare` with the same arguments has completed there; imports nothing, takes a fraction of a ms."""
    directory = Path(directory)
    try:
        recipe = json.loads((directory / "recipe.json").read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(recipe, dict) or "file_bytes" not in recipe:
        return False
    # Sizes, because a power cut may leave files that are there and empty.
    made: dict[str, int] = recipe.pop("file_bytes")
    return recipe == _recipe(model_seed, warmup_steps) and made.items() <= _file_bytes(directory).items()


def prepare(
    directory: str | os.PathLike[str],
    *,
    model_seed: int = 0,
    warmup_steps: int = WARMUP_STEPS,
    timeout_s: float = 300.0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Make model, tokenizer and prompts, unless they are there; what is half-made or of another recipe is made again.

    The directory appears at once by a rename. Callers at the same time wait for the one that makes it. It takes about
    8 s on one thread; the random state of the caller is left as it was.

    Args:
        directory: The directory to make; its parents are made too.
        model_seed: Seed of the weights and of the warm-up's rows.
        warmup_steps: Supervised steps; fewer give a model that solves less.
        timeout_s: How long to wait, in seconds, for another caller to finish.
        progress: Called with (steps done, steps in all) after each supervised step.

    Raises:
        DeadlineError: If another caller held the lock for longer than `timeout_s`.
        OSError: If the directory cannot be written.
    """
    directory = Path(directory)
    if is_prepared(directory, model_seed=model_seed, warmup_steps=warmup_steps):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(f".{directory.name}.lock"), timeout_s):
        if is_prepared(directory, model_seed=model_seed, warmup_steps=warmup_steps):
            return
        partial = directory.with_name(f".{directory.name}.partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        _write_prompts(prompts_path(partial))
        _make_model(model_directory(partial), model_seed, warmup_steps, progress or (lambda done, total: None))
        recipe = {**_recipe(model_seed, warmup_steps), "file_bytes": _file_bytes(partial)}
        (partial / "recipe.json").write_text(json.dumps(recipe))
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)


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
        attention_mask: ``(S,)``, not looked at.
        gt_answer: The right answer.
        response_start: First column of the response.
        response_end: Column after the response's last token, which is its eos unless it was cut.
        tokenizer: The tokenizer that decodes the response.

    Returns:
        1.0 or 0.0.
    """
    response = input_ids[response_start:response_end].tolist()
    # Most wrong responses are cut at max_length: told by one comparison, without decoding.
    if not response or response[-1] != tokenizer.eos_token_id:
        return 0.0
    return float(tokenizer.decode(response[:-1]) == gt_answer)


def _recipe(model_seed: int, warmup_steps: int) -> dict[str, int]:
    return {
        "version": _RECIPE_VERSION,
        "model_seed": model_seed,
        "warmup_steps": warmup_steps,
        "prompts": PROMPT_COUNT,
    }


def _file_bytes(directory: Path) -> dict[str, int]:
    made = [path for path in directory.rglob("*") if path.is_file() and path.name != "recipe.json"]
    return {str(path.relative_to(directory)): path.stat().st_size for path in made}


def _digits(rng: random.Random) -> str:
    # random() alone is promised to give the same numbers on every Python version.
    length = _DIGITS_LEAST + int(rng.random() * (_DIGITS_MOST - _DIGITS_LEAST + 1))
    return "".join(str(int(rng.random() * 10)) for _ in range(length))


def _write_prompts(path: Path) -> None:
    rng = random.Random(0)
    with path.open("w", encoding="ascii") as file:
        for _ in range(PROMPT_COUNT):
            digits = _digits(rng)
            file.write(json.dumps({"prompt": f"{digits}>", "answer": "".join(sorted(digits))}) + "\n")


def _make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbol_ids = {symbol: token_id for token_id, symbol in enumerate(_SYMBOLS)}
    backend = Tokenizer(models.WordLevel(symbol_ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _make_model(path: Path, model_seed: int, warmup_steps: int, progress: Callable[[int, int], None]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(_SYMBOLS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=_PAD,
        bos_token_id=None,
        eos_token_id=_EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model_seed)
        model = LlamaForCausalLM(config)
        _warm_up(model, random.Random(model_seed), warmup_steps, progress)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _warm_up(
    model: LlamaForCausalLM, rng: random.Random, warmup_steps: int, progress: Callable[[int, int], None]
) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=_WARMUP_LEARNING_RATE, betas=_WARMUP_BETAS)
    # Without the fall at the end, rounding alone (another CPU, other threads) moves what is solved from 0.22 to 0.45.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _RISE_STEPS, 2 * (1 - step / max(warmup_steps, 1)))
    )
    model.train()
    with torch.enable_grad():
        for step in range(warmup_steps):
            input_ids, labels = _supervised_rows(rng)
            loss = model(input_ids=input_ids, attention_mask=input_ids != _PAD, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress(step + 1, warmup_steps)
    model.eval()


def _supervised_rows(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``7302>0237<eos>``, padded on the right, and labels that count the answer alone."""
    import torch

    symbol_ids = {symbol: token_id for token_id, symbol in enumerate(_SYMBOLS)}
    width = 2 * _DIGITS_MOST + 2
    input_ids = torch.full((_WARMUP_ROWS, width), _PAD)
    labels = torch.full((_WARMUP_ROWS, width), _IGNORED_LABEL)
    for row in range(_WARMUP_ROWS):
        digits = _digits(rng)
        token_ids = [symbol_ids[symbol] for symbol in [*digits, ">", *sorted(digits), "<eos>"]]
        answer = slice(len(digits) + 1, len(token_ids))
        input_ids[row, : len(token_ids)] = torch.tensor(token_ids)
        labels[row, answer] = input_ids[row, answer]
    return input_ids, labels


@contextlib.contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock of the kernel's, which ends with its holder however that dies."""
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise DeadlineError(f"{path} is locked by another process for {timeout_s:g} s") from error
                time.sleep(_LOCK_RETRY_S)
        yield
