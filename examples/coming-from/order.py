"""A reward with OpenRLHF's signature, for openrlhf.sh, and the same for rlhfd."""

import itertools


def reward_func(queries, prompts, labels, **kwargs):
    """Return OpenRLHF's rewards: of each query, which is a prompt and its response."""
    import torch

    scores = [in_order(query[len(prompt) :]) for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": torch.tensor(scores), "scores": torch.tensor(scores)}


def score(input_ids, attention_mask, *, response, **_):
    """Return rlhfd's reward of a response."""
    return in_order(response)


def in_order(text):
    """Return the share of neighbours that are in order."""
    pairs = list(itertools.pairwise(text))
    return sum(one <= two for one, two in pairs) / len(pairs) if pairs else 0.0
