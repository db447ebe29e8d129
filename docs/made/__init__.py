"""The documents that are made of the code: `python -m docs.made` writes them.

coming_from    docs/coming-from.md
configuration  docs/configuration.md
metrics        docs/metrics.md
"""
