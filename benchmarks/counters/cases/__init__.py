"""The cases of the zoo, a file a family."""
