"""Tests of what the functions of `stats` must do."""

import unittest

import stats


class Median(unittest.TestCase):
    def test_odd(self):
        assert stats.median([3, 1, 2]) == 2

    def test_even(self):
        assert stats.median([4, 1, 3, 2]) == 2.5


class Spread(unittest.TestCase):
    def test_some(self):
        assert stats.spread([3, 1, 2]) == 2

    def test_one(self):
        assert stats.spread([3]) == 0


if __name__ == "__main__":
    unittest.main()
