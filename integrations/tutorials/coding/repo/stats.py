"""Small statistics."""


def median(values):
    """The middle value; of an even number of values, the mean of the two in the middle."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def spread(values):
    """The largest value less the smallest."""
    return max(values) + min(values)
