"""Patterns in plain code: the step's graph, read through Dynamo, with something faster in their place.

`StepRewrite` puts a module's step under the rewriter; `Rewriter` is the backend; `match` and `patterns/`
find what can be replaced; `edit` replaces it. See the modules' docstrings.
"""
