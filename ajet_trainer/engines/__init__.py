"""Everything that a trainer asks of inference servers; no backend asks them itself. `vllm` alone has the words of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


class EngineLost(RuntimeError):
    """An engine died, did not take the weights or serves others; the message says which one and what is known. A step
    that fails of it did not fail of its episodes (`ajet_trainer.attempts`)."""


def each(urls: Sequence[str], tell: Callable[[str], None]) -> None:
    """Has `tell` done with every engine at once. Raises `EngineLost`, with what is wrong with each that failed."""
    with ThreadPoolExecutor(max(1, len(urls))) as pool:
        failures = [failure for told in [pool.submit(tell, url) for url in urls] if (failure := told.exception())]
    lost = [failure for failure in failures if isinstance(failure, EngineLost)]
    for failure in failures:
        if failure not in lost:
            raise failure
    if lost:
        raise EngineLost("; ".join(map(str, lost))) from lost[0]
