"""The pairs, a file a family of faults."""
