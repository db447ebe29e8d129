"""A reward with verl's signature, for verl.sh."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the share of digits that stand in their right places."""
    right = sum(mine == wanted for mine, wanted in zip(solution_str, ground_truth, strict=False))
    return right / max(len(solution_str), len(ground_truth))
