"""Whose request it is: headers, keys, the ladder of names, what a retry says of itself."""
