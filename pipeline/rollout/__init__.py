"""The rollout worker: prompts in, sealed experience out.

environment      rows of several turns: environments in processes, and the turns of a ticket
evaluation       held-out prompts, sampled and scored alone
first_rollouts   rollouts before the first ticket, so that a broken reward ends the start
generation       engines behind one interface
insert_gate      checks of a rollout before it is sealed
loader           loading of a worker's models, reward and engine, tried on one prompt
maker            `NaiveExperienceMaker`: prompts to experience, PPO and GRPO
metrics          a worker's metrics
model_passes     forward passes over sampled rows: log-probs, values, rewards
node_watch       the nodes of the cluster that join and leave
process          the worker process
prompt_batch     prompts with their sampling parameters, requests to an engine and the rows of its responses
ray              the gateway to Ray actors that hold the models; the only import of ray
remote           a worker's models on another machine, without Ray's part
response_text    the text of a response for rewards and environments
reward           reward functions, in processes that can be killed
roller           prompts rendered, passed to the maker
rows             prompts and responses end to end, as the maker computes with them
sample_recorder  sampled rollouts, recorded for people to read
sampling         sampling parameters of rollouts and held-out prompts, with the tokens that end a response
shaping          rewards, advantages and further fields by configuration
sleep            the engine's turns on a card that a trainer shares
start_check      the findings of a start without weights, for `rlhfd config check`
ticket_stream    streams of tickets: several rollouts in hand
vision_prompts   prompts with images
worker           the worker's decisions: ticket, weights, message
worker_progress  the part that a worker's metrics and an actor's telemetry share
"""
