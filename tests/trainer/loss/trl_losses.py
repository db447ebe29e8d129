"""Losses and gradients of TRL's `GRPOTrainer` for a batch of this project; a program of its own, for TRL's sake.

    python -m tests.trainer.loss.trl_losses FOLDER

reads ``experience.pt`` and ``cases.json``, the configurations of TRL, and writes ``losses.pt``: for each case the loss
and the gradient of each parameter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from tests.support import tiny


def main(folder: Path) -> None:
    """Compute the losses of all cases."""
    experience = torch.load(folder / "experience.pt", weights_only=False)
    cases = json.loads((folder / "cases.json").read_text())
    tiny.llama(0).save_pretrained(folder / "model")
    torch.save([loss_of(experience, case, folder) for case in cases], folder / "losses.pt")


def loss_of(experience: Any, case: dict[str, Any], folder: Path) -> tuple[Tensor, list[Tensor]]:
    """Return TRL's loss of an experience, and the gradients of the parameters in their order."""
    rows = len(experience.sequences)
    words = {f"w{token}": token for token in range(tiny.VOCABULARY_SIZE)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1"
    )
    arguments: Any = {
        "output_dir": str(folder / "trl"), "use_cpu": True, "bf16": False, "report_to": [], "num_generations": rows,
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1, "disable_dropout": True,
        "use_bias_correction_kl": False, "model_init_kwargs": {"dtype": "float32"}, **case,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_dict({"prompt": ["w2"] * rows}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    columns = experience.action_mask.shape[1]
    mask = experience.action_mask.long()
    given = {
        "prompt_ids": experience.sequences[:, :-columns],
        "prompt_mask": experience.attention_mask[:, :-columns],
        "completion_ids": experience.sequences[:, -columns:],
        "completion_mask": mask,
        "advantages": experience.advantages,
        "old_per_token_logps": experience.action_log_probs,
        "ref_per_token_logps": experience.base_action_log_probs,
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model, given)
    parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return loss.detach(), [gradient.clone() for gradient in torch.autograd.grad(loss, parameters)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
