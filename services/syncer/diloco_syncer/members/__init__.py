"""Who works for the run: admitted, asked, helped, counted."""
