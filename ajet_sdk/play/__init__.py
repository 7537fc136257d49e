"""Plays agents: an episode, the client that plays it, the schedule of a run, programs, and what a terminal shows."""
