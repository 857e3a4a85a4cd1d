"""`ringtile verify --backend NAME`: the same cases through anybody's context parallelism, each in processes of its own.

A case is a row of `attention_cases` or `training_cases`; a backend is a module of `backends`; `judge` runs one through
the other and gives a verdict; `page` writes the verdicts into a page.
"""
