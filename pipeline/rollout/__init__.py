"""The rollout worker: prompts in, sealed experience out.

generation       engines behind one interface
insert_gate      checks of a rollout before it is sealed
loader           a worker's models, reward and engine, loaded and tried
maker            `NaiveExperienceMaker`: prompts to Experience, PPO and GRPO
metrics          a worker's metrics
process          the worker process, or a worker's gateway to its Ray actor
ray              Ray actors that hold the models; the only import of ray
remote           a worker's models on another machine
reward_pool      reward functions in processes that can be killed
reward_process   the process of a reward pool
reward_wire      messages of a reward pool
rewards          reward functions as a reward model
roller           prompts rendered, padded and handed to the maker
rows             responses to rows of a batch
sample_recorder  rollouts recorded for people to read
vision_prompts   prompts with images
worker           the worker's decisions: ticket, weights, message
"""
