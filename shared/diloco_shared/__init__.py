"""What every service shares: specification, protocol, numbers, bus and process."""

# Of this code. Processes say it to others, whatever is installed beside them. Between two releases
# it is the next one's, with `.dev0`, so that this code is told from the last release.
# `version` in pyproject.toml is the same.
VERSION = "0.3.0.dev0"
