"""Evaluation on held-out prompts: sampled and scored as in a rollout, without log-probs, advantages and rows.

alone    a model outside a run: `rlhfd eval`
roller   the prompts of one file, their responses and results
"""
