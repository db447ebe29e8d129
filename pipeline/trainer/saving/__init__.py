"""Versions published and checkpoints written beside training, and the best one of them.

background    one checkpoint in a thread, from the published weights in shared memory
best          the evaluations of a run, and the checkpoint of the best one
lower_halves  the float32 copies of a training state, without what the weights have
publishing    versions in a thread, from the live tensors
rank_models   the models of a rank, whole or sharded: publish, restore, save
"""
