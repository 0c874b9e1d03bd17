"""The patterns, one file a family; each registers itself with `advisor.swap.rewrite.match.pattern`.

A pattern's module says in its docstring which formula it takes and what it must not take. To add one is to
add a file here and its near misses to the tests.
"""
