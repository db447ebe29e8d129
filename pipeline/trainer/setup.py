"""Makes the embedded task of `pipeline.sort_digits`: `prepare`, and the setup process around it (`run`).

The supervisor starts the setup process before every process that loads the model; it exits when the model is made.
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

from pipeline import sort_digits
from pipeline.config.schema import Config
from pipeline.errors import DeadlineError, ExitCode
from pipeline.runtime.role import Report, RoleContext
from pipeline.storage.files import NO_LOCKS, try_lock

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

_REPORT_EVERY_STEPS = 10
_PAD, _EOS = 0, 1
_DIGITS_LEAST, _DIGITS_MOST = 3, 8
_WARMUP_ROWS = 64
_WARMUP_LEARNING_RATE = 2e-3
_WARMUP_BETAS = (0.9, 0.99)
_RISE_STEPS = 5
_IGNORED_LABEL = -100
_LOCK_RETRY_S = 0.05


def prepare(
    directory: str | os.PathLike[str],
    *,
    model_seed: int = 0,
    warmup_steps: int = sort_digits.WARMUP_STEPS,
    timeout_s: float = 300.0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Make model, tokenizer and prompts, unless they exist; an incomplete directory or another recipe is replaced.

    The directory appears whole, by a rename. Concurrent callers wait for the caller that makes it. It takes about 8 s
    on one thread and leaves the random state of the caller unchanged.

    Args:
        directory: The directory to make; its parents are made too.
        model_seed: Seed of the weights and of the warm-up's rows.
        warmup_steps: Supervised steps; fewer steps give a model that solves fewer prompts.
        timeout_s: Longest wait, in seconds, for another caller to finish.
        progress: Called with (steps done, steps in all) after each supervised step.

    Raises:
        DeadlineError: If another caller holds the lock for longer than `timeout_s`.
        OSError: If the directory cannot be written.
    """
    directory = Path(directory)
    if sort_digits.is_prepared(directory, model_seed=model_seed, warmup_steps=warmup_steps):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(f".{directory.name}.lock"), timeout_s):
        if sort_digits.is_prepared(directory, model_seed=model_seed, warmup_steps=warmup_steps):
            return
        partial = directory.with_name(f".{directory.name}.partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        _write_prompts(sort_digits.prompts_path(partial))
        _make_model(
            sort_digits.model_directory(partial), model_seed, warmup_steps, progress or (lambda done, total: None)
        )
        recipe = {**sort_digits.recipe_of(model_seed, warmup_steps), "file_bytes": sort_digits.file_bytes_of(partial)}
        (partial / "recipe.json").write_text(json.dumps(recipe))
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)


def _digits(rng: random.Random) -> str:
    # Python guarantees the same sequence on every version for random() alone.
    length = _DIGITS_LEAST + int(rng.random() * (_DIGITS_MOST - _DIGITS_LEAST + 1))
    return "".join(str(int(rng.random() * 10)) for _ in range(length))


def _write_prompts(path: Path) -> None:
    rng = random.Random(0)
    with path.open("w", encoding="ascii") as file:
        for _ in range(sort_digits.PROMPT_COUNT):
            digits = _digits(rng)
            file.write(json.dumps({"prompt": f"{digits}>", "answer": "".join(sorted(digits))}) + "\n")


def _make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbol_ids = {symbol: token_id for token_id, symbol in enumerate(sort_digits.SYMBOLS)}
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
        vocab_size=len(sort_digits.SYMBOLS),
        hidden_size=sort_digits.HIDDEN,
        intermediate_size=sort_digits.INNER,
        num_hidden_layers=sort_digits.LAYERS,
        num_attention_heads=sort_digits.HEADS,
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

    from pipeline.models.attention_kernels import without_cudnn_attention

    optimizer = torch.optim.AdamW(model.parameters(), lr=_WARMUP_LEARNING_RATE, betas=_WARMUP_BETAS)
    # Without the decay at the end, rounding alone (another CPU, other threads) moves the share of solved prompts
    # between 0.22 and 0.45.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _RISE_STEPS, 2 * (1 - step / max(warmup_steps, 1)))
    )
    model.train()
    with torch.enable_grad(), without_cudnn_attention():
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
    """Return rows ``7302>0237<eos>``, padded on the right, and labels that count the answer alone."""
    import torch

    symbol_ids = {symbol: token_id for token_id, symbol in enumerate(sort_digits.SYMBOLS)}
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
    """Hold an exclusive flock."""
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        try:
            while not try_lock(file.fileno(), fcntl.LOCK_EX):
                if time.monotonic() >= deadline:
                    raise DeadlineError(f"{path} is locked by another process for {timeout_s:g} s")
                time.sleep(_LOCK_RETRY_S)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def run(config: Config, context: RoleContext) -> ExitCode:
    """Make the embedded task under the state directory."""
    directory = sort_digits.directory_of(config.daemon.state_dir)

    def report(done: int, steps: int) -> None:
        if done % _REPORT_EVERY_STEPS == 0 or done == steps:
            context.report(Report(progress=f"making the embedded model: warm-up step {done} of {steps}"))

    prepare(directory, progress=report)
    return ExitCode.OK
