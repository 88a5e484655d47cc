"""The command line: ``moe-fusion``."""
