"""rlhfd: rollout, buffer and training processes of RLHF, kept running on a GPU server."""
