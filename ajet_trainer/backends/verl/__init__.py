"""verl as a backend."""

VENDOR = "ajet_forest"
"""The name under which verl's registry has the engines that compute forests: the value of ``VERL_ENGINE_VENDOR``."""
ADDRESS = "VERL_AJET_ADDRESS"
"""The variable with the address that launched engines listen on, if they must not choose one."""
