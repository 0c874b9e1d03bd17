"""The rules, one file a family. Each module here is loaded when rules are asked for."""
