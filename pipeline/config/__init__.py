"""The configuration: every key, its checks, its sources.

advice          the key that a mistyped key or value was meant to be
changes         the keys that a reload may change
conflicts       conflicts between keys
derived         defaults that follow from other keys, the model or the device
evaluation      keys of the evaluation on held-out prompts
foreign         options of TRL, verl and OpenRLHF, and their keys here
identity        the identity of a run, and its folder
json_schema     the JSON schema, for editors
lengths         tokens of prompt, response and row; bounds on their bytes
load            file, environment and --set merged into one configuration
losses          keys of losses and advantages
model_files     a model's sizes, from its files' headers
optimizers      the optimizers by name: their packages, bytes of their moments
own_model       defaults of a run with a model of its own
plan            bytes that a run needs on each device
positions       tokens that a model has positions for
presets         defaults of published algorithms, by the name of one
prompts         files, columns, filters and template of prompts
rates           the learning rate over a run's steps
rewards         names, tables and options of reward functions
schema          every key with type, bound, unit and description
sections        base of the sections; buffer, HTTP server, trackers, samples, cluster
toml_positions  line and column of each key and value; places of errors in invalid TOML
types           types and validators of values
user_modules    where reward functions and engines are imported from
vllm_release    the admitted releases of vLLM
vocabularies    whether the models that read the actor's rows have its vocabulary
"""
