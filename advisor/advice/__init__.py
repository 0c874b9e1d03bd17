"""Advice: what to change in a training loop, and what it would save.

`edits` is the vocabulary of changes to a step, `replay/` works out the step time after them, `rules/` holds
the rules, one file a family, `patterns/` what several of them look for, and `advise` runs them all.
"""
