"""Peak memory of the maker's log-prob stage at a large vocabulary, against all logits at once.

Made-up rows of full length go through `NaiveExperienceMaker`'s log-prob stage with a Llama of few parameters and a real
vocabulary, float32 on the CPU, once for each `logits_forward_batch_size`, and once the naive way: the logits of all
rows and positions, then log_softmax. Each runs in a process of its own; its figure is the process's largest resident
set (ru_maxrss) less what was resident just before the stage. The bound is what `pipeline.token_log_probs` allows: one
chunk of logits in float32, the chunk divided by the temperature, and its exp in the log-sum-exp.

    .venv/bin/python benches/maker_memory.py            # some minutes and 8 GiB of memory
    .venv/bin/python benches/maker_memory.py --chunk 16777216
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline import token_log_probs
from pipeline.experience_maker import NaiveExperienceMaker
from pipeline.generation import Responses, Sampling
from pipeline.generation.rows import Rows

PROMPT_COLUMNS = 32
TEMPERATURE = 0.8
MIB = 2**20


def tiny_llama(vocabulary: int) -> LlamaForCausalLM:
    """A Llama whose only large thing is its vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).eval()


def made_up_rows(options: argparse.Namespace) -> Rows:
    """Rows of full length, as a generator would have left them."""
    sequences = torch.randint(3, options.vocabulary, (options.rows, options.columns))
    lengths = torch.full((options.rows,), options.columns - PROMPT_COLUMNS)
    sampling = Sampling(max_length=options.columns, pad_token_id=0)
    return Rows.of(torch.ones(options.rows, PROMPT_COLUMNS), Responses(sequences, lengths), sampling)


@torch.no_grad()
def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run one variant in this process."""
    token_log_probs.CHUNK_ELEMENTS = options.chunk
    model, rows = tiny_llama(options.vocabulary), made_up_rows(options)
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    maker = NaiveExperienceMaker(
        model, None, None, None, tokenizer, 0.0, use_grpo=True, logits_forward_batch_size=options.variant or None
    )
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    started_s = time.perf_counter()
    if options.variant:
        log_probs = maker._log_probs("actor", model, rows, TEMPERATURE)
    else:
        logits = model(input_ids=rows.sequences, attention_mask=rows.attention_mask).logits
        whole = (logits[:, PROMPT_COLUMNS - 1 : -1] / TEMPERATURE).log_softmax(dim=-1)
        log_probs = whole.gather(-1, rows.sequences[:, PROMPT_COLUMNS:, None]).squeeze(-1)
    elapsed_s = time.perf_counter() - started_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_mib": (peak - before) / MIB, "seconds": elapsed_s, "sum": log_probs.double().sum().item()}


def main() -> None:
    """Run every variant in a process of its own and print the rows of README's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="rows (B)")
    parser.add_argument("--columns", type=int, default=512, help="columns of prompt and response (S)")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="words (V), by default Qwen's")
    parser.add_argument("--chunk", type=int, default=token_log_probs.CHUNK_ELEMENTS, help="logits at once")
    parser.add_argument("--variant", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is not None:
        print(json.dumps(measure(options)))
        return

    def child(variant: int) -> dict[str, float]:
        command = [sys.executable, *sys.argv, f"--variant={variant}"]
        result: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        return result

    naive = child(0)
    ours = {rows: child(rows) for rows in (1, 2, 8)}
    if any(abs(one["sum"] - naive["sum"]) > 1e-5 * abs(naive["sum"]) for one in ours.values()):
        sys.exit(f"the log-probs differ: {naive['sum']} naive, {[one['sum'] for one in ours.values()]}")
    for name, one in [("naive", naive), *((f"{rows} rows", one) for rows, one in ours.items())]:
        print(f"{name}: {one['peak_mib']:,.0f} MiB, {one['seconds']:.0f} s", file=sys.stderr)
    peaks = ", ".join(f"{one['peak_mib']:,.0f}" for one in ours.values())
    bound = 3 * 4 * min(options.chunk, options.rows * options.columns * options.vocabulary) / MIB
    print(f"| the maker, in mini-batches of 1, 2 and 8 rows | {peaks} MiB |")
    what = f"a chunk of {options.chunk:,} logits, divided by the temperature, and its exp"
    print(f"| its bound: {what} | {bound:,.0f} MiB |")
    print(f"| all logits at once, then log-softmax | {naive['peak_mib']:,.0f} MiB |")


if __name__ == "__main__":
    main()
