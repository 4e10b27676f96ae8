"""A look inside a run: which op ran in which precision, what that cost, and what to change."""
