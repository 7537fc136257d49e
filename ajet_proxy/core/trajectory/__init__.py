"""The record of a call, timelines, drift, rewards and samples."""
