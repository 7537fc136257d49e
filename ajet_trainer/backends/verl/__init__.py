"""verl as a backend."""

VENDOR = "ajet_forest"
"""The name under which verl's registry has the engines that compute forests: the value of ``VERL_ENGINE_VENDOR``."""
