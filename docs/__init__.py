"""The documents; `hooks` is for the site that mkdocs builds of them, `made` has the generated ones."""
