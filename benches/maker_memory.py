"""Peak memory of the maker's log-prob stage at a large vocabulary, against all logits at once.

Made-up rows of full length go through `NaiveExperienceMaker`'s log-prob stage with a Llama of few parameters and a real
vocabulary, float32 on the CPU, once for each `logits_forward_batch_size`, and once the naive way: the logits of all
rows and positions, then log_softmax. Each runs in a process of its own; its figure is the process's largest resident
set (VmHWM) minus the resident set just before the stage. The bound is that of `pipeline.models.chunked_log_probs`: one
chunk of logits in float32, the chunk divided by the temperature, and its exp in the log-sum-exp.
It takes 8 GiB of memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benches.llama import llama
from benches.report import ROOT, Section, Table
from pipeline.models import chunked_log_probs
from pipeline.rollout.model_passes import ModelPasses
from pipeline.rollout.rows import Rows

PROMPT_COLUMNS = 32
_ROWS = 8
TEMPERATURE = 0.8
MIB = 2**20


def tiny_llama(vocabulary: int) -> LlamaForCausalLM:
    """Return a Llama that is small but for its vocabulary."""
    torch.manual_seed(0)
    return llama(64, 2, vocabulary, intermediate_size=128)


def made_up_rows(columns: int, vocabulary: int) -> Rows:
    """Return rows of full length, as after a generator."""
    tokens = torch.randint(3, vocabulary, (_ROWS * columns,))
    num_actions = columns - PROMPT_COLUMNS
    prompts, lengths = np.full(_ROWS, PROMPT_COLUMNS), np.full(_ROWS, num_actions)
    return Rows(tokens, prompts, lengths, PROMPT_COLUMNS, num_actions, pad_token_id=0, cut=torch.zeros(_ROWS))


@torch.no_grad()
def measure(columns: int, vocabulary: int, variant: int) -> dict[str, float]:
    """Run one variant in this process: mini-batches of so many rows, or 0 for all logits at once."""
    model, rows = tiny_llama(vocabulary), made_up_rows(columns, vocabulary)
    passes = ModelPasses(None, variant or None, True)
    # Not ru_maxrss: that of a new program starts at its parent's value.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    started_s = time.perf_counter()
    if variant:
        log_probs = passes.log_probs("actor", model, rows, TEMPERATURE)
    else:
        sequences, mask, _ = rows.padded(np.arange(_ROWS), trim=False)
        logits = model(input_ids=sequences, attention_mask=mask).logits
        whole = (logits[:, PROMPT_COLUMNS - 1 : -1] / TEMPERATURE).log_softmax(dim=-1)
        log_probs = whole.gather(-1, sequences[:, PROMPT_COLUMNS:, None]).squeeze(-1)
    elapsed_s = time.perf_counter() - started_s
    peak = _peak_bytes()
    return {"peak_mib": (peak - before) / MIB, "seconds": elapsed_s, "sum": log_probs.double().sum().item()}


def _peak_bytes() -> int:
    """Return the peak of resident memory since the mark was reset."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def run(*, quick: bool) -> Sequence[Section]:
    """Measure the maker in mini-batches of several sizes, and all logits at once."""
    columns, vocabulary = (128, 8192) if quick else (512, 151_936)

    def child(variant: int) -> dict[str, float]:
        command = [sys.executable, "-m", "benches.maker_memory", *map(str, (columns, vocabulary, variant))]
        found: dict[str, float] = json.loads(
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE).stdout
        )
        return found

    naive, ours = child(0), {rows: child(rows) for rows in (1, 2, _ROWS)}
    if any(abs(one["sum"] - naive["sum"]) > 1e-5 * abs(naive["sum"]) for one in ours.values()):
        raise RuntimeError(f"the log-probs differ: {naive['sum']} naive, {[one['sum'] for one in ours.values()]}")
    bound_mib = 3 * 4 * min(chunked_log_probs.CHUNK_ELEMENTS, _ROWS * columns * vocabulary) / MIB
    parts = f"a chunk of {chunked_log_probs.CHUNK_ELEMENTS:,} logits, divided by the temperature, and its exp"
    found = [(f"the maker, in mini-batches of {rows}", one) for rows, one in ours.items()]
    found.append(("all logits at once, then log-softmax", naive))
    rows = [(name, f"{one['peak_mib']:,.0f} MiB", f"{one['seconds']:.0f} s") for name, one in found]
    rows.append((f"the maker's bound: {parts}", f"{bound_mib:,.0f} MiB", ""))
    text = (
        f"{_ROWS} rows of {columns} tokens at a vocabulary of {vocabulary:,}, float32 on the CPU. Peak resident memory"
        " of a process minus the resident memory just before the stage."
    )
    table = Table(("peak memory of the maker's log-prob stage", "figure", "time"), rows)
    return [Section("maker-memory", "Peak memory of log-probs at a large vocabulary", text, [table])]


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, sys.argv[1:]))))
