"""The promises that every world is checked against."""
