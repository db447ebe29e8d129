"""The process of `benches.engine_ways.Bare`: a line of JSON in, `LLM.generate`, a line of JSON out."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main(arguments: dict[str, Any]) -> None:
    """Serve until standard input is closed."""
    engine = LLM(**arguments)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        prompts, parameters = [], []
        for ids, seeds in zip(work["prompts"], work["seeds"], strict=True):
            for seed in seeds:
                prompts.append(TokensPrompt(prompt_token_ids=ids))
                parameters.append(
                    SamplingParams(
                        seed=seed,
                        max_tokens=work["room"],
                        temperature=1.0,
                        stop_token_ids=[work["eos"]],
                        ignore_eos=True,
                        detokenize=False,
                    )
                )
        # Every turn has prompts of its own; the groups share theirs, as in the daemon.
        began_s = time.perf_counter()
        outputs = engine.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
