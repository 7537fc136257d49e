"""Who failed, and what an episode earns: decided here alone, for programs and for functions, by threads and by asyncio.

Nothing in this package does I/O. `decision` decides, `numbers` reads what programs and graders print, `blame` tells
whose failure an exception is.
"""
