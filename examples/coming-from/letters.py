"""Rewards with TRL's signature, for trl.yaml."""


def right_letters(prompts, completions, answer, **kwargs):
    """Return for each completion the share of characters that stand in their right places."""
    return [
        sum(mine == right for mine, right in zip(completion, wanted, strict=False)) / max(len(completion), len(wanted))
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def right_length(completions, answer, **kwargs):
    """Return 1 for each completion that is as long as the answer."""
    return [float(len(completion) == len(wanted)) for completion, wanted in zip(completions, answer, strict=True)]
