"""Whose request it is: headers, keys, the ladder of names, and what a retry says about itself."""
