"""A round: who is asked, when it closes, what is refused."""
