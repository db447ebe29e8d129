"""TRL's own rollout in a process of its own: `GRPOTrainer` generates and scores the same prompts on request.

Started by `rollout` with the Python of TRL's environment, over pipes: each line asks for one turn.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch


def main() -> None:
    """Answer turns until the input ends."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    folder, rows = Path(settings["folder"]), settings["rows"]
    trainer = GRPOTrainer(
        model=str(folder / "actor"),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=rows,
            num_generations=settings["group_size"],
            max_completion_length=settings["new_tokens"],
            generation_kwargs={"do_sample": False, "top_k": 0, "top_p": 1.0},
            beta=0.01,
            model_init_kwargs={"dtype": "float32"},
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": settings["prompts"]}),
    )
    prompts = [{"prompt": text} for text in settings["prompts"] for _ in range(settings["group_size"])]
    for line in sys.stdin:
        if not line.strip():
            return
        trainer.model.eval()
        began_s = time.perf_counter()
        made = trainer._generate_and_score_completions(prompts)
        seconds = time.perf_counter() - began_s
        torch.save(
            {
                "seconds": seconds,
                "tokens": made["completion_ids"],
                "mask": made["completion_mask"],
                "base_log_probs": made["ref_per_token_logps"],
            },
            folder / "turn.pt",
        )
        print("DONE", flush=True)


if __name__ == "__main__":
    main()
