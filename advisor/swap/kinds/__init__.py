"""What can take the place of which module: one file a kind, each registers itself with `kind`."""
