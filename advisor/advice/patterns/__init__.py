"""Calls that one kernel could do, found by names, order and sizes."""
