"""`python -m tools.gauntlet BACKEND`: the same cases through anybody's context parallelism.

A case is a row of `attention_cases` or `training_cases`; a backend is a module of `backends`; `judge` runs one through
the other and gives a verdict; `page` writes the verdicts into a page.
"""
