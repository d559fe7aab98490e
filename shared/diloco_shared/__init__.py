"""What every service shares: specification, protocol, numbers, bus and process."""

# Of this code. Processes say it to others, whatever else is installed beside them; the next release
# is told from the last one by it.
VERSION = "0.3.0.dev0"
