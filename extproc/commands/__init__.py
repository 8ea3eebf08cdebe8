"""One file per command: parse, build, call; no decisions."""
