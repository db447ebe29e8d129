"""The rollout worker: prompts in, sealed experience out.

generation       engines behind one interface
insert_gate      checks of a rollout before it is sealed
loader           loading of a worker's models, reward and engine, tried on one prompt
maker            `NaiveExperienceMaker`: prompts to Experience, PPO and GRPO
metrics          a worker's metrics
model_passes     forward passes over sampled rows: log-probs, values, rewards
process          the worker process
progress         heartbeats with the numbers of rows and tokens done
ray              the gateway to Ray actors that hold the models; the only import of ray
remote           a worker's models on another machine, without Ray's part
reward           reward functions, in processes that can be killed
roller           the interface of a worker to its models; prompts rendered, padded, passed to the maker
rows             prompts and responses as rows of a batch
sample_recorder  sampled rollouts, recorded for people to read
vision_prompts   prompts with images
worker           the worker's decisions: ticket, weights, message
"""
