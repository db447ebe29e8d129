"""The trainer: steps, publishes, checkpoints, resumes.

batch          a loss's inputs: checked, filtered, cut to size
checkpoints    Hugging Face folders with the training state, whole or absent
connect        connections over ZeroMQ; `pipeline.connect`
connection     the trainer's connection to the buffer
learner        one optimizer step of PPO or GRPO
losses         policy and value losses, whitening
metrics        a rank's metrics
optimizer      the step of one model over ranks; the learning rate
prefetch       batches copied to the device ahead of use
process        the process of a rank
publish_check  refusal of weights that workers could not use
resume         the point from which a trainer starts
session        a rank's leases and messages with the buffer
setup          makes the embedded model: `prepare` and its process
state          the training state beside the weights; the learner's interface
step_stats     the statistics of one step
trainer        a rank's decisions: step, publish, end
"""
