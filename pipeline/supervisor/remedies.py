"""The configuration keys that help after a kill for hanging, or after memory ran out."""

from __future__ import annotations

from typing import Final

_SMALLER: Final = {
    "generate": "lower rollout.inference_batch_size or rollout.max_length",
    "logprob": "lower rollout.logits_forward_batch_size",
    "ref_logprob": "lower rollout.logits_forward_batch_size",
    "value": "lower rollout.logits_forward_batch_size",
    "reward": "lower rollout.inference_batch_size or rollout.reward_timeout_s",
    "train": "lower trainer.micro_batch_size",
}
_LESS_MEMORY: Final = {
    "rollout": "rollout.logits_forward_batch_size, rollout.inference_batch_size, rollout.batch_size or rollout.workers",
    "trainer": "trainer.micro_batch_size, buffer.sample_batch_size or rollout.max_length",
}


def after_hang(reason: str, stage: str) -> str:
    """Return the keys that help after a kill for hanging; empty if none does.

    Args:
        reason: Of the verdict (`pipeline.supervisor.hangs.Reason`).
        stage: The activity of the process.
    """
    if reason == "ticket overdue":
        return "raise rollout.ticket_timeout_s, or lower rollout.batch_size or rollout.max_length"
    if reason != "no progress" or stage not in _SMALLER:
        return ""
    return f"{_SMALLER[stage]}, or raise daemon.hang_timeout_s"


def after_exit(role: str, ended_by: str, reason: str) -> str:
    """Return the keys that help after an exit for want of memory; empty after any other exit.

    Args:
        role: Of the process.
        ended_by: As in `pipeline.supervisor.fleet.Slot`; "oom" after a kill by the kernel.
        reason: The error that the process reported, or its last line.
    """
    if role not in _LESS_MEMORY or not (ended_by == "oom" or "out of memory" in reason.lower()):
        return ""
    return f"out of memory: lower {_LESS_MEMORY[role]}"
