"""The sampled tokens as the next prompt."""
