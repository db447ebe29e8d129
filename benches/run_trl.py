"""The embedded task by TRL's `GRPOTrainer`, in a process of its own; a line of JSON a step.

Started by `run` with the Python of TRL's environment. Settings and loss are rlhfd's defaults.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    """Train for the steps of the settings in the first argument."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from benches.run_plain import (
        BETAS,
        CLIP,
        CLIP_NORM,
        EPS,
        GROUP,
        KL_COEF,
        LEARNING_RATE,
        MAX_LENGTH,
        ROWS,
        learning_rate_ratio,
        score,
    )

    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    task, means = Path(settings["task"]), []
    checkpoints, save_steps = Path(settings["folder"]) / "trl", settings.get("save_steps", 0)
    assert EPS == 1e-4, "TRL's own"
    records = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    longest = max(len(tokenizer(record["prompt"])["input_ids"]) for record in records)

    def exact_answer(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        scores = [score(list(ids), right, tokenizer) for ids, right in zip(completion_ids, answer, strict=True)]
        means.append(sum(scores) / len(scores))
        return scores

    class Trace(TrainerCallback):
        """Writes the line of a step at its end."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with Path(settings["trace"]).open("a") as file:
                line = {"step": state.global_step, "time_unix_s": time.time(), "reward_mean": means[-1]}
                print(json.dumps(line), file=file)

    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact_answer,
        args=GRPOConfig(
            output_dir=str(checkpoints),
            seed=settings["seed"],
            use_cpu=not settings.get("device"),
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="steps" if save_steps else "no",
            save_steps=save_steps or 500,
            save_total_limit=1,
            logging_strategy="no",
            disable_tqdm=True,
            max_steps=settings["steps"],
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=1,
            num_iterations=1,
            num_generations=GROUP,
            max_completion_length=MAX_LENGTH - longest,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            beta=KL_COEF,
            epsilon=CLIP,
            loss_type="bnpo",
            scale_rewards="group",
            max_grad_norm=CLIP_NORM,
        ),
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
        callbacks=[Trace()],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_ratio)),
    )
    trainer.train(resume_from_checkpoint=any(checkpoints.glob("checkpoint-*")))


if __name__ == "__main__":
    main()
