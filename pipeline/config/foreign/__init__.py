"""The options of TRL, verl and OpenRLHF and their keys: the source of docs/coming-from.md, conversions and advice.

conversion      a file's options as a configuration, and what could not be carried
files           options read from JSON, YAML and shell scripts
lookup          the answer to a key that is an option of another trainer
openrlhf        the options of OpenRLHF
option          an option: its key, conversion and reason
program         options read from a Python program of TRL
script          the words of a shell script's commands, with its variables and arrays
trl             the options of TRL
verl            the options of verl
"""
