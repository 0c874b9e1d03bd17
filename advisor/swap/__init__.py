"""Swap: find what a faster kernel can replace in this loop, prove it, time it, keep what wins, undo it.

`sites` and `rewrite` find what can be replaced, `kinds/` says with what, `verify` proves it on the loop's own
tensors, `measure` times it, `journal` applies and restores, `session` runs the whole.
"""
