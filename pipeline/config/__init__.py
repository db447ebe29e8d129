"""The configuration: every key, its checks, its sources.

advice          the key that a mistyped key or value was meant to be
changes         the keys that a reload may change
conflicts       conflicts between keys
identity        the identity of a run, and its folder
lengths         tokens of prompt, response and row
load            file, environment and --set merged into one configuration
reference       docs/configuration.md
schema          every key with type, bound, unit and description
sections        base of the sections; HTTP server, samples, cluster
sizes           bounds on the bytes of rows
toml_advice     corrections of invalid TOML
toml_positions  line and column of each key and value
types           types and validators of values
user_modules    where reward functions and engines are imported from
"""
