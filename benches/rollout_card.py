"""Generation on a card: CUDA graphs against single steps and `generate`, as shares of the bound by memory bandwidth.

A step reads every weight once, for any number of rows, and every row's keys and values; of the input embedding it reads
a line a row, which is left out. The lower bound of its time is
these bytes divided by the bandwidth that a copy on the card reaches in the same run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import LlamaForCausalLM

from benches.llama import llama
from benches.measure import Sample, interleaved, once
from benches.report import Section, Table
from pipeline.rollout.generation.hf_generate import ActorGenerator
from pipeline.rollout.generation.interface import Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator

_COPY_BYTES = 2**30
_PROMPT_TOKENS = 64


def section(*, quick: bool) -> Section:
    """Measure on the first card."""
    device = torch.device("cuda:0")
    hidden, layers, new_tokens = (256, 4, 32) if quick else (2048, 22, 256)
    heads, pairs = hidden // 64, max(1, hidden // 256)
    shape = {"intermediate_size": hidden * 11 // 4, "num_attention_heads": heads, "num_key_value_heads": pairs}
    torch.manual_seed(0)
    with device:
        model = llama(hidden, layers, 32_000, **shape, bos_token_id=None, eos_token_id=None).to(torch.bfloat16)
    weight_bytes = read_bytes(model)
    # Keys and values of a token in all layers, two bytes each.
    token_bytes = 2 * 2 * layers * pairs * 64
    bandwidth = _bandwidth(device)
    rows = []
    for batch in (8,) if quick else (1, 8, 64):
        found = interleaved(_ways(model, batch, new_tokens), 2 if quick else 3)
        taken = {way: Sample.of(values) for way, values in found.items()}
        mean_tokens = _PROMPT_TOKENS + new_tokens / 2
        least_s = new_tokens * (weight_bytes + batch * mean_tokens * token_bytes) / bandwidth
        for way, seconds in taken.items():
            share = Sample.of(least_s / value for value in seconds.values)
            speed = Sample.of(batch * new_tokens / value for value in seconds.values)
            rows.append((str(batch), way, str(speed), str(share), str(seconds.over(taken["CUDA graphs"]))))
    text = (
        f"{sum(weight.numel() for weight in model.parameters()) / 1e9:.2f} G parameters in bfloat16, {_PROMPT_TOKENS} +"
        f" {new_tokens} tokens, the most probable ones. The roofline is the time in which the card's memory, at the"
        f" {bandwidth / 1e9:,.0f} GB/s that a copy on it reached, reads all weights but the input"
        " embedding, and keys and values, once a token."
    )
    header = ("rows", "way", "tokens/s", "share of the roofline", "x CUDA graphs")
    return Section("rollout", "Generation on a card", text, [Table(header, rows)], torch.cuda.get_device_name())


def read_bytes(model: LlamaForCausalLM) -> int:
    """Return the bytes of the weights that a step reads: all, without an input embedding that is not the head, too."""
    read = {id(weight): weight.nbytes for weight in model.parameters()}
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        del read[id(model.get_input_embeddings().weight)]
    return sum(read.values())


def _ways(model: LlamaForCausalLM, batch: int, new_tokens: int) -> dict[str, Callable[[], float]]:
    prompts = torch.randint(2, 32_000, (batch, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    settings = Sampling(max_length=_PROMPT_TOKENS + new_tokens, pad_token_id=0, do_sample=False)
    engines = {
        "CUDA graphs": TransformersGenerator(model),
        "steps one by one": TransformersGenerator(model, fixed_shapes=False),
        "transformers generate": ActorGenerator(model),
    }

    def timed(engine: TransformersGenerator | ActorGenerator) -> float:
        return once(lambda: engine.generate(prompts, torch.ones_like(prompts), settings), on_card=True)

    for engine in engines.values():
        timed(engine)
    return {name: lambda engine=engine: timed(engine) for name, engine in engines.items()}


def _bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a copy on the card reads and writes."""
    source, target = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begins.record()
        target.copy_(source)
        ends.record()
        torch.cuda.synchronize()
        best = min(best, begins.elapsed_time(ends) / 1e3)
    return 2 * _COPY_BYTES / best
