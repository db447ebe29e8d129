"""Rewards and advantages that TRL's `GRPOTrainer` gives rows of a run; a program of its own, for TRL's environment.

    python -m tests.daemon.trl_step FOLDER

reads ``trl.yaml`` as ``trl grpo --config trl.yaml`` does, and ``rows.json``: prompts, answers and the token ids of the
completions. Sampling alone is replaced, by these completions. It writes ``trl.json``: the reward and the advantage of
each row, and the names of all options of TRL.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import DatasetMixtureConfig, GRPOConfig, GRPOTrainer, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

CONFIGS = (GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig)


def main(folder: Path) -> None:
    """Score the rows."""
    rows = json.loads((folder / "rows.json").read_text())
    script, training, model, _ = TrlParser(CONFIGS).parse_args_and_config(["--config", str(folder / "trl.yaml")])
    sys.path.insert(0, str(folder))
    functions = []
    for name in script.reward_funcs:
        module, _, function = name.rpartition(".")
        functions.append(getattr(importlib.import_module(module), function))
    path = str(folder / model.model_name_or_path)
    trainer = GRPOTrainer(
        model=path,
        reward_funcs=functions,
        args=training,
        train_dataset=Dataset.from_list([{"prompt": one["prompt"], "answer": one["answer"]} for one in rows]),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    completions = [one["completion_ids"] for one in rows]
    given: dict[str, Any] = {}
    calculate = trainer._calculate_rewards

    def calculated(*arguments: Any) -> Any:
        given["rewards"] = calculate(*arguments)
        return given["rewards"]

    trainer._generate_single_turn = lambda *_: (completions, None)
    trainer._calculate_rewards = calculated
    trainer.model.train()
    found = trainer._generate_and_score_completions(
        [{"prompt": one["prompt"], "answer": one["answer"]} for one in rows]
    )
    rewards = (given["rewards"] * trainer.reward_weights).sum(dim=1)
    fields = sorted({one.name for config in CONFIGS for one in dataclasses.fields(config)})
    told = {"rewards": rewards.tolist(), "advantages": found["advantages"].tolist(), "options": fields}
    (folder / "trl.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
